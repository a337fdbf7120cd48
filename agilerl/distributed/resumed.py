"""A checkpoint that one process reads and all go on from: machines need not share a file system."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from agilerl.algorithms.state import AgentState
from agilerl.distributed.topology import Topology
from agilerl.distributed.transfer import packed, unpacked
from agilerl.models.memory import MemoryLimits
from agilerl.runtime import Runtime
from agilerl.training.progress import Progress
from agilerl.training.saved import Positions, SavedCheckpoint, read_checkpoint

__all__ = ["received"]


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
