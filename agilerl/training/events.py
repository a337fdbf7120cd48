"""What a run tells whoever watches it: plain records, in the order in which things happen."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import Plan

__all__ = [
    "Event",
    "ExamDone",
    "Evolved",
    "IterationDone",
    "LearningFailed",
    "PhaseStarted",
    "RunFinished",
    "RunStarted",
]


@dataclass(frozen=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True)
class RunStarted(Event):
    """The run directory exists; training begins."""

    out: Path
    iterations: int
    """Iterations that the budget allows at the present batch sizes."""
    generations: int


@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase begins: ``base test``, ``train``, ``exam``, ``test``."""

    name: str


@dataclass(frozen=True)
class IterationDone(Event):
    """Every agent has sampled a batch and learned from it."""

    generation: int
    iteration: int
    progress: float
    """Share of the run's budget that is spent, in [0, 1]."""
    metrics: Mapping[int, Mapping[str, float]]
    """By agent index."""


@dataclass(frozen=True)
class LearningFailed(Event):
    """Agents did not learn in an iteration as they should have."""

    iteration: int
    outcomes: Mapping[int, str]
    """What happened, by the index of each such agent; never ``ok``."""


@dataclass(frozen=True)
class ExamDone(Event):
    """Every agent sat the exam."""

    generation: int
    fitness: Mapping[int, Fitness]


@dataclass(frozen=True)
class Evolved(Event):
    """A selection was applied."""

    generation: int
    plan: Plan
    mutations: Mapping[int, str]
    """What the mutation did, by agent index."""
    elite: int | None
    """The best agent; None where nobody has a finite fitness or all are sick, and ``plan.elite`` is only the first."""


@dataclass(frozen=True)
class RunFinished(Event):
    """The elite is saved and tested."""

    out: Path
    summary: Mapping[str, Any]
