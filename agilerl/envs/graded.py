"""A task with custom graders."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agilerl.checks.arguments import checked, nearest, shown
from agilerl.envs.core import Task, TaskArgument, TaskWithGraders, TaskWrapper, grade_completions, waiting_graders
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.rewards.combine import CombinedGrader, Graders, as_grader
from agilerl.rewards.grader import BaseGrader, Columns, Grades, grader_name
from agilerl.rewards.waiting import WaitingGrader


class TaskGrader(BaseGrader):
    """A task's built-in reward as a grader, to combine with others."""

    reads = "completion"  # the task reads more, if its reward does

    @checked
    def __init__(self, task: TaskArgument) -> None:
        """Take the task; the grader takes the name of its reward."""
        self.task, self.name = task, task.grader

    def __call__(self, completion: str, **row: Any) -> float | None:
        """Return the task's reward of one completion."""
        return grade_completions(self.task, [row], [completion]).rewards[0]

    def grade(
        self, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str] | None = None
    ) -> Grades:
        """Return the task's grades."""
        return grade_completions(self.task, rows, completions)

    def waiting(self) -> list[WaitingGrader]:
        """Return the task's graders that may begin before a batch is complete."""
        # grade() asks the task for training grades, in exams too.
        return waiting_graders(self.task, exam=False)


class GradedTask(TaskWithGraders, TaskWrapper):
    """The questions of a task, graded by ``grader`` in training and by ``fitness_grader`` in exams and tests.

    Without a ``fitness_grader``, exams are graded as in training. With one, selection compares agents by a measure that
    does not change, whatever training rewards.
    """

    @checked
    def __init__(self, task: TaskArgument, grader: Graders, fitness_grader: Graders | None = None) -> None:
        """Take a task and its graders; ``TaskGrader(task)`` is the task's built-in one.

        Raises:
            ConfigError: a grader that cannot be called.
        """
        super().__init__(task)
        self._grader = as_grader(grader)
        self.fitness_grader = None if fitness_grader is None else as_grader(fitness_grader)
        self.grader = grader_name(self._grader)

    def __repr__(self) -> str:
        fitness = "" if self.fitness_grader is None else f", fitness_grader={grader_name(self.fitness_grader)}"
        return f"GradedTask({self.task!r}, {self._grader!r}{fitness})"

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of the training reward's parts, by name; empty unless it is a ``CombinedGrader``."""
        return self._grader.weights if isinstance(self._grader, CombinedGrader) else {}


def all_weights(task: Task | EpisodeTask, weights: Mapping[str, float]) -> dict[str, float] | None:
    """Return the weights of all reward parts, ``weights`` overriding the task's; None if ``weights`` is empty."""
    if not weights:
        return None
    graded = _find_graded(task)
    parts = graded.weights if graded else {}
    check_parts(
        {f"reward_weights.{name}": name for name in weights},
        parts,
        f"the reward of {task.name} has no parts; combine graders: GradedTask(task, CombinedGrader([...]), "
        "fitness_grader=...)",
    )
    return {**parts, **weights}


def check_parts(keys: Mapping[str, str], parts: Iterable[str], without: str) -> None:
    """Raise ConfigError for a key that names a part which the reward does not have; ``without`` says so if none is."""
    for key, name in keys.items():
        if not parts:
            raise ConfigError(f"{key}: {without}")
        if name not in parts:
            raise ConfigError(f"{key}: the reward has no part {shown(name)}; {nearest(str(name), parts)}")


def exam_grader(task: Task | EpisodeTask) -> str:
    """Return the name of what grades exams and tests, whatever weights agents have in training."""
    graded = _find_graded(task)
    fixed = graded.fitness_grader if graded else None
    return task.grader if fixed is None else grader_name(fixed)


def check_evolving_weights(task: Task | EpisodeTask, genes: Iterable[str]) -> None:
    """Raise ConfigError if reward weights evolve and selection uses that same reward."""
    evolving = [name for name in genes if name.startswith("reward_weights.")]
    graded = _find_graded(task)
    if evolving and not (graded and graded.fitness_grader is not None):
        raise ConfigError(
            f"{', '.join(evolving)} evolves, so the task needs a fitness grader that does not change: without one, "
            "agents win by weighting what is easy; use GradedTask(task, grader, fitness_grader=TaskGrader(task))"
        )


def _find_graded(task: Task | EpisodeTask) -> GradedTask | None:
    """Return the task with graders that a task is, or is wrapped around."""
    while isinstance(task, TaskWrapper) and not isinstance(task, GradedTask):
        task = task.task
    return task if isinstance(task, GradedTask) else None
