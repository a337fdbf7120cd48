"""The scores of a batch of completions, kept separately for each grader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agilerl.arguments import checked
from agilerl.errors import RewardError
from agilerl.rewards.grader import Grader, ScoreOrError, attempt_grader, grader_name

Grade = float | None


@dataclass(frozen=True)
class Grades:
    """Rewards of N completions, and the scores of each grader that they were computed from."""

    rewards: list[Grade]
    """[N]; the rewards for training. None: no grade, which is masked out and never counts as 0."""
    scores: dict[str, list[Grade]] = field(default_factory=dict)
    """By grader, [N], before any weight; None if it did not apply or failed."""
    failures: dict[str, list[int]] = field(default_factory=dict)
    """By grader, the indices of completions on which it failed: raised, timed out, or returned an invalid score."""
    reasons: dict[int, RewardError] = field(default_factory=dict)
    """By completion index, the first error."""

    @property
    def errors(self) -> dict[str, int]:
        """How often each grader failed."""
        return {name: len(places) for name, places in self.failures.items()}

    def scores_at(self, place: int) -> dict[str, Grade]:
        """Return the score of each grader for one completion."""
        return {name: column[place] for name, column in self.scores.items()}

    def failed_at(self, place: int) -> tuple[str, ...]:
        """Return the graders that failed on one completion."""
        return tuple(name for name, places in self.failures.items() if place in places)


class AllGradesFailedError(RewardError):
    """A grader failed on every completion of a batch."""

    def __init__(self, message: str, reasons: Mapping[int, RewardError]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)
        """The error of each completion, by index."""


@runtime_checkable
class Composite(Protocol):
    """A grader that reports several scores separately."""

    def grade(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[str] | None = None,
    ) -> Grades:
        """Return rewards with the scores that they were computed from."""


@checked
def grade(
    grader: Grader,
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str] | None = None,
) -> Grades:
    """Score ``completions`` with any grader; a completion on which it fails gets None and is counted.

    Arguments are those of ``call_grader``. A ``CombinedGrader`` reports a column for each of its graders.

    Raises:
        RewardError: the grader failed on every completion, so the grader itself is broken; or it broke its protocol
            (see ``attempt_grader``).
    """
    if isinstance(grader, Composite):
        return grader.grade(completions, rows, prompts)
    return grades_of(grader_name(grader), attempt_grader(grader, completions, rows, prompts))


def grades_of(name: str, outcomes: Sequence[ScoreOrError]) -> Grades:
    """Return the outcomes of one grader as grades.

    Raises:
        AllGradesFailedError: all outcomes are failures.
    """
    failures = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, RewardError)}
    if failures and len(failures) == len(outcomes):
        count = f"{name} failed on all {len(outcomes)} completions; the first error: " if len(outcomes) > 1 else ""
        raise AllGradesFailedError(f"{count}{failures[0]}", failures) from failures[0]
    scores = [None if isinstance(outcome, RewardError) else outcome for outcome in outcomes]
    return Grades(list(scores), {name: scores}, {name: list(failures)}, failures)
