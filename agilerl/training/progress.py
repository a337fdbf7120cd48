"""How far a run has come: counters and results that a checkpoint stores along with the agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from agilerl.algorithms.state import AgentState
from agilerl.config.run import RunConfig
from agilerl.hpo.fitness import Fitness


@dataclass(frozen=True)
class Kept:
    """One of the best exams of a run, with the agent as it was."""

    agent: int
    iteration: int
    fitness: Fitness
    state: AgentState | None
    """None on processes that do not hold it."""

    def to_dict(self) -> dict[str, Any]:
        """Return all but the weights as plain data."""
        return {"agent": self.agent, "iteration": self.iteration, "fitness": self.fitness.state()}


@dataclass
class Progress:
    """Counters and results of a run."""

    iteration: int = 0
    """Rollouts and updates of every agent so far."""
    generation: int = 0
    step: int = 0
    """Iterations of the current generation."""
    samples: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"generated": 0, "trained": 0, "evaluated": 0})
    best: float = float("-inf")
    """Best exam so far."""
    elite: AgentState | None = None
    """The agent that took it."""
    elite_iteration: int | None = None
    kept: list[Kept] = field(default_factory=list)
    """The best exams, best first, one agent each; empty where no more than the elite is kept."""
    pace: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens and iterations of each agent in this generation; only kept where agents are compared at equal tokens."""
    fitness: dict[int, Fitness] = field(default_factory=dict)
    """Last exam of every agent, living or dead."""
    exam: dict[int, Fitness] | None = None
    """The last exam, if no agent has learned or changed since."""
    base: Fitness | None = None
    """Test of the base model."""
    median: tuple[int, Fitness] | None = None
    """Index and test of the median agent of the first generation."""
    seconds_before: float = 0.0
    """Wall seconds of the processes that worked on this run earlier."""
    started: float = field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        """Wall seconds spent on the run."""
        return self.seconds_before + perf_counter() - self.started

    def keep(self, exam: Kept, most: int) -> None:
        """Add an exam if it is among the ``most`` best ones; at equal fitness the later is better."""
        ordered = sorted([*self.kept, exam], key=lambda kept: (-kept.fitness.mean, -kept.iteration))
        self.kept = ordered[:most]

    def spent(self, config: RunConfig, seconds: float | None = None) -> float:
        """Return the largest share spent of any budget, by this clock or ``seconds`` of another."""
        t = config.training
        shares = [self.samples / t.max_steps]
        if t.max_tokens is not None:
            shares.append(sum(self.tokens.values()) / t.max_tokens)
        if t.max_seconds is not None:
            shares.append((self.seconds if seconds is None else seconds) / t.max_seconds)
        return max(shares)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights of the elite and of kept exams, and the clock, as plain data."""
        kept = {"kept": [kept.to_dict() for kept in self.kept]} if self.kept else {}
        pace = {"pace": {str(index): list(of) for index, of in self.pace.items()}} if self.pace else {}
        return (
            kept
            | pace
            | {
                "iteration": self.iteration,
                "generation": self.generation,
                "step": self.step,
                "samples": self.samples,
                "tokens": self.tokens,
                "best": self.best,
                "elite_iteration": self.elite_iteration,
                "fitness": {str(index): f.state() for index, f in self.fitness.items()},
                "exam": None if self.exam is None else {str(index): f.state() for index, f in self.exam.items()},
                "base": None if self.base is None else self.base.state(),
                "median": None if self.median is None else {"index": self.median[0], "fitness": self.median[1].state()},
            }
        )

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        elite: AgentState | None,
        *,
        seconds: float,
        others: Sequence[AgentState | None] = (),
    ) -> "Progress":
        """Return the progress from :meth:`to_dict`'s values; the clock continues from ``seconds``.

        ``elite`` is the agent of the best exam, ``others`` those of the next ones.
        """
        states = [elite, *others]
        exam, base, median = values["exam"], values["base"], values["median"]
        return cls(
            **{name: values[name] for name in ("iteration", "generation", "step", "samples", "best")},
            tokens=dict(values["tokens"]),
            elite=elite,
            elite_iteration=values["elite_iteration"],
            kept=[
                Kept(kept["agent"], kept["iteration"], Fitness.from_state(kept["fitness"]), state)
                for kept, state in zip(values.get("kept", []), states, strict=False)
            ],
            pace={int(index): (of[0], of[1]) for index, of in values.get("pace", {}).items()},
            fitness={int(index): Fitness.from_state(f) for index, f in values["fitness"].items()},
            exam=None if exam is None else {int(index): Fitness.from_state(f) for index, f in exam.items()},
            base=None if base is None else Fitness.from_state(base),
            median=None if median is None else (median["index"], Fitness.from_state(median["fitness"])),
            seconds_before=seconds,
        )
