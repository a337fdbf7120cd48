"""A run directory as something to go on with: what it was started with, and its newest intact checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms.state import AgentState, constructor_arguments, read_state, write_state
from agilerl.errors import CheckpointError
from agilerl.models.memory import MemoryLimits
from agilerl.models.slots import LinearShape
from agilerl.runs import strict_json
from agilerl.runs.checkpoints import STATE, CheckpointStore, agent_files
from agilerl.runs.directory import RunDirectory
from agilerl.runtime import Runtime
from agilerl.training.config import RunConfig
from agilerl.training.named_files import check_unchanged
from agilerl.training.progress import Progress
from agilerl.training.state_json import read_clock, read_state_json
from agilerl.validation import shown

__all__ = ["CLOCK", "Positions", "SavedCheckpoint", "SavedRun", "open_run", "read_checkpoint", "write_checkpoint"]

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
    """Lock the directory of an unfinished run and find its newest intact checkpoint.

    A damaged checkpoint is put aside, and ``report`` is told in a sentence. Raises CheckpointError where there is no
    run, a finished one, or one that another process works on, and, without ``allow_changes``, where files that the run
    reads are not what they were when it began; and ConfigError where its configuration is not valid.
    """
    run = RunDirectory.open(path)
    try:
        config = RunConfig.from_dict(run.info["config"])
        if not allow_changes:
            check_unchanged(config, run.info.get("files", {}))
        return SavedRun(run, config, CheckpointStore(run.checkpoints, report=report).latest())
    except BaseException:
        run.close()
        raise


def write_checkpoint(
    folder: Path, agents: Sequence[Any], progress: Progress, next_index: int, positions: Positions
) -> None:
    """Write agents, elite and ``state.json`` into a folder that is being committed."""
    for agent in agents:
        agent.save_checkpoint(agent_files(folder, agent.index).root)
    if progress.elite is not None:
        runtime: Runtime = agents[0].runtime
        lora = constructor_arguments(progress.elite, runtime)["lora_config"]
        write_state(progress.elite, folder / _ELITE, runtime, lora)
    state = {
        "progress": progress.to_dict(),
        "next_index": next_index,
        "agents": [agent.index for agent in agents],
        "lineage_bytes": positions.lineage_bytes,
        "memory": asdict(agents[0].runtime.limits),
        "bank_rank": agents[0].runtime.store.max_rank,
    }
    clock = {
        "seconds": progress.seconds,
        "metrics_bytes": positions.metrics_bytes,
        "journal_records": positions.journal_records,
    }
    for name, values in ((STATE, state), (CLOCK, clock)):
        (folder / name).write_text(strict_json.dumps(values, indent=1) + "\n")


def read_checkpoint(folder: Path, runtime: Runtime) -> SavedCheckpoint:
    """Read what :func:`write_checkpoint` wrote.

    Raises CheckpointError where something is missing, was made for other layers, or is of another version.
    """
    layers = runtime.store.layers
    state, clock = read_state_json(folder / STATE), read_clock(folder / CLOCK)
    try:
        states = [_agent(agent_files(folder, index).root, layers, index) for index in state["agents"]]
        has_elite = state["progress"]["elite_iteration"] is not None
        elite = read_state(folder / _ELITE, layers) if has_elite else None
        positions = Positions(clock["metrics_bytes"], state["lineage_bytes"], clock["journal_records"])
        progress = Progress.from_dict(state["progress"], elite, seconds=float(clock["seconds"]))
        memory = MemoryLimits(**state["memory"])
        return SavedCheckpoint(folder, states, state["next_index"], progress, positions, memory, state["bank_rank"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / STATE} does not hold what a checkpoint of this version does ({error!r}); go on with the "
            "version of agilerl that run.json names"
        ) from error


def _agent(folder: Path, layers: tuple[LinearShape, ...], index: int) -> AgentState:
    """Read an agent that goes on: it needs its optimizer, and is who its folder says."""
    state = read_state(folder, layers)
    if state.counters.get("index") != index or state.algorithm not in ALGORITHMS or not state.moments:
        raise CheckpointError(
            f"expected agent {index} of one of the algorithms {', '.join(ALGORITHMS)} with its optimizer in {folder}, "
            f"found agent {shown(state.counters.get('index'))} of {shown(state.algorithm)}"
            f"{'' if state.moments else ' without one'}"
        )
    return state
