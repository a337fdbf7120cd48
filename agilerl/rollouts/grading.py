"""What the graders of a task make of completions, one verdict each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agilerl.envs.core import Row, Task, grade_completions
from agilerl.errors import RewardError
from agilerl.rewards.combine import weighted
from agilerl.rewards.grader import AllGradesFailedError, Grade, Grades
from agilerl.rollouts.engine import Ask


def is_exam(asks: Sequence[Ask]) -> bool:
    """Return whether these are answers of an exam or test."""
    """Return whether these are answers of an exam or test."""
    return any(ask.split != "train" for ask in asks)


@dataclass(frozen=True)
class Verdict:
    """What the graders said about one completion."""

    reward: Grade = None
    scores: Mapping[str, Grade] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    error: RewardError | None = None
    """What went wrong first."""


def verdicts_of(task: Task, asks: Sequence[Ask], rows: Sequence[Row], texts: Sequence[str]) -> list[Verdict]:
    """Grade completions; if a grader fails on a whole batch, its error stands for each of them."""
    try:
        grades = grade_completions(task, rows, texts, exam=is_exam(asks))
    except AllGradesFailedError as error:
        return [Verdict(error=error.reasons.get(place, error)) for place in range(len(asks))]
    except RewardError as error:
        slots = {ask.slot for ask in asks}
        if len(slots) < 2:
            return [Verdict(error=error) for _ in asks]
        # The grader broke its protocol on the whole batch. Grade agent by agent, so that the texts of one agent do not
        # cost the other agents their grades.
        found: dict[int, Verdict] = {}
        for slot in slots:
            own = [place for place, ask in enumerate(asks) if ask.slot == slot]
            parts = [asks[k] for k in own], [rows[k] for k in own], [texts[k] for k in own]
            found |= dict(zip(own, verdicts_of(task, *parts)))
        return [found[place] for place in range(len(asks))]
    rewards = _rewards(asks, grades)
    return [
        Verdict(reward, grades.scores_at(place), grades.failed_at(place), grades.reasons.get(place))
        for place, reward in enumerate(rewards)
    ]


def _rewards(asks: Sequence[Ask], grades: Grades) -> list[Grade]:
    """Return the reward of each completion, by the weights of the agent that it is for."""
    # An agent's asks share one mapping, so one weighted sum over the batch for each mapping is enough.
    distinct = {id(ask.weights): ask.weights for ask in asks if ask.weights is not None}
    sums = {key: weighted(grades, weights) for key, weights in distinct.items()}
    return [sums.get(id(ask.weights), grades.rewards)[place] for place, ask in enumerate(asks)]
