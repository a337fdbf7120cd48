"""What happens in a run, in the order in which it happens: the one stream that everything follows.

``train`` and ``resume`` are iterators of these events. The run's writer is the first to get each of them: when anything
else sees an event, the files of the run say it already. The progress display, trackers and your own code come after it.
docs/events.md shows how to follow a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Value
from agilerl.hpo.selection import Plan
from agilerl.runs.completions import CompletionRecord


@dataclass(frozen=True)
class Event:
    """Something that happened. Ignore the kinds that you do not know: there may be more of them in later versions."""


@dataclass(frozen=True)
class RunStarted(Event):
    """The run directory exists; training begins."""

    out: Path
    iterations: int
    """Iterations that the budget allows at the present batch sizes."""
    generations: int
    founders: Mapping[int, Mapping[str, Value]] = field(default_factory=dict)
    """Gene values of the first generation by agent index; empty if the run is resumed from a checkpoint."""


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
    outcomes: Mapping[int, str] = field(default_factory=dict)
    """``ok``, or why an agent did not learn as it should have, by agent index."""
    completions: Sequence[CompletionRecord] = ()
    """The first ``training.log_completions`` of each agent's batch."""

    @property
    def failed(self) -> dict[int, str]:
        """Those of the outcomes that are not ``ok``."""
        return {index: outcome for index, outcome in self.outcomes.items() if outcome != "ok"}


@dataclass(frozen=True)
class ExamDone(Event):
    """Every agent sat the exam."""

    generation: int
    fitness: Mapping[int, Fitness]
    iteration: int = 0
    tokens: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """What each agent has spent so far: ``generated``, ``trained``, ``evaluated``; a clone starts at its parent's."""
    seconds: float = 0.0

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """By agent index, under the names of metrics.jsonl."""
        return {index: {**_result(f), "time/eval": self.seconds} for index, f in self.fitness.items()}


@dataclass(frozen=True)
class Evolved(Event):
    """A selection was applied. Agents are those of the new population, in its order, unless said otherwise."""

    generation: int
    iteration: int
    fitness: Mapping[int, Fitness]
    """The exam that decided, by index of the agents before the selection."""
    plan: Plan
    elite: int | None
    """The best agent; None if no agent has a finite fitness or all are sick, and ``plan.elite`` is only the first."""
    sick: Mapping[int, str]
    """Agents that could be neither elite nor parent, and why."""
    inherited: Mapping[int, Mapping[str, Value]]
    """Gene values that each child was born with, before its own mutation."""
    changes: Sequence[Mutation]
    """The mutation of each agent."""
    mutations: Mapping[int, str]
    """What the mutation did, in a word, by agent index."""
    hyperparameters: Mapping[int, Mapping[str, Value]]
    """Gene values by agent index."""
    diversity: float
    """How far apart the population is: mean over genes of the spread of unit positions, 0 when all are alike."""
    seconds: float

    @property
    def metrics(self) -> dict[str, Value]:
        """Those of the population, under the names of metrics.jsonl; the genes are those of the new one."""
        means = [f.mean for f in self.fitness.values() if f.is_finite]
        genes = {
            f"evo/hp/{name}/{index}": value
            for index, values in self.hyperparameters.items()
            for name, value in values.items()
        }
        return {
            "evo/generation": self.generation,
            "evo/fitness/best": max(means, default=float("nan")),
            "evo/fitness/mean": float(np.mean(means)) if means else float("nan"),
            "evo/fitness/std": float(np.std(means)) if means else float("nan"),
            "evo/replacements": len(self.plan.births),
            "evo/diversity": self.diversity,
            "time/evolve": self.seconds,
            **genes,
        }


@dataclass(frozen=True)
class HeldOutTest(Event):
    """An agent, or the base model, sat the held-out test, which selection never reads."""

    who: str
    """``base``, ``median_first_generation`` or ``elite``."""
    agent: int | None
    """Its index; None for the base model."""
    fitness: Fitness

    @property
    def metrics(self) -> dict[str, float]:
        """Under the names of metrics.jsonl."""
        return _result(self.fitness)


@dataclass(frozen=True)
class RunFinished(Event):
    """The elite is saved and tested; summary and report are written."""

    out: Path
    summary: Mapping[str, Any]
    """What summary.json says."""


def _result(fitness: Fitness) -> dict[str, float]:
    return {"eval/reward_mean": fitness.mean, "eval/stderr": fitness.stderr, "eval/n": fitness.n}
