"""Messages between the processes of a run: plain JSON data, bytes from one to another, and errors."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from agilerl.errors import AgileRLError, EngineError, WriteError
from agilerl.processes import ALONE, Processes

T = TypeVar("T")


class ToldError(AgileRLError):
    """An error in another process, reported to all before that process ended."""

    def __init__(self, sentence: str, rank: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        """The error message."""
        self.rank = rank
        """The rank of the process with the error."""


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
        self.told = False
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
        if self.size == 1:
            return [value]
        words = self._words({"value": value})
        return [word["value"] for word in words]

    def merged(self, own: Mapping[int, T]) -> dict[int, T]:
        """Merge the values of all processes' agents, by agent index, in population order."""
        if self.size == 1:
            return dict(own)
        return {index: value for part in self.all(list(own.items())) for index, value in part}

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
            if self.size > 1 and not (self.told or self._lost):
                self._tell(error)
            raise

    def _tell(self, error: AgileRLError) -> None:
        try:
            self._words({"error": str(error), "disk": isinstance(error, WriteError)})
        except ToldError:
            pass
        except EngineError:  # the other processes are gone
            return
        self.told = True

    def _words(self, word: dict[str, Any]) -> list[Any]:
        parts = self._meet(lambda: self.processes.gather(json.dumps(word, default=_number).encode()))
        words = [json.loads(part) for part in parts]
        for rank, one in enumerate(words):
            if "error" in one:
                self.told = True
                raise (ToldWriteError if one["disk"] else ToldError)(one["error"], rank)
        return words

    def _meet(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except EngineError:
            self._lost = True
            raise


def _number(value: Any) -> Any:
    """Convert a numpy number to a Python number."""
    return value.item()
