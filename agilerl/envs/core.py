"""What a task and an environment must offer: two small protocols."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

from agilerl.arguments import Hint, checked
from agilerl.custom_code import left, torch_restored
from agilerl.errors import EnvError, RewardError
from agilerl.rewards.grader import Outcome, check_score, outcome_of
from agilerl.rewards.grades import Grades, grades_of

__all__ = ["AnyTask", "Message", "MultiTurnEnv", "Row", "Split", "Task", "grade_completions", "score_completions"]

Split = Literal["train", "exam", "test"]
"""``train`` is an endless stream; ``exam`` is the panel that fitness is measured on; ``test`` is never selected on."""

Row = dict[str, Any]
"""One problem: at least ``question`` (str) and ``answer`` (str, or None where there is no single right answer)."""

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": str}``."""


class Task(ABC):
    """A single-turn task: a pure function of (split, index) to a problem, and of a completion to a reward.

    Subclass it with ``row`` and ``reward`` to bring your own.
    """

    name: str = "task"
    """What to call it in logs."""
    grader: str = "reward"
    """What the metrics ``rewards/<grader>/mean`` and ``/std`` call its reward."""
    exam_prompts: int = 0
    """Size of the exam panel; ``row("exam", i)`` exists for 0 <= i < exam_prompts."""
    test_prompts: int = 0
    """Size of the test panel."""
    train_size: int | None = None
    """Rows of one training epoch; None for an endless stream without epochs."""
    counts: Mapping[str, int] = MappingProxyType({})
    """How many rows were read, used, and left out for what reason; empty where nothing is read."""

    @abstractmethod
    def row(self, split: Split, index: int) -> Row:
        """Return one problem; equal arguments give equal rows, whatever was asked before.

        Raises:
            EnvError: ``index`` is outside the panel, or the task cannot give that many distinct problems.
        """

    @abstractmethod
    def reward(self, completion: str, row: Mapping[str, Any]) -> float | None:
        """Return what ``completion`` is worth as an answer to ``row``; None if it cannot be graded.

        Raises:
            RewardError: the scorer failed.
        """

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the conversation that is put to the model; a last message of the assistant is a prefill."""
        return [{"role": "user", "content": str(row["question"])}]

    def grade(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        """Return ``reward`` of each completion; override it where scoring many at once is cheaper, or has parts.

        A completion whose scorer fails gets None and is counted, so that one odd text does not end a run. If every one
        fails the scorer is broken, not the texts.

        Raises:
            RewardError: the scorer failed for every completion.
        """
        outcomes: list[Outcome] = []
        with torch_restored():
            for completion, row in zip(completions, rows):
                try:
                    outcomes.append(check_score(self.reward(completion, row), f"the reward of {self.name}"))
                except RewardError as error:
                    outcomes.append(error)
                except Exception as error:  # whatever it is, it is the failure of this completion alone
                    outcomes.append(outcome_of(error, f"the reward of {self.name}"))
                except SystemExit as error:
                    outcomes.append(outcome_of(left(error), f"the reward of {self.name}"))
        return grades_of(self.grader, outcomes)

    def grade_exam(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        """Return what completions of an exam or test are worth; as in training, unless a task has another measure."""
        return self.grade(completions, rows)

    def rewards(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return the rewards of ``grade`` alone."""
        return self.grade(completions, rows).rewards

    def close(self) -> None:  # noqa: B027  (most tasks hold nothing)
        """Release what grading has opened; it is opened again when it is needed."""

    def prepare(self) -> None:  # noqa: B027  (most tasks have nothing to prepare)
        """Do now what would otherwise happen on first use (draw the panels), so that problems show before training."""

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:  # noqa: B027  (most tasks have nothing to fit)
        """Learn what renders the prompts and how many tokens one may have; called before training, maybe repeatedly.

        A task on data leaves rows out that do not fit, and counts them.
        """

    def level(self, position: int) -> int | None:
        """Return the level of a curriculum that a training row belongs to; None where there is no curriculum."""
        return None

    def demonstration(self, row: Mapping[str, Any]) -> str | None:
        """Return the response that imitation learns; None where there is none."""
        answer = row.get("answer")
        return None if answer is None else str(answer)

    def counterexample(self, row: Mapping[str, Any]) -> str | None:
        """Return a worse response, for preferences; None where there is none."""
        rejected = row.get("rejected")
        return None if rejected is None else str(rejected)

    def panel_size(self, split: Split) -> int:
        """Return how many rows ``exam`` or ``test`` has."""
        return self.exam_prompts if split == "exam" else self.test_prompts

    def check_index(self, split: Split, index: int) -> None:
        """Raise an EnvError unless ``row(split, index)`` can exist."""
        if split not in ("train", "exam", "test"):
            raise EnvError(f"expected the split train, exam or test, found {split!r}")
        whole = isinstance(index, int) and not isinstance(index, bool)
        if not whole or index < 0 or (split != "train" and index >= self.panel_size(split)):
            limit = "0 or more" if split == "train" else f"0 to {self.panel_size(split) - 1}"
            raise EnvError(f"expected an index of {limit} in the {split} split of {self.name}, found {index!r}")


AnyTask = Annotated[Task, Hint("pass a ReasoningGymTask, a DatasetTask or another subclass of Task")]


@checked
def score_completions(task: AnyTask, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float | None]:
    """Return the reward of each text as an answer to the row at the same place; None where there is no grade.

    Raises:
        RewardError: the numbers of rows and texts differ, or the scorer failed for every text.
    """
    return grade_completions(task, rows, texts).rewards


def grade_completions(
    task: Task, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], *, exam: bool = False
) -> Grades:
    """Return the grades of each text as an answer to the row at the same place, by grader.

    Raises:
        RewardError: the numbers of rows and texts differ, or a grader failed for every text.
    """
    if len(rows) != len(texts):
        raise RewardError(f"expected one completion per row, found {len(texts)} completions for {len(rows)} rows")
    return task.grade_exam(texts, rows) if exam else task.grade(texts, rows)


class MultiTurnEnv(Protocol):
    """An episode of text: gymnasium's five-tuple, where observation and action are strings."""

    max_turns: int
    """Most actions in one episode."""

    def reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        """Begin an episode that is a pure function of ``seed``; return the first observation and info."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Take an action; return observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Release what the environment holds."""
