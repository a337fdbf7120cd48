"""Several graders as one: a weighted sum that keeps the score of each grader for the logs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from agilerl.checks.arguments import Name, checked, taken
from agilerl.checks.validation import LARGEST_FLOAT32
from agilerl.errors import ConfigError, RewardError
from agilerl.rewards.grader import BaseGrader, Columns, Grade, Grader, Grades, close, grade, grader_name, setup, to_rows
from agilerl.rewards.waiting import WaitingGrader, waiting_parts

Graders = Grader | Sequence[Any] | Mapping[str, Any]
"""A grader, or what ``CombinedGrader`` combines: ``[f, (g, 0.5)]``."""


def as_grader(graders: Graders) -> Grader:
    """Return one grader; several become a ``CombinedGrader``, with its errors."""
    return graders if callable(graders) else CombinedGrader(graders)


class CombinedGrader(BaseGrader):
    """The sum of its graders' scores, each times its weight (1.0 unless given).

    A grader that returns None does not apply, and the sum is over those that do; if none applies there is no grade.
    If one *fails* there is no grade either: a sum without it would count the failure as a score of 0.
    A grader of weight 0 is only logged. ``setup`` and ``close`` call those of every grader.

    ``weights`` holds the weights by name. Nothing is derived from them in advance, so they may change at any time.
    """

    name = "combined"

    @checked
    def __init__(self, graders: Sequence[Any] | Mapping[str, Any], *, name: Name | None = None) -> None:
        """Combine graders.

        Args:
            graders: graders or pairs ``(grader, weight)``; the keys of a mapping replace their names.
            name: the name of the combination in messages and metrics; None: that of its grader if there is one only.

        Raises ConfigError for no grader, two of one name, one that cannot be called, a weight that is not a number.
        """
        named = list(graders.items()) if isinstance(graders, Mapping) else [(None, part) for part in graders]
        if not named:
            raise ConfigError("expected at least one grader in a CombinedGrader, found none")
        self.graders: dict[str, Grader] = {}
        self.weights: dict[str, float] = {}
        for key, part in named:
            grader, weight = part if isinstance(part, tuple) and len(part) == 2 else (part, 1.0)
            if not callable(grader):
                raise ConfigError(f"expected graders, or pairs (grader, weight), in a CombinedGrader, found {part!r}")
            key = grader_name(grader) if key is None else key
            if key in self.graders:
                raise ConfigError(f"two graders are called {key!r}; rename one: CombinedGrader({{'first': ..., ...}})")
            self.graders[key], self.weights[key] = grader, weight
        check_weights(self.weights, self.graders)
        if name is not None:
            self.name = name
        elif len(self.graders) == 1:
            (self.name,) = self.graders

    def __repr__(self) -> str:
        return f"CombinedGrader({', '.join(f'{weight:g} * {name}' for name, weight in self.weights.items())})"

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[Grade]:
        """Return the rewards only, as any grader does."""
        return self.grade(completions, to_rows(columns, len(completions)), prompts).rewards

    def grade(
        self, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str] | None = None
    ) -> Grades:
        """Return rewards, scores by grader and failures by grader.

        The scores of a combination inside this one are included as ``<its name>/<grader>``.

        Raises ConfigError unless ``weights`` holds one finite number for each grader, RewardError as ``grade`` does.
        """
        # Again in each call, since weights may change at any time.
        check_weights(self.weights, self.graders)
        self.setup()
        scores: dict[str, list[Grade]] = {}
        failures: dict[str, list[int]] = {}
        reasons: dict[int, RewardError] = {}
        for name, grader in self.graders.items():
            part = grade(grader, completions, rows, prompts)
            scores[name] = part.rewards
            reasons = {**part.reasons, **reasons}  # the first grader's error stays
            # Of a combination inside this one: a failure of any of its graders.
            failures[name] = sorted(set().union(*part.failures.values()))
            # One column alone is the score itself, which is already there.
            if len(part.scores) > 1:
                scores |= {f"{name}/{inside}": column for inside, column in part.scores.items()}
                failures |= {f"{name}/{inside}": indices for inside, indices in part.failures.items()}
        # For its scores and failures alone: the rewards are the sums computed from them.
        grades = Grades([None] * len(completions), scores, failures)
        return Grades(weigh(grades, self.weights), scores, failures, reasons)

    def waiting(self) -> list[WaitingGrader]:
        """Return those of the graders that may begin before a batch is complete."""
        return [part for grader in self.graders.values() for part in waiting_parts(grader)]

    def open(self) -> None:
        """Set up every grader."""
        for grader in self.graders.values():
            setup(grader)

    def release(self) -> None:
        """Close every grader."""
        for grader in self.graders.values():
            close(grader)


def weigh(grades: Grades, weights: Mapping[str, float]) -> list[Grade]:
    """Return the weighted sums of the scores that ``weights`` names, [N].

    None if one of these graders failed, if none of them applies, or if the sum is beyond float32; graders of weight 0
    are ignored in all of this.
    """
    weights = {name: weight for name, weight in weights.items() if weight != 0}
    failed = set().union(*(grades.failures[name] for name in weights))
    rewards: list[Grade] = []
    for index in range(len(grades.rewards)):
        scores = {name: grades.scores[name][index] for name in weights}
        applying = [weights[name] * score for name, score in scores.items() if score is not None]
        total = sum(applying) if applying and index not in failed else None
        # A sum beyond float32 would become an infinite reward, which is worse than no reward.
        rewards.append(total if total is not None and abs(total) <= LARGEST_FLOAT32 else None)
    return rewards


_Weight = Annotated[float, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]


def check_weights(weights: Mapping[str, float], graders: Mapping[str, Grader]) -> None:
    """Raise ConfigError unless there is one finite weight for each grader."""
    if set(weights) != set(graders):
        raise ConfigError(f"expected weights for {', '.join(graders)}, found {', '.join(map(str, weights)) or 'none'}")
    for name, weight in weights.items():
        taken(_Weight, weight, "CombinedGrader", f"the weight of {name}")
