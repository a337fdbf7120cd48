"""A checkpoint of a population: its agents, and the state that they share, as files and as the values in them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BeforeValidator, Field, model_validator

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.codec import packed, read_state, tensors, unpacked, write_state
from agilerl.algorithms.state import AgentState, differences, lora_of
from agilerl.checks.arguments import shown
from agilerl.errors import CheckpointError
from agilerl.models.memory import MemoryLimits
from agilerl.models.slots import LinearShape
from agilerl.population import Population
from agilerl.processes import Processes
from agilerl.runs import strict_json
from agilerl.runs.checkpoints import STATE, agent_folder
from agilerl.runs.strict_json import SavedCount, SavedValues, read_json
from agilerl.runtime import Runtime
from agilerl.training.progress import OF_FILE, Progress

_ELITE = "elite"
CLOCK = "clock.json"
"""Wall time, and lengths of files that depend on it; they differ between repeated runs."""

# -- schemas of its two JSON files, which are checked completely before use --------------------------------------------


def _complete(values: Any) -> Any:
    # Progress has a default for everything, so pydantic would let a missing counter begin at 0 again.
    missing = sorted(OF_FILE - values.keys()) if isinstance(values, Mapping) else []
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return values


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Memory(SavedValues):
    train_tokens: Annotated[int, Field(ge=1)] | None
    decode_rows: Annotated[int, Field(ge=1)] | None


class StateFile(SavedValues):
    """The schema of ``state.json``."""

    progress: Annotated[Progress, BeforeValidator(_complete)]
    memory: _Memory
    bank_rank: Annotated[int, Field(ge=1)]
    next_index: SavedCount
    agents: Annotated[list[SavedCount], Field(min_length=1)]
    not_finite: list[SavedCount] = Field(default_factory=list)
    lineage_bytes: SavedCount
    lineage_sha256: _Digest | None = None  # missing in old checkpoints

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(set(self.agents)) < len(self.agents) or max(self.agents) >= self.next_index:
            raise ValueError("expected different agents, all below next_index")
        return self


class ClockFile(SavedValues):
    """The schema of ``clock.json``."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics_bytes: SavedCount
    metrics_sha256: _Digest | None = None
    journal_records: SavedCount


@dataclass(frozen=True)
class Positions:
    """How much of the append-only files belongs to a checkpoint."""

    metrics_bytes: int
    lineage_bytes: int
    journal_records: int
    metrics_sha256: str | None = None
    """Of those bytes; None in old checkpoints."""
    lineage_sha256: str | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """Everything that a resumed run continues from."""

    path: Path
    states: list[AgentState]
    """The agents, in the order of the population."""
    next_index: int
    progress: Progress
    positions: Positions
    memory: MemoryLimits
    """The memory limits found so far."""
    bank_rank: int
    """Largest rank that the adapter bank has had room for."""

    def agents(self, runtime: Runtime, most: int) -> list[LLMAlgorithm]:
        """Return the agents; raises CheckpointError if their rank is above ``most``, or if the base is another one."""
        if self.bank_rank > most:
            raise CheckpointError(
                f"{self.path} was made with adapters of rank {self.bank_rank}, but this run goes up to {most}; resume "
                "from an older checkpoint"
            )
        for state in self.states:
            # Older checkpoints do not say how the base was loaded.
            known = state.loaded is not None
            if known and (why := differences(state.base, state.loaded, runtime.base, runtime.loaded)):
                raise CheckpointError(
                    f"{self.path} cannot be resumed with this base: {why[0]}; or start another run from its adapters: "
                    "network.adapter=RUN/elite or an agent of a checkpoint"
                )
        # The bank's width affects the last bits of every agent, even of those with a smaller rank.
        if self.bank_rank > runtime.store.max_rank:
            runtime.store.widen(self.bank_rank)
        return [ALGORITHMS[state.algorithm].from_state(state, runtime) for state in self.states]


