"""A task with other graders than its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agilerl.arguments import checked
from agilerl.envs.core import AnyTask, Message, Row, Split, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.rewards.base import BaseGrader, close, setup
from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.grader import Grader, grader_name
from agilerl.rewards.grades import Grades, grade
from agilerl.validation import nearest

__all__ = ["GradedTask", "TaskGrader", "all_weights", "check_evolving_weights"]


class TaskGrader(BaseGrader):
    """A task's own reward as a grader, to combine with others."""

    @checked
    def __init__(self, task: AnyTask) -> None:
        """Take the task; the grader has the name of its reward."""
        self.task, self.name = task, task.grader

    def __call__(self, completion: str, **row: Any) -> float | None:
        """Return the task's reward of one completion."""
        return self.task.reward(completion, row)

    def grade(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[str] | None = None,
    ) -> Grades:
        """Return the task's grades."""
        return self.task.grade(completions, rows)


class GradedTask(Task):
    """The questions of a task, graded by ``grader`` in training and by ``fitness_grader`` in exams and tests.

    Without a ``fitness_grader`` exams are graded as training is. With one, selection compares agents by a measure that
    stays what it is, whatever training rewards.
    """

    @checked
    def __init__(self, task: AnyTask, grader: Grader, fitness_grader: Grader | None = None) -> None:
        """Take a task and its graders; ``TaskGrader(task)`` is the task's own.

        Raises:
            ConfigError: a grader that cannot be called.
        """
        self.task, self._grader, self.fitness_grader = task, grader, fitness_grader
        self._describe()

    def __repr__(self) -> str:
        fitness = "" if self.fitness_grader is None else f", fitness_grader={grader_name(self.fitness_grader)}"
        return f"GradedTask({self.task!r}, {self._grader!r}{fitness})"

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of the parts of the reward of training, by name; empty where it is not a ``CombinedGrader``."""
        return self._grader.weights if isinstance(self._grader, CombinedGrader) else {}

    def row(self, split: Split, index: int) -> Row:
        """Return the task's row."""
        return self.task.row(split, index)

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the task's conversation."""
        return self.task.messages(row)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float | None:
        """Return what the grader of training says."""
        return self.grade([completion], [row]).rewards[0]

    def grade(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        """Return the grades of training."""
        return grade(self._grader, completions, rows)

    def grade_exam(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        """Return the grades of exams."""
        return grade(self._grader if self.fitness_grader is None else self.fitness_grader, completions, rows)

    def level(self, position: int) -> int | None:
        """Return the task's."""
        return self.task.level(position)

    def demonstration(self, row: Mapping[str, Any]) -> str | None:
        """Return the task's."""
        return self.task.demonstration(row)

    def counterexample(self, row: Mapping[str, Any]) -> str | None:
        """Return the task's."""
        return self.task.counterexample(row)

    def prepare(self) -> None:
        """Prepare the task and set the graders up."""
        self.task.prepare()
        setup(self._grader)
        setup(self.fitness_grader)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Let the task leave out what does not fit."""
        self.task.fit(tokenizer, max_tokens)
        self._describe()

    def close(self) -> None:
        """Close the graders and the task."""
        close(self._grader)
        close(self.fitness_grader)
        self.task.close()

    def _describe(self) -> None:
        self.name, self.grader, self.counts = self.task.name, grader_name(self._grader), self.task.counts
        self.train_size = self.task.train_size
        self.exam_prompts, self.test_prompts = self.task.exam_prompts, self.task.test_prompts


def all_weights(task: Task | EpisodeTask, own: Mapping[str, float]) -> dict[str, float] | None:
    """Return the weights of all parts of a task's reward, ``own`` in place of the task's; None where ``own`` is empty.

    Raises:
        ConfigError: ``own`` names a part that the reward does not have.
    """
    if not own:
        return None
    weights = task.weights if isinstance(task, GradedTask) else {}
    if not weights:
        raise ConfigError(
            f"reward_weights={dict(own)}: the reward of {task.name} is not made of parts; give it some: "
            "GradedTask(task, CombinedGrader([...]), fitness_grader=...)"
        )
    for name in own:
        if name not in weights:
            raise ConfigError(f"reward_weights.{name}: the reward has no part {name!r}; {nearest(name, weights)}")
    return {**weights, **own}


def check_evolving_weights(task: Task | EpisodeTask, genes: Iterable[str]) -> None:
    """Raise ConfigError where weights of the reward evolve, and what selects among them is the reward itself."""
    evolving = [name for name in genes if name.startswith("reward_weights.")]
    if evolving and not (isinstance(task, GradedTask) and task.fitness_grader is not None):
        raise ConfigError(
            f"{', '.join(evolving)} evolves, so the task needs a fitness grader that stays what it is: without one, "
            "agents win by weighting what is easy; use GradedTask(task, grader, fitness_grader=TaskGrader(task))"
        )
