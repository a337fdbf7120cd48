"""What ``state.json`` and ``clock.json`` of a checkpoint may hold: checked whole before any of it is used."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from agilerl.algorithms.agent_json import Count, SavedValues, checked
from agilerl.runs import strict_json

__all__ = ["read_clock", "read_state_json"]

Index = Annotated[str, Field(pattern=r"^\d{1,18}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Fitness(SavedValues):
    mean: float
    stderr: float
    n: Count
    scores: list[float]


class _Median(SavedValues):
    index: Count
    fitness: _Fitness


class _Progress(SavedValues):
    model_config = ConfigDict(extra="ignore")

    iteration: Count
    generation: Count
    step: Count
    samples: Count
    tokens: dict[str, Count]
    best: float
    elite_iteration: Count | None
    fitness: dict[Index, _Fitness]
    exam: dict[Index, _Fitness] | None
    base: _Fitness | None
    median: _Median | None


class _Memory(SavedValues):
    train_tokens: Annotated[int, Field(ge=1)] | None
    decode_rows: Annotated[int, Field(ge=1)] | None


class _State(SavedValues):
    progress: _Progress
    memory: _Memory
    bank_rank: Annotated[int, Field(ge=1)]
    next_index: Count
    agents: Annotated[list[Count], Field(min_length=1)]
    not_finite: list[Count] = Field(default_factory=list)
    lineage_bytes: Count
    lineage_sha256: Digest | None = None  # none in a checkpoint of the time before it was noted

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(set(self.agents)) < len(self.agents) or max(self.agents) >= self.next_index:
            raise ValueError("expected different agents, all below next_index")
        return self


class _Clock(SavedValues):
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics_bytes: Count
    metrics_sha256: Digest | None = None
    journal_records: Count


def read_state_json(path: Path) -> dict[str, Any]:
    """Return the checked content of a ``state.json``; raises CheckpointError that names what is wrong."""
    values = strict_json.read_json(path)
    checked(_State, values, path)
    return values


def read_clock(path: Path) -> dict[str, Any]:
    """Return the checked content of a ``clock.json``; raises CheckpointError that names what is wrong."""
    values = strict_json.read_json(path)
    checked(_Clock, values, path)
    return values