def write_checkpoint(folder: Path, population: Population, progress: Progress, positions: Positions) -> None:
    """Write agents, elite and ``state.json`` into a folder being committed."""
    runtime, broken = population.runtime, list[int]()
    for agent in population.agents:
        state = agent.state()
        index = state.counters["index"]
        _write_state(state, agent_folder(folder, index), runtime)
        # In the files of all other agents the reader takes numbers that are not finite for damage.
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors(state).values()):
            broken.append(index)  # a sick agent, which keeps its own until it is replaced
    clock = {"seconds": progress.seconds, **asdict(positions)}
    values = {
        "progress": progress.to_dict(),
        "next_index": population.next_index,
        "agents": [agent.index for agent in population.agents],
        "not_finite": broken,
        **{name: clock.pop(name) for name in ("lineage_bytes", "lineage_sha256")},
        "memory": asdict(runtime.limits),
        "bank_rank": runtime.store.max_rank,
    }
    if progress.elite is not None:
        _write_state(progress.elite, folder / _ELITE, runtime)
    # The first of them is the elite, written above.
    for rank, kept in enumerate(progress.kept[1:], start=2):
        if kept.state is not None:
            _write_state(kept.state, folder / f"{_ELITE}_{rank}", runtime)
    for name, content in ((STATE, values), (CLOCK, clock)):
        (folder / name).write_text(strict_json.dumps(content, indent=1) + "\n")


def _write_state(state: AgentState, folder: Path, runtime: Runtime) -> None:
    write_state(state, folder, runtime, lora_of(state, runtime))


def plain_parts(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``state.json`` and ``clock.json`` hold; raises CheckpointError naming what is wrong."""
    return read_json(checkpoint / STATE, StateFile), read_json(checkpoint / CLOCK, ClockFile)


def read_checkpoint(folder: Path, runtime: Runtime) -> SavedCheckpoint:
    """Read what :func:`write_checkpoint` wrote.

    Raises CheckpointError if something is missing, was made for other layers, or has another version.
    """
    layers = runtime.store.layers
    state, clock = plain_parts(folder)
    broken = state.get("not_finite", [])  # missing in old checkpoints
    states = [
        _agent(agent_folder(folder, index), layers, index, finite=index not in broken) for index in state["agents"]
    ]
    elites = [read_state(folder / name, layers) for name in _elites(state)]
    return _checkpoint(folder, state, clock, states, elites)


def _elites(state: dict[str, Any]) -> list[str]:
    """Return the folders of the agents of the best exams, the elite's first."""
    if state["progress"]["elite_iteration"] is None:
        return []
    return [_ELITE, *(f"{_ELITE}_{rank}" for rank in range(2, len(state["progress"].get("kept", [])) + 1))]


def _checkpoint(
    path: Path, state: dict[str, Any], clock: dict[str, Any], states: list[AgentState], elites: list[AgentState]
) -> SavedCheckpoint:
    # Positions are in both files: clock.json has those of files that depend on the time.
    both: dict[str, Any] = {**state, **clock}
    return SavedCheckpoint(
        path,
        states,
        state["next_index"],
        Progress.from_dict(
            state["progress"], elites[0] if elites else None, seconds=clock["seconds"], others=elites[1:]
        ),
        Positions(**{f.name: both[f.name] for f in fields(Positions) if f.name in both}),
        MemoryLimits(**state["memory"]),
        state["bank_rank"],
    )


def received(processes: Processes, checkpoint: Path | None, runtime: Runtime) -> SavedCheckpoint | None:
    """Return what all processes resume from; None at the start.

    The first process reads and verifies the ``checkpoint`` and sends the agents one at a time, because machines need
    not share a file system; the argument is ignored on the others. Raises CheckpointError as :func:`read_checkpoint`
    does.
    """
    if processes.size == 1:
        return None if checkpoint is None else read_checkpoint(checkpoint, runtime)
    sent = list[AgentState]()

    def read() -> Any:
        if checkpoint is None:
            return None
        whole = read_checkpoint(checkpoint, runtime)
        elites = whole.progress.elite, *(kept.state for kept in whole.progress.kept[1:])
        sent.extend([*whole.states, *filter(None, elites)])
        return str(whole.path), *plain_parts(whole.path)

    common = processes.first(read)
    if common is None:
        return None
    path, state, clock = common
    agents, elites = len(state["agents"]), len(_elites(state))
    states = [unpacked(processes.broadcast(packed(sent[k]) if sent else None)) for k in range(agents + elites)]
    return _checkpoint(Path(path), state, clock, states[:agents], states[agents:])


def _agent(folder: Path, layers: tuple[LinearShape, ...], index: int, *, finite: bool) -> AgentState:
    """Read an agent to resume; it must have its optimizer and the index of its folder."""
    state = read_state(folder, layers, finite=finite)
    if state.counters.get("index") != index or state.algorithm not in ALGORITHMS or not state.moments:
        raise CheckpointError(
            f"expected agent {index} of one of the algorithms {', '.join(ALGORITHMS)} with its optimizer in {folder}, "
            f"found agent {shown(state.counters.get('index'))} of {shown(state.algorithm)}"
            f"{'' if state.moments else ' without one'}"
        )
    return state
