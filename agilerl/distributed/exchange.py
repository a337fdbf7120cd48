"""What the processes of a run tell each other: plain data in JSON, bytes from one to another, and errors."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from agilerl.errors import AgileRLError, EngineError, WriteError
from agilerl.processes import ALONE, Processes

T = TypeVar("T")


class ToldError(AgileRLError):
    """An error that another process met, and told to all before it left."""

    def __init__(self, sentence: str, rank: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        """What was wrong."""
        self.rank = rank
        """Who met it."""


class ToldWriteError(ToldError, WriteError):
    """The disk of another process refused."""


class Exchange:
    """Plain data between the processes of a group: all of them make the same calls in the same order.

    Every call begins with a word from everybody. A process that cannot go on says so in its next one
    (:meth:`telling`), and the others raise :class:`ToldError` with its sentence instead of waiting. Alone, every call
    returns what it was given. Raises EngineError where another process is lost.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.told = False
        """Whether the others know why this process ends, or it knows from them."""
        self._lost = False

    @property
    def rank(self) -> int:
        """Place of this process among those that talk, from 0."""
        return self.processes.rank

    @property
    def size(self) -> int:
        """Processes that talk."""
        return self.processes.size

    def all(self, value: T) -> list[T]:
        """Return what every process gave, in the order of their ranks; data that JSON holds, NaN included."""
        if self.size == 1:
            return [value]
        words = self._words({"value": value})
        return [word["value"] for word in words]

    def merged(self, own: Mapping[int, T]) -> dict[int, T]:
        """Return what all processes said of their agents, by agent index, in the order of the population."""
        if self.size == 1:
            return dict(own)
        return {index: value for part in self.all(list(own.items())) for index, value in part}

    def by(self, rank: int, work: Callable[[], T]) -> T:
        """Let one process do something, and return on all of them what came of it."""
        return self.all(work() if self.rank == rank else None)[rank]  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Let the process of rank 0 do something, and return on all of them what came of it."""
        return self.by(0, work)

    def send(self, data: bytes, target: int) -> None:
        """Give bytes to a process that calls :meth:`receive` now."""
        self._meet(lambda: self.processes.send(data, target))

    def receive(self, source: int) -> bytes:
        """Return the bytes that a process gives with :meth:`send`."""
        return self._meet(lambda: self.processes.receive(source))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error that ends what is done inside, so that nobody waits for this process."""
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
        except EngineError:  # nobody is there any more
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
    """Return a number of numpy as one of Python."""
    return value.item()
