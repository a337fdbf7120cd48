"""The contract of a grader, as checks that can be run on any grader.

``check_grader`` runs all of them; a test suite can run them one by one::

    @pytest.mark.parametrize("check", GRADER_CHECKS, ids=lambda check: check.__name__)
    def test_my_grader(check):
        check(GraderCase(my_grader, completions, rows))
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from agilerl.checks.arguments import checked
from agilerl.errors import RewardError
from agilerl.rewards.grader import Grader, ScoreOrError, attempt_grader, close, grader_name, setup

ODD_TEXTS = (
    "",
    " \n\t",
    "a" * 20_000,
    "9" * 5_000,  # more digits than int() reads
    "é漢字\U0001f642\u202e\x00",  # accents, wide characters, an emoji, right to left, a null
    "<answer></answer><answer>",  # an empty answer, and one that never ends
    "```python\n",
    '{"a": [',
    "[" * 5_000,  # deeper than parsers recurse
    "\\boxed{\\frac{1}{0}}",
    "%s {0} {{ x }} ${y}",  # placeholders of four template languages
    "<|im_end|><|endoftext|></s>",  # end tokens, typed as text
)
"""Odd texts that a model may generate."""


@dataclass(frozen=True)
class GraderCase:
    """A grader with something to grade."""

    grader: Grader
    completions: Sequence[str]
    """Two or more, at least one of which has a score."""
    rows: Sequence[Mapping[str, Any]]
    """The row of each completion."""
    tolerance: float = 1e-5
    """The most that a score may change with the rest of its batch."""

    def outcomes(self) -> list[ScoreOrError]:
        """Grade everything at once."""
        return self.grade(self.completions, self.rows)

    def grade(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[ScoreOrError]:
        """Grade on copies of the rows, so that no check sees changes made during another."""
        return attempt_grader(self.grader, completions, copy.deepcopy(list(rows)))


def check_has_a_name(case: GraderCase) -> None:
    """The name consists of letters, digits and ``_ . / -``, because metrics are called ``rewards/<name>/mean``."""
    name = grader_name(case.grader)
    if not re.fullmatch(r"[\w./-]+", name):
        raise RewardError(f"expected a name of letters, digits and _ . / -, found {name!r}; give the grader a name")


def check_scores_are_numbers(case: GraderCase) -> None:
    """One finite number or None for each completion, no failure, and at least one number."""
    outcomes = case.outcomes()
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise RewardError(f"expected a score for every completion of the case, found a failure: {outcome}")
    if len(outcomes) != len(case.completions) or not any(isinstance(o, float) and math.isfinite(o) for o in outcomes):
        raise RewardError(f"expected {len(case.completions)} scores, at least one of them a number, found {outcomes}")


def check_repeats_itself(case: GraderCase) -> None:
    """Grading the same completions again gives the same scores."""
    _agree(case, case.outcomes(), case.outcomes(), "graded again")


def check_takes_each_completion_for_itself(case: GraderCase) -> None:
    """A score depends neither on the rest of the batch nor on the order."""
    together = case.outcomes()
    alone = [case.grade([text], [row])[0] for text, row in zip(case.completions, case.rows)]
    _agree(case, together, alone, "graded alone")
    backwards = case.grade(case.completions[::-1], case.rows[::-1])[::-1]
    _agree(case, together, backwards, "graded in another order")


def check_leaves_its_input_alone(case: GraderCase) -> None:
    """The grader changes neither rows nor completions."""
    completions, rows = list(case.completions), copy.deepcopy(list(case.rows))
    attempt_grader(case.grader, completions, rows)
    if completions != list(case.completions) or rows != list(case.rows):
        raise RewardError("expected a grader to leave completions and rows unchanged, found them changed; copy first")


def check_answers_odd_texts(case: GraderCase) -> None:
    """Any text that a model may generate gets a score, or None, but never a failure."""
    for text, row in zip(ODD_TEXTS, cycle(case.rows)):
        (outcome,) = case.grade([text], [row])
        if isinstance(outcome, RewardError):
            raise RewardError(f"expected a score or None for the text {text[:40]!r}, found a failure: {outcome}")


def check_opens_and_closes(case: GraderCase) -> None:
    """``setup`` and ``close`` may be called repeatedly, and a closed grader can be used again."""
    before = case.outcomes()
    # Twice, since a second opening may meet what the first closing has left behind.
    for _ in range(2):
        setup(case.grader)
        setup(case.grader)
        _agree(case, before, case.outcomes(), "graded after setup")
        close(case.grader)
        close(case.grader)
    setup(case.grader)
    _agree(case, before, case.outcomes(), "graded after close and setup")


GRADER_CHECKS: tuple[Callable[[GraderCase], None], ...] = (
    check_has_a_name,
    check_scores_are_numbers,
    check_repeats_itself,
    check_takes_each_completion_for_itself,
    check_leaves_its_input_alone,
    check_answers_odd_texts,
    check_opens_and_closes,
)
"""Each raises a RewardError that says what is wrong."""


@checked
def check_grader(grader: Grader, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with a grader, in sentences; an empty list if it passes every check."""
    case, mistakes = GraderCase(grader, completions, rows), []
    for check in GRADER_CHECKS:
        try:
            check(case)
        except RewardError as error:
            mistakes.append(str(error))
    return mistakes


def _agree(case: GraderCase, before: Sequence[ScoreOrError], after: Sequence[ScoreOrError], how: str) -> None:
    for text, one, other in zip(case.completions, before, after):
        if isinstance(one, float) and isinstance(other, float):
            same = math.isclose(one, other, rel_tol=case.tolerance, abs_tol=case.tolerance)
        else:
            same = type(one) is type(other)
        if not same:
            raise RewardError(f"expected the same score when {how}, found {one} and {other} for {text[:40]!r}")
