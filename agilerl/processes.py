"""Several processes that work on one run, and the exchange of bytes and tensors between them (torch.distributed)."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from agilerl.checks.arguments import reason
from agilerl.errors import ConfigError, EngineError

T = TypeVar("T")

_CONNECTING, _POLL = timedelta(seconds=120), 0.05
_WATCHING = 1.0
"""Seconds between two checks that the launcher is still running."""


@dataclass(frozen=True)
class Processes:
    """A group of processes, seen from one of them.

    All processes of a group make the same calls in the same order. Only bytes and tensors are exchanged, so received
    data cannot run code. Every call raises EngineError if another process is lost.
    """

    rank: int = 0
    """Rank of this process in the group, from 0."""
    size: int = 1
    """Number of processes in the group."""
    name: str | None = None
    """Name of the group in torch.distributed; None: this process is alone.

    A name and not the group itself: the threads of a group end when nothing refers to it any more, and a thread that
    lives on while Python ends can abort the process.
    """

    @classmethod
    def of(cls, group: Any) -> "Processes":
        """Return a group of torch.distributed as this process sees it."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group.group_name)

    @property
    def group(self) -> Any:
        """The group of torch.distributed; raises RuntimeError once this process has left it."""
        return None if self.name is None else dist.distributed_c10d._resolve_process_group(self.name)  # type: ignore[attr-defined,arg-type]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process, in the order of their ranks."""
        if self.size == 1:
            return [data]
        # The lengths first, because all_gather takes tensors of one size.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        _together(lambda: dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        received = [torch.zeros_like(padded) for _ in range(self.size)]
        if longest:
            _together(lambda: dist.all_gather(received, padded, group=self.group))
        return [_bytes(part[: int(length)]) for part, length in zip(received, lengths)]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes that the process of rank ``source`` passed; the other processes pass None."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor([len(data or b"")])
        _together(lambda: dist.broadcast(length, group=self.group, group_src=source))
        content = torch.zeros(int(length), dtype=torch.uint8) if data is None else _tensor(data)
        if len(content):
            _together(lambda: dist.broadcast(content, group=self.group, group_src=source))
        return _bytes(content)

    def send(self, data: bytes, target: int) -> None:
        """Send bytes to the process of rank ``target``, which must call :meth:`receive`."""
        for part in (torch.tensor([len(data)]), _tensor(data)):
            _together(lambda part=part: dist.send(part, group=self.group, group_dst=target))  # type: ignore[misc]

    def receive(self, source: int) -> bytes:
        """Return the bytes that the process of rank ``source`` sends with :meth:`send`; at least one."""
        length = torch.zeros(1, dtype=torch.int64)
        _together(lambda: dist.recv(length, group=self.group, group_src=source))
        content = torch.zeros(int(length), dtype=torch.uint8)
        _together(lambda: dist.recv(content, group=self.group, group_src=source))
        return _bytes(content)

    def add_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes: the same bits on each of them."""
        if self.size > 1:
            _together(lambda: dist.all_reduce(tensor, group=self.group))

    def wait(self) -> None:
        """Return when every process has called this."""
        self.gather(b"")

    def share(self, count: int) -> range:
        """Return which of ``count`` items are this process's: consecutive ones, the first processes get one more."""
        return self.shares(count)[self.rank]

    def shares(self, count: int) -> list[range]:
        """Return the items of every process."""
        least, more = divmod(count, self.size)
        starts = [rank * least + min(rank, more) for rank in range(self.size + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def subgroup(self, groups: Sequence[Sequence[int]]) -> "Processes":
        """Split this group by ranks, and return the subgroup of this process."""
        mine = ALONE
        for ranks in groups:
            # torch requires every process to take part in the creation of every group.
            world = [rank if self.name is None else dist.get_global_rank(self.group, rank) for rank in ranks]
            group = dist.new_group(world) if len(ranks) > 1 else None
            if self.rank in ranks and group is not None:
                mine = Processes.of(group)
        return mine


ALONE = Processes()
"""A single process on its own."""


@contextmanager
def joined(*, cuda: bool = False, timeout_seconds: float = 1800.0) -> Iterator[Processes]:
    """Join the other processes that a launcher has started, and leave them at the end.

    Raises ConfigError if the launcher's variables or the address to meet at cannot be used, EngineError if not all
    processes join in time.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ.get(name, "").isdigit():
            raise ConfigError(
                f"the launcher of this process has set {name}={os.environ.get(name)!r}, expected a whole number; use "
                "torchrun, accelerate launch, or distributed.backend=none for one process"
            )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    _end_with_launcher()
    try:
        _meet("cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                f"the port of {address} is in use by another program; give the launcher a free one, for instance "
                "torchrun --master-port 29511"
            ) from error
        raise EngineError(f"the processes of this run could not meet at {address}: {reason(error)}") from error
    try:
        yield Processes.of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _end_with_launcher() -> None:
    """End this process if torchrun, which started it, is gone: nothing else would end or restart it.

    This is for torchrun only: other launchers need not stay, for instance a shell may start processes and exit.
    """
    # The list also sees to it that one process has one watcher.
    if "TORCHELASTIC_RUN_ID" not in os.environ or _launchers:
        return
    _launchers.append(os.getppid())

    def watch() -> None:
        while not _is_orphaned():
            sleep(_WATCHING)
        if os.environ["RANK"] == "0":
            with suppress(OSError):  # the reader of standard error may be gone as well
                os.write(2, b"error: the launcher of this run was killed; continue with agilerl resume\n")
        os._exit(2)  # like a kill: a run directory is consistent at any moment

    threading.Thread(target=watch, name="watch the launcher", daemon=True).start()


_launchers: list[int] = []
"""The process that started this one, if it is watched."""


def _is_orphaned() -> bool:
    return bool(_launchers) and os.getppid() != _launchers[0]


def _meet(backend: str, patience: timedelta) -> None:
    """Start torch.distributed once every process has arrived; it is quick then, and would hang before."""
    launcher, rank, size = next(rendezvous("env://", timeout=patience))
    # torchrun's store outlives the processes that it restarts, and still has the addresses of those that have ended.
    store = dist.PrefixStore(_meeting(launcher, rank, size, patience), launcher)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=min(patience, _CONNECTING))
    # The short time was for connecting: an operation may wait for as long as another process computes.
    dist.distributed_c10d._set_pg_timeout(patience)


def _meeting(store: Any, rank: int, size: int, patience: timedelta) -> str:
    """Return a word that only the current processes know.

    Each process calls with a word that was never used before. The first process answers every call, even those of dead
    processes, until all living ones have replied.
    """
    if rank:
        call = uuid4().hex
        store.set(f"call {rank}", call)
        store.wait([f"answer {call}"], patience)
        word = str(store.get(f"answer {call}").decode())
        store.set(f"{word} here {rank}", "")
        store.wait([f"{word} complete"], patience)
        return word
    word, end = uuid4().hex, monotonic() + patience.total_seconds()
    missing = set(range(1, size))
    while missing:
        if monotonic() > end:
            raise RuntimeError(f"{len(missing)} of {size} processes did not join")
        for other in missing:
            if store.check([f"call {other}"]):
                store.set(f"answer {store.get(f'call {other}').decode()}", word)
        sleep(_POLL)
        missing = {other for other in missing if not store.check([f"{word} here {other}"])}
    store.set(f"{word} complete", "")
    return word


def _together(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # gloo has one type of error for anything that happens to other processes
        if _is_orphaned():  # the launcher is gone, so this process is about to end as well
            sleep(2 * _WATCHING)
        raise EngineError(
            f"another process of this run is lost or does not answer ({reason(error)}); continue from the last "
            "checkpoint with agilerl resume, or under the launcher with --resume auto"
        ) from error


def _tensor(data: bytes) -> Tensor:
    # A copy: torch warns of a buffer that cannot be written to, and refuses an empty one.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()
