"""What the graders of a task make of completions, one verdict each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agilerl.envs.core import Row, Task, grade_completions
from agilerl.errors import RewardError, RewardTimeoutError
from agilerl.rewards.combine import weigh
from agilerl.rewards.grader import AllGradesFailedError, Grade
from agilerl.rollouts.engine import Ask, Failure


@dataclass(frozen=True)
class Verdict:
    """The grades of one completion."""

    reward: Grade = None
    scores: Mapping[str, Grade] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    error: RewardError | None = None
    """What went wrong first."""

    def failure(self, number: int) -> Failure | None:
        """Return why the completion of ask ``number`` has no grade, or None."""
        if self.reward is not None or self.error is None:
            return None
        late = isinstance(self.error, RewardTimeoutError)
        return Failure(number, "timeout" if late else "reward_error", str(self.error))


def is_exam(asks: Sequence[Ask]) -> bool:
    """Return whether these are answers of an exam or test."""
    return any(ask.split != "train" for ask in asks)


def verdicts_of(task: Task, asks: Sequence[Ask], rows: Sequence[Row], texts: Sequence[str]) -> list[Verdict]:
    """Grade completions; if a grader fails on a whole batch, its error stands for each of them."""
    numbers = range(len(asks))
    try:
        grades = grade_completions(task, rows, texts, exam=is_exam(asks))
    except AllGradesFailedError as error:
        return [Verdict(error=error.reasons.get(n, error)) for n in numbers]
    except RewardError as error:
        slots = {ask.slot for ask in asks}
        if len(slots) < 2:
            return [Verdict(error=error) for _ in asks]
        # The grader broke its protocol on the whole batch. Grade agent by agent, so that the texts of one agent do not
        # cost the other agents their grades.
        verdicts: dict[int, Verdict] = {}
        for slot in slots:
            of_agent = [n for n in numbers if asks[n].slot == slot]
            parts = [asks[n] for n in of_agent], [rows[n] for n in of_agent], [texts[n] for n in of_agent]
            verdicts |= dict(zip(of_agent, verdicts_of(task, *parts)))
        return [verdicts[n] for n in numbers]
    # An agent's asks share one mapping of weights, so one sum over the batch for each mapping is enough.
    distinct = {id(ask.weights): ask.weights for ask in asks if ask.weights is not None}
    sums = {key: weigh(grades, weights) for key, weights in distinct.items()}
    rewards = [sums.get(id(ask.weights), grades.rewards)[n] for n, ask in enumerate(asks)]
    return [Verdict(rewards[n], grades.scores_at(n), grades.failed_at(n), grades.reasons.get(n)) for n in numbers]
