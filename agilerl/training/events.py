"""The events of a run, in order: the one stream that all consumers follow, and the extension point for callbacks.

``train`` and ``resume`` are iterators of these events. The run's writer gets each event first: when anything else sees
it, it is already in the run's files. The progress display, trackers and custom code come after it. docs/events.md
shows how to follow a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Value
from agilerl.hpo.selection import RESTART, Plan
from agilerl.runs.completions import CompletionRecord


@dataclass(frozen=True)
class Event:
    """Something that happened. Ignore unknown kinds: later versions may add more."""


@dataclass(frozen=True)
class RunStarted(Event):
    """The run directory exists; training begins."""

    out: Path
    iterations: int
    """Iterations that the budget allows at the current batch sizes."""
    generations: int
    founders: Mapping[int, Mapping[str, Value]] = field(default_factory=dict)
    """Gene values of the first generation by agent index; empty if the run is resumed from a checkpoint."""


@dataclass(frozen=True)
class PreflightDone(Event):
    """The first agents have answered training questions, before any update; only in runs with a preflight."""

    metrics: Mapping[str, float]
    """Mean reward, share of groups whose rewards differ and so on, under their names in metrics.jsonl."""
    shown: str
    """The same as a sentence."""
    problem: str = ""
    """Why nothing can be learned from the answers, and what to change; empty if something can."""
    prompt: str = ""
    """The first prompt, as the model reads it."""
    answer: str = ""
    """An answer to it."""
    score: float = float("nan")
    """The reward of that answer."""


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
    changes: Sequence[Mutation] = ()
    """Hyperparameters that a replayed schedule changed before this iteration."""

    @property
    def failed(self) -> dict[int, str]:
        """Those of the outcomes that are not ``ok``."""
        return {index: outcome for index, outcome in self.outcomes.items() if outcome != "ok"}


@dataclass(frozen=True)
class ExamDone(Event):
    """Every agent took the exam."""

    generation: int
    fitness: Mapping[int, Fitness]
    iteration: int = 0
    tokens: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Tokens of each agent so far: ``generated``, ``trained``, ``evaluated``; a clone starts at its parent's."""
    seconds: float = 0.0
    elapsed: float = 0.0
    """Wall seconds that the run has taken so far, in all processes that worked on it."""

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """By agent index, under the names of metrics.jsonl."""
        times = {"time/eval": self.seconds, "time/elapsed": self.elapsed}
        return {i: _result(f) | times for i, f in self.fitness.items()}


@dataclass(frozen=True)
class Evolved(Event):
    """A selection was applied. Agents are those of the new population, in its order, unless said otherwise."""

    generation: int
    iteration: int
    fitness: Mapping[int, Fitness]
    """The exam that decided, by agent index before the selection."""
    plan: Plan
    elite: int | None
    """The best agent; None if no agent has a finite fitness or all are sick, and ``plan.elite`` is only the first."""
    sick: Mapping[int, str]
    """Agents excluded as elite and parent, with the reason."""
    inherited: Mapping[int, Mapping[str, Value]]
    """Gene values of each child at birth, before its mutation."""
    changes: Sequence[Mutation]
    """The mutation of each agent."""
    mutations: Mapping[int, str]
    """What the mutation did, in one word, by agent index."""
    hyperparameters: Mapping[int, Mapping[str, Value]]
    """Gene values by agent index."""
    diversity: float
    """Diversity: mean over genes of the spread of unit positions, 0 if all are equal."""
    seconds: float

    @property
    def deaths(self) -> dict[int, str]:
        """Agents that left, each with the reason."""
        unsaid = self.plan.reason or "left by the strategy's plan"
        # Sickness comes first: the strategy's verdict only knows that the fitness was not finite, or what it did then.
        sick, verdicts = self.sick, self.plan.verdicts
        if self.plan.reason == RESTART:
            sick = {i: "; ".join(filter(None, (reason, verdicts.get(i)))) for i, reason in sick.items()}
        return {i: sick.get(i) or verdicts.get(i) or unsaid for i in self.plan.deaths}

    @property
    def metrics(self) -> dict[str, Value]:
        """Metrics of the population under their names in metrics.jsonl; genes are those of the new one."""
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
    """An agent or the base model took the held-out test, which selection never uses."""

    who: str
    """``base``, ``median_first_generation`` or ``elite``."""
    agent: int | None
    """The agent's index; None for the base model."""
    fitness: Fitness
    questions: str = ""
    """A digest of the questions that ``fitness.scores`` belong to; "" if some got no grade and are left out."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics under their names in metrics.jsonl."""
        return _result(self.fitness)


@dataclass(frozen=True)
class RunFinished(Event):
    """The elite is saved and tested; the summary and report are written."""

    out: Path
    summary: Mapping[str, Any]
    """The content of summary.json."""


def _result(fitness: Fitness) -> dict[str, float]:
    return {"eval/reward_mean": fitness.mean, "eval/stderr": fitness.stderr, "eval/n": fitness.n}
