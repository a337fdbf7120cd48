"""A run directory as something to go on with: what it was started with, and its newest intact checkpoint."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms.state import AgentState, constructor_arguments, read_state, write_state
from agilerl.config.named_files import check_unchanged
from agilerl.config.run import RunConfig
from agilerl.distributed.topology import Topology
from agilerl.distributed.transfer import packed, unpacked
from agilerl.errors import CheckpointError
from agilerl.models.memory import MemoryLimits
from agilerl.models.slots import LinearShape
from agilerl.population import Population
from agilerl.runs import strict_json
from agilerl.runs.checkpoints import STATE, CheckpointStore, agent_files
from agilerl.runs.directory import RunDirectory
from agilerl.runs.journal import damaged_lines, missing_records
from agilerl.runtime import Runtime
from agilerl.training.progress import Progress
from agilerl.training.resolved import recorded
from agilerl.training.state_json import read_clock, read_state_json
from agilerl.validation import shown

_ELITE = "elite"
CLOCK = "clock.json"
"""What a checkpoint says of wall time and of the lengths of files that depend on it: not the same twice."""


@dataclass(frozen=True)
class SavedRun:
    """An unfinished run whose directory this process has locked."""

    run: RunDirectory
    config: RunConfig
    checkpoint: Path | None
    """Folder of the newest intact checkpoint; None where the run died before the first."""


@dataclass(frozen=True)
class Positions:
    """How much of the append-only files belongs to a checkpoint."""

    metrics_bytes: int
    lineage_bytes: int
    journal_records: int
    metrics_sha256: str | None = None
    """Of those bytes; None where it was not noted yet."""
    lineage_sha256: str | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """Everything that decides how a run goes on."""

    path: Path
    states: list[AgentState]
    """The agents, in the order of the population."""
    next_index: int
    progress: Progress
    positions: Positions
    memory: MemoryLimits
    """What memory had turned out to hold."""
    bank_rank: int
    """Largest rank that the bank of adapters has had room for."""


def open_run(path: str | Path, *, report: Callable[[str], None], allow_changes: bool = False) -> SavedRun:
    """Lock the directory of an unfinished run and find its newest checkpoint that can be gone on from.

    That is one that is intact and whose lines of metrics, lineage and journal are all there, as they were written.
    Newer ones are put aside, those that were renamed get their names again, and ``report`` is told in sentences, also
    of what is lost. Raises CheckpointError where there is no run, a finished one, or one that another process works on,
    where intact checkpoints lack lines, all of them, and, without ``allow_changes``, where files that the run reads are
    not what they were when it began, or where every checkpoint has lines that were changed; and ConfigError where its
    configuration is not valid.
    """
    run = RunDirectory.open(path)
    try:
        config = recorded(run.info)
        if not allow_changes:
            check_unchanged(config, run.info.get("files", {}), run.root)
        return SavedRun(run, config, _newest_usable(run, report, allow_changes=allow_changes))
    except BaseException:
        run.close()
        raise


def _newest_usable(run: RunDirectory, report: Callable[[str], None], *, allow_changes: bool) -> Path | None:
    """Return the newest intact checkpoint whose lines are all there; None, and said, where none is intact."""
    store = CheckpointStore(run.checkpoints, report=report)
    store.put_in_order(_number_in)
    found, short = store.latest(), dict[Path, str]()
    while found is not None and (lost := _lost_lines(run, found, allow_changes=allow_changes)):
        short[found] = lost
        found = store.latest(before=int(found.name))
    if found is None and short:
        newest = next(iter(short))
        raise CheckpointError(
            f"{short[newest]}, and no other checkpoint can do without them; put the file back from a copy, or start "
            f"another run from an adapter of this one: network.adapter={newest}/agent_N/actor"
            f"{_as_they_are(run, newest)}"
        )
    for folder, lost in short.items():
        store.put_aside(folder, f"{lost}.")
    if found is not None and short:
        report(f"The run goes on after iteration {int(found.name)}; what it did since is lost, and done again.")
    elif found is None and store.damaged:
        report(f"No checkpoint of {run.root} is intact: the run starts again from its beginning, its work is lost.")
    return found


def _lost_lines(run: RunDirectory, checkpoint: Path, *, allow_changes: bool) -> str:
    """Return in words what the append-only files lack of what there was at a checkpoint, "" where nothing.

    With ``allow_changes`` other lines than were written are no lack, as long as there are as many bytes of them.
    """
    state, clock = read_state_json(checkpoint / STATE), read_clock(checkpoint / CLOCK)
    metrics, lineage = clock.get("metrics_sha256"), state.get("lineage_sha256")
    return (
        damaged_lines(run.metrics, clock["metrics_bytes"], None if allow_changes else metrics)
        or damaged_lines(run.lineage, state["lineage_bytes"], None if allow_changes else lineage)
        or missing_records(run.journal, clock["journal_records"])
    )


def _as_they_are(run: RunDirectory, checkpoint: Path) -> str:
    """Return what else can be done where the lines are those of a run, and only not what was written."""
    if _lost_lines(run, checkpoint, allow_changes=True):
        return ""
    return f"; or go on with the lines as they are: agilerl resume {shlex.quote(str(run.root))} --allow-changes"


def _number_in(checkpoint: Path) -> int | None:
    """Return the iteration that a checkpoint was made after, whatever its folder is called."""
    try:
        return int(read_state_json(checkpoint / STATE)["progress"]["iteration"])
    except CheckpointError:
        return None


def write_checkpoint(folder: Path, population: Population, progress: Progress, positions: Positions) -> None:
    """Write agents, elite and ``state.json`` into a folder that is being committed."""
    runtime, broken = population.runtime, list[int]()
    for state in population.states():
        index = state.counters["index"]
        _write_state(state, agent_files(folder, index).root, runtime)
        broken += [] if _is_finite(state) else [index]
    values = {
        "progress": progress.to_dict(),
        "next_index": population.next_index,
        "agents": [agent.index for agent in population.everyone],
        "not_finite": broken,
        "lineage_bytes": positions.lineage_bytes,
        "lineage_sha256": positions.lineage_sha256,
        "memory": asdict(runtime.limits),
        "bank_rank": runtime.store.max_rank,
    }
    if progress.elite is not None:
        _write_state(progress.elite, folder / _ELITE, runtime)
    clock = {
        "seconds": progress.seconds,
        "metrics_bytes": positions.metrics_bytes,
        "metrics_sha256": positions.metrics_sha256,
        "journal_records": positions.journal_records,
    }
    for name, content in ((STATE, values), (CLOCK, clock)):
        (folder / name).write_text(strict_json.dumps(content, indent=1) + "\n")


def _write_state(state: AgentState, folder: Path, runtime: Runtime) -> None:
    write_state(state, folder, runtime, constructor_arguments(state, runtime)["lora_config"])


def read_checkpoint(folder: Path, runtime: Runtime) -> SavedCheckpoint:
    """Read what :func:`write_checkpoint` wrote.

    Raises CheckpointError where something is missing, was made for other layers, or is of another version.
    """
    layers = runtime.store.layers
    state, clock = read_state_json(folder / STATE), read_clock(folder / CLOCK)
    try:
        broken = state.get("not_finite", [])  # none in a checkpoint of the time before there was the list
        states = [
            _agent(agent_files(folder, index).root, layers, index, finite=index not in broken)
            for index in state["agents"]
        ]
        has_elite = state["progress"]["elite_iteration"] is not None
        elite = read_state(folder / _ELITE, layers) if has_elite else None
        positions = Positions(
            clock["metrics_bytes"],
            state["lineage_bytes"],
            clock["journal_records"],
            clock.get("metrics_sha256"),
            state.get("lineage_sha256"),
        )
        progress = Progress.from_dict(state["progress"], elite, seconds=float(clock["seconds"]))
        memory = MemoryLimits(**state["memory"])
        return SavedCheckpoint(folder, states, state["next_index"], progress, positions, memory, state["bank_rank"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / STATE} does not hold what a checkpoint of this version does ({error!r}); go on with the "
            "version of agilerl that run.json names"
        ) from error


def received(topology: Topology, checkpoint: Path | None, runtime: Runtime) -> SavedCheckpoint | None:
    """Return what a process goes on from: its share of the agents, and what everybody knows; None at the beginning.

    The process that writes reads and verifies the ``checkpoint`` and sends the agents, one at a time; what the others
    give is not looked at. The elite stays with the first island. Raises CheckpointError as ``read_checkpoint`` does.
    """
    world = topology.world
    if world.size == 1:
        return None if checkpoint is None else read_checkpoint(checkpoint, runtime)
    whole = read_checkpoint(checkpoint, runtime) if checkpoint is not None and topology.is_writer else None
    common = world.first(lambda: None if whole is None else _common(whole))
    if common is None:
        return None
    places, states = topology.places(common["agents"]), list[AgentState]()
    for place in range(common["agents"]):
        data = world.processes.broadcast(None if whole is None else packed(whole.states[place]))
        if place in places:
            states.append(unpacked(data))
    elite = None
    if common["has_elite"]:
        sent = None if whole is None or whole.progress.elite is None else packed(whole.progress.elite)
        data = world.processes.broadcast(sent)
        elite = unpacked(data) if topology.peers.rank == 0 else None
    progress = Progress.from_dict(common["progress"], elite, seconds=common["seconds"])
    positions, memory = Positions(**common["positions"]), MemoryLimits(**common["memory"])
    path = Path(common["path"])
    return SavedCheckpoint(path, states, common["next_index"], progress, positions, memory, common["bank_rank"])


def _common(whole: SavedCheckpoint) -> dict[str, Any]:
    """Return what every process has to know of a checkpoint."""
    return {
        "path": str(whole.path),
        "agents": len(whole.states),
        "next_index": whole.next_index,
        "progress": whole.progress.to_dict(),
        "seconds": whole.progress.seconds_before,
        "has_elite": whole.progress.elite is not None,
        "positions": asdict(whole.positions),
        "memory": asdict(whole.memory),
        "bank_rank": whole.bank_rank,
    }


def _is_finite(state: AgentState) -> bool:
    """Return whether an agent's weights and moments are numbers: one that is sick keeps what it has until it goes."""
    parts = [state.adapter, *state.moments.values(), state.reference or []]
    heads: list[Tensor] = []
    if state.critic is not None:
        parts += [state.critic.adapter, *state.critic.moments.values()]
        heads += [state.critic.head, *state.critic.head_moments.values()]
    tensors = [*heads, *(tensor for factors in parts for pair in factors for tensor in pair)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _agent(folder: Path, layers: tuple[LinearShape, ...], index: int, *, finite: bool) -> AgentState:
    """Read an agent that goes on: it needs its optimizer, and is who its folder says."""
    state = read_state(folder, layers, finite=finite)
    if state.counters.get("index") != index or state.algorithm not in ALGORITHMS or not state.moments:
        raise CheckpointError(
            f"expected agent {index} of one of the algorithms {', '.join(ALGORITHMS)} with its optimizer in {folder}, "
            f"found agent {shown(state.counters.get('index'))} of {shown(state.algorithm)}"
            f"{'' if state.moments else ' without one'}"
        )
    return state
