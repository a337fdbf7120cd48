"""Which process belongs to which island, which processes communicate, and what they send each other."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agilerl.config.distributed import DistributedConfig, by_accelerate
from agilerl.errors import AgileRLError, ConfigError, EngineError, WriteError
from agilerl.processes import ALONE, Processes, joined

# -- messages: plain JSON data, and errors ----------------------------------------------------------------------------


T = TypeVar("T")


class ToldError(AgileRLError):
    """An error in another process, reported to all before that process ended."""


class ToldWriteError(ToldError, WriteError):
    """Another process failed to write to its disk."""


class Exchange:
    """Exchanges plain data in a group of processes, which all make the same calls in the same order.

    Every call begins with a status from each process. A process that cannot continue reports this in its next one
    (:meth:`telling`), and the others raise :class:`ToldError` with its message instead of waiting. With a single
    process, every call returns its argument. Raises EngineError if another process is lost.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.error_is_known = False
        """Whether the error that ends this process is known to all."""
        self._lost = False

    @property
    def rank(self) -> int:
        """Rank of this process in the group, from 0."""
        return self.processes.rank

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self.processes.size

    def all(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank; JSON data, NaN included."""
        return [value] if self.size == 1 else [word["value"] for word in self._words({"value": value})]

    def merged(self, values: Mapping[int, T]) -> dict[int, T]:
        """Merge the values of all processes' agents, by agent index, in population order."""
        if self.size == 1:
            return dict(values)
        return {index: value for part in self.all(list(values.items())) for index, value in part}

    def by(self, rank: int, work: Callable[[], T]) -> T:
        """Run ``work`` on one process, and return its result on all."""
        return self.all(work() if self.rank == rank else None)[rank]  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0, and return its result on all."""
        return self.by(0, work)

    def send(self, data: bytes, target: int) -> None:
        """Send bytes to a process that calls :meth:`receive` at the same time."""
        self._meet(lambda: self.processes.send(data, target))

    def receive(self, source: int) -> bytes:
        """Return the bytes that a process sends with :meth:`send`."""
        return self._meet(lambda: self.processes.receive(source))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report an error raised inside to the other processes, so that none of them waits for this one."""
        try:
            yield
        except AgileRLError as error:
            if self.size > 1 and not (self.error_is_known or self._lost):
                self._tell(error)
            raise

    def _tell(self, error: AgileRLError) -> None:
        try:
            self._words({"error": str(error), "disk": isinstance(error, WriteError)})
        except ToldError:  # another process had an error, too: all know of one
            pass
        except EngineError:  # the other processes are gone
            return
        self.error_is_known = True

    def _words(self, word: dict[str, Any]) -> list[Any]:
        # numpy's numbers become Python's
        data = json.dumps(word, default=lambda number: number.item()).encode()
        words = [json.loads(part) for part in self._meet(lambda: self.processes.gather(data))]
        for one in words:
            if "error" in one:
                self.error_is_known = True
                raise (ToldWriteError if one["disk"] else ToldError)(one["error"])
        return words

    def _meet(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except EngineError:
            self._lost = True
            raise


# -- islands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """All processes of a run: a row is an island, which holds its agents; a column holds all agents of the run."""

    world: Exchange = field(default_factory=Exchange)
    """All processes."""
    island: Processes = ALONE
    """The processes of the same island, which share the work on its agents."""
    peers: Exchange = field(default_factory=Exchange)
    """The processes of the same column, one per island; the rank is the island's number."""
    server: str | None = None
    """Address of the vLLM server that samples for this process; if None, the configuration decides how it samples."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run directory, and reports to the user."""
        return self.world.rank == 0

    def places(self, agents: int) -> range:
        """Return this island's places in a population of ``agents``."""
        return self.peers.processes.share(agents)

    def check(self, agents: int) -> None:
        """Raise ConfigError if there are more islands than agents."""
        if self.peers.size > agents:
            raise ConfigError(
                f"there are more islands than agents: {self.peers.size} islands, training.pop_size={agents}; start "
                f"at most {agents * self.island.size} processes, or raise distributed.processes_per_island"
            )


SOLITARY = Topology()
"""A single process."""


@contextmanager
def connected(config: DistributedConfig, *, cuda: bool, server: str | None = None) -> Iterator[Topology]:
    """Connect to the processes that a launcher has started, and divide them into islands.

    Raises ConfigError without a launcher, for a number that cannot be divided, or a port in use, and EngineError if not
    all processes connect.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "distributed.backend=torch needs a launcher that starts the processes, found none; use torchrun "
            "--nproc-per-node 2 -m agilerl train ..., or distributed.backend=auto"
        )
    with joined(cuda=cuda, timeout_seconds=config.timeout_seconds) as world:
        # The first process decides: with different settings they would wait in groups that only some of them make.
        size = Exchange(world).first(lambda: config.processes_per_island)
        settings = config.model_copy(update={"processes_per_island": size})
        try:
            topology = arranged(world, settings)
        except ConfigError as error:
            # All processes raise it, so that one of them prints it.
            error.everywhere = True
            raise
        yield replace(topology, server=server)


def arranged(world: Processes, config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> Topology:
    """Divide all processes into islands of consecutive ones; raises ConfigError if that is impossible."""
    size = config.processes_per_island or (world.size if by_accelerate(environment) else 1)
    if world.size % size:
        raise ConfigError(
            f"{world.size} processes cannot be divided into islands of distributed.processes_per_island={size}; start "
            f"a multiple of {size}, or choose a divisor of {world.size}"
        )
    if size == 1 and (sharding := config.base_sharding(environment)) != "none":
        raise ConfigError(
            f"distributed.sharding={sharding} shards the base within an island, found islands of one "
            "process; set distributed.processes_per_island=2 or more, or distributed.sharding=none"
        )
    count = world.size // size
    rows = [range(number * size, (number + 1) * size) for number in range(count)]
    columns = [range(rank, world.size, size) for rank in range(size)]
    everyone = Exchange(world)
    if size == 1:
        return Topology(everyone, ALONE, everyone)
    # Every process takes part in creating every group, so all must use the same order.
    island = world if count == 1 else world.subgroup(rows)
    peers = ALONE if count == 1 else world.subgroup(columns)
    return Topology(everyone, island, Exchange(peers))
