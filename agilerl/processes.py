"""Several processes that work on one run: who computes what, and what they exchange (torch.distributed)."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from agilerl import errors
from agilerl.checks.arguments import reason
from agilerl.errors import AgileRLError, ConfigError, EngineError, LostProcessError

T = TypeVar("T")

_FINE, _FAILED = b"\0", b"\1"
"""The first byte of a result."""
_ERRORS: dict[str, type[AgileRLError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AgileRLError)
}

_CONNECTING, _POLL = timedelta(seconds=120), 0.05
_WATCHING = 1.0
"""Seconds between two checks that the launcher is still running."""


class InStep(Protocol):
    """What keeps the forward passes of several processes in step."""

    def catch_up(self) -> None:
        """Wait until all processes have reached this point."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    All processes make the same calls in the same order. Only bytes and tensors are exchanged, so received data cannot
    run code. Every call raises LostProcessError if another process is lost.
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

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor with that of the process of rank ``source``."""
        if self.size > 1:
            _together(lambda: dist.broadcast(tensor, group=self.group, group_src=source))

    def add_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes: the same bits on each of them."""
        if self.size > 1:
            _together(lambda: dist.all_reduce(tensor, group=self.group))

    def share(self, count: int) -> range:
        """Return which of ``count`` items are this process's: consecutive ones, the first processes get one more."""
        return self.shares(count)[self.rank]

    def shares(self, count: int) -> list[range]:
        """Return the items of every process."""
        least, more = divmod(count, self.size)
        starts = [rank * least + min(rank, more) for rank in range(self.size + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def first_number(self, count: int) -> int:
        """Return the number of this process's first thing, if those of all processes are counted one after another."""
        counts = [int.from_bytes(part) for part in self.gather(count.to_bytes(8))]
        return sum(counts[: self.rank])

    def parts(self, owners: Sequence[object], *, whole: bool) -> list[list[int]]:
        """Return which items each process computes, where item k belongs to the agent ``owners[k]``.

        ``whole``: each process takes all items of some agents; else of all items, whoever owns them. Both consecutive.
        """
        units: dict[object, list[int]] = {}
        for number, owner in enumerate(owners):
            units.setdefault(owner if whole else number, []).append(number)
        lists = list(units.values())
        return [[number for k in share for number in lists[k]] for share in self.shares(len(lists))]

    # -- results and errors, which all processes get --------------------------------------------------------------

    def agreed(self, compute: Callable[[], bytes], in_step: InStep | None = None) -> list[bytes]:
        """Return the result of ``compute`` in every process, in the order of their ranks.

        An error of this package that one process raises is raised in all of them, so that all end with the same
        message. ``in_step``: ``compute`` may run forward passes in which the other processes take part.
        """
        failed: AgileRLError | None = None
        try:
            sent = _FINE + compute()
        except LostProcessError:
            raise
        except AgileRLError as error:
            failed = error
            sent = _FAILED + json.dumps([type(error).__name__, str(error)]).encode()
        if in_step is not None and self.size > 1:
            # Also after an error, because other processes may have passes left, which need this one.
            in_step.catch_up()
        received = self.gather(sent)
        for part in received:
            if failed is None and part[:1] == _FAILED:
                kind, message = json.loads(part[1:])
                failed = _ERRORS.get(kind, AgileRLError)(message)
        if failed is not None:
            failed.everywhere = True
            raise failed
        return [part[1:] for part in received]

    def all(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank; JSON data, NaN included."""
        return [value] if self.size == 1 else [json.loads(part) for part in self.agreed(lambda: as_json(value))]

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the first process, while the others wait; return its result, JSON data, in all of them."""
        if self.size == 1:
            return work()
        result: T = json.loads(self.agreed(lambda: as_json(work() if self.rank == 0 else None))[0])
        return result

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raise an error of one process in the others, so that none of them waits for this one."""
        try:
            yield
        except AgileRLError as error:
            if self.size > 1 and not error.everywhere and not isinstance(error, LostProcessError):
                with suppress(AgileRLError):  # this one, or the loss of the others
                    self.agreed(partial(_raise, error))
            raise


ALONE = Processes()
"""A single process on its own."""


@contextmanager
def joined(*, cuda: bool = False, timeout_seconds: float = 1800.0) -> Iterator[Processes]:
    """Join the other processes that a launcher has started, and leave them at the end.

    Those of Ray Train have joined already. Raises ConfigError if the launcher's variables or the address to meet at
    cannot be used, EngineError if not all processes join in time.
    """
    if dist.is_initialized():
        yield Processes.of(dist.group.WORLD)
        return
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
        raise LostProcessError(
            f"another process of this run is lost or does not answer ({reason(error)}); continue from the last "
            "checkpoint with agilerl resume, or under the launcher with --resume auto"
        ) from error


def as_json(value: Any) -> bytes:
    """Return plain data as JSON, NaN included."""
    # numpy's numbers become Python's
    return json.dumps(value, default=lambda number: number.item()).encode()


def _raise(error: AgileRLError) -> bytes:
    raise error


def _tensor(data: bytes) -> Tensor:
    # A copy: torch warns of a buffer that cannot be written to, and refuses an empty one.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()
