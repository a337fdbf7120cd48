"""How far a run has come: its counters and results, as they are in memory and in ``state.json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from time import perf_counter
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer

from agilerl.algorithms.state import AgentState
from agilerl.config.training import TrainingConfig
from agilerl.hpo.fitness import Fitness
from agilerl.runs.strict_json import SavedCount, SavedValues


def _by_index(values: Any) -> Any:
    """Return a mapping by agents with numbers as keys, which JSON has as text."""
    if not isinstance(values, Mapping):
        return values
    # Any 18 digits fit into 64 bits; a file's text could have millions.
    wrong = [key for key in values if not (isinstance(key, int) or (key.isdecimal() and len(key) <= 18))]
    if wrong:
        raise ValueError(f"expected indices of agents, found {wrong[0]!r}")
    return {int(key): value for key, value in values.items()}


def _fitness(value: Any) -> Fitness:
    # A fitness in Python may leave them out; a file without them was not written by a run.
    if isinstance(value, Mapping) and (missing := {"mean", "stderr", "n", "scores"} - value.keys()):
        raise ValueError(f"{min(missing)} is missing")
    return value if isinstance(value, Fitness) else Fitness.from_state(value)


_Exam = Annotated[Fitness, BeforeValidator(_fitness), PlainSerializer(Fitness.state)]
_Exams = Annotated[dict[SavedCount, _Exam], BeforeValidator(_by_index)]
_State = Annotated[InstanceOf[AgentState] | None, Field(exclude=True)]


class Kept(SavedValues):
    """One of the best exams of a run, with the agent as it was."""

    agent: SavedCount
    iteration: SavedCount
    fitness: _Exam
    state: _State = None
    """Its weights are in a folder of their own."""


class Median(SavedValues):
    """The test of an agent."""

    index: SavedCount
    fitness: _Exam


class Progress(SavedValues):
    """Counters and results of a run."""

    model_config = ConfigDict(extra="ignore")

    iteration: SavedCount = 0
    """Rollouts and updates of every agent so far."""
    generation: SavedCount = 0
    step: SavedCount = 0
    """Iterations of the current generation."""
    samples: SavedCount = 0
    tokens: dict[str, SavedCount] = Field(default_factory=lambda: {"generated": 0, "trained": 0, "evaluated": 0})
    best: float = -math.inf
    """Best exam so far."""
    elite: _State = None
    """The agent that took it."""
    elite_iteration: SavedCount | None = None
    kept: Annotated[list[Kept], Field(max_length=16)] = Field(default_factory=list)
    """The best exams, best first, one agent each; empty if only the elite is kept."""
    pace: Annotated[
        dict[SavedCount, Annotated[tuple[SavedCount, SavedCount], Field(strict=False)]], BeforeValidator(_by_index)
    ] = Field(default_factory=dict)
    """Tokens and iterations of each agent in this generation; only kept if agents are compared at equal tokens."""
    fitness: _Exams = Field(default_factory=dict)
    """Last exam of every agent, living or dead."""
    exam: _Exams | None = None
    """The last exam, if no agent has learned or changed since."""
    base: _Exam | None = None
    """Test of the base model."""
    median: Median | None = None
    """Test of the median agent of the first generation."""
    seconds_before: Annotated[float, Field(exclude=True)] = 0.0
    """Wall seconds of the processes that worked on this run earlier."""
    started: Annotated[float, Field(exclude=True)] = Field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        """Wall seconds spent on the run."""
        return self.seconds_before + perf_counter() - self.started

    def begin(self, agent: int, state: AgentState | None) -> None:
        """Keep an agent as it is before any training, below all exams."""
        self.elite, self.elite_iteration = state, 0
        self.kept = [Kept(agent=agent, iteration=0, fitness=Fitness(-math.inf), state=state)]

    @property
    def untrained(self) -> Fitness | None:
        """What :meth:`begin` kept, with the mean reward in training, as long as no exam is better."""
        return self.kept[0].fitness if self.kept and not self.kept[0].fitness.is_finite else None

    def note_untrained(self, rewards: Sequence[float]) -> None:
        """Note the rewards of the first iteration, whose samples are from before any training."""
        if self.untrained is not None:
            self.kept[0].fitness = replace(self.untrained, training=fmean(rewards))

    def keep(self, exam: Kept, most: int) -> None:
        """Add an exam if it is among the ``most`` best ones; at equal fitness the later is better."""
        self.kept = sorted([*self.kept, exam], key=lambda kept: (-kept.fitness.mean, -kept.iteration))[:most]

    def spent(self, t: TrainingConfig, seconds: float | None = None) -> float:
        """Return the largest share spent of any budget, by this clock or ``seconds`` of another."""
        shares = [self.samples / t.max_steps]
        if t.max_tokens is not None:
            shares.append(sum(self.tokens.values()) / t.max_tokens)
        if t.max_seconds is not None:
            shares.append((self.seconds if seconds is None else seconds) / t.max_seconds)
        return max(shares)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but weights and the clock as plain data; what is unset and newer than the first files is
        left out.
        """
        values = self.model_dump()
        return {name: value for name, value in values.items() if name not in _NEWER or value not in ([], {}, None)}

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        elite: AgentState | None = None,
        *,
        seconds: float = 0.0,
        others: Sequence[AgentState | None] = (),
    ) -> Self:
        """Return the progress from :meth:`to_dict`'s values; the clock continues from ``seconds``.

        ``elite`` is the agent of the best exam, ``others`` those of the next ones. Raises ValidationError for anything
        else.
        """
        progress = cls(**{**values, "elite": elite, "seconds_before": seconds, "started": perf_counter()})
        # Not strict: where no exams are kept, there may be an elite nevertheless.
        for kept, state in zip(progress.kept, [elite, *others], strict=False):
            kept.state = state
        return progress


# Missing in older files, and left out of new ones while unset.
_NEWER = ("kept", "pace")
OF_FILE = frozenset(name for name, field in Progress.model_fields.items() if not (field.exclude or name in _NEWER))
"""What every file has."""
