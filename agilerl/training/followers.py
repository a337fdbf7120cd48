"""What a process that writes nothing does where another one writes: its part of the sending, and no more."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.hpo.fitness import Fitness
from agilerl.members import Evolution, Known
from agilerl.population import Population
from agilerl.rollouts.failures import Outcome
from agilerl.runs.completions import CompletionRecord
from agilerl.training.progress import Progress
from agilerl.training.records import Where
from agilerl.training.saved import SavedCheckpoint

__all__ = ["FollowersRecords"]


class FollowersRecords:
    """The counterpart of RunRecords in a process that does not write."""

    def __init__(self, saved: SavedCheckpoint | None, *, sends: bool) -> None:
        """``sends``: whether the process that writes gets its agents from this one."""
        self._saved, self._sends = None if saved is None else saved.progress.iteration, sends

    def close(self) -> None:
        """Nothing is open."""

    def prune(self, progress: Progress, *, keep: int) -> None:
        """Nothing is kept here."""

    def founders(self, agents: Iterable[Known]) -> None:
        """Written elsewhere."""

    def iteration(
        self, where: Where, metrics: Mapping[int, Mapping[str, float]], outcomes: Mapping[int, Outcome]
    ) -> None:
        """Written elsewhere."""

    def completions(self, where: Where, rows: Sequence[CompletionRecord]) -> None:
        """Written elsewhere."""

    def exam(self, where: Where, fitness: Mapping[int, Fitness], agents: Iterable[Known], seconds: float) -> None:
        """Written elsewhere."""

    def evolution(
        self, where: Where, evolution: Evolution, fitness: Mapping[int, Fitness], population: Population, seconds: float
    ) -> None:
        """Written elsewhere."""

    def test(self, who: str, agent: int | None, result: Fitness) -> None:
        """Written elsewhere."""

    def elite(self, agent: LLMAlgorithm) -> None:
        """Written elsewhere."""

    def finish(self, summary: dict[str, Any], elite: int | None) -> None:
        """Written elsewhere."""

    def checkpoint(self, population: Population, progress: Progress, *, keep: int) -> None:
        """Send the agents of this island to the process that writes."""
        if self._sends and progress.iteration != self._saved:
            for _ in population.states():
                pass
        self._saved = progress.iteration
