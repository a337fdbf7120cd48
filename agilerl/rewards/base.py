"""Graders that hold something: what opens them, closes them, and names them."""

import os
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

__all__ = ["BaseGrader", "Resource", "close", "setup"]


@runtime_checkable
class Resource(Protocol):
    """Anything with ``setup`` and ``close``, whoever wrote it."""

    def setup(self) -> None:
        """Open what grading needs."""

    def close(self) -> None:
        """Release it."""


class BaseGrader:
    """A grader with a name and something to open: a model, a connection, a process, other graders.

    Subclasses give ``open`` and ``release``, and ``__call__`` with one of the two signatures. ``setup`` may be called
    any number of times and opens once per process, also in a process that was forked from one where it was open;
    graders of the package call it themselves when they are first used.
    """

    name: str = "grader"
    """What messages and metrics call it."""
    _opened_by: int | None = None

    def setup(self) -> None:
        """Open what grading needs, unless this process has already done so."""
        if self._opened_by != os.getpid():
            self.open()
            self._opened_by = os.getpid()

    def close(self) -> None:
        """Release it, if this process has opened it; it can be set up again."""
        if self._opened_by == os.getpid():
            self._opened_by = None
            self.release()

    def open(self) -> None:
        """Do what ``setup`` is for."""

    def release(self) -> None:
        """Undo ``open``."""

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def setup(grader: object) -> None:
    """Call ``setup`` of a grader that has one; plain functions have nothing to open."""
    if isinstance(grader, Resource):
        grader.setup()


def close(grader: object) -> None:
    """Call ``close`` of a grader that has one."""
    if isinstance(grader, Resource):
        grader.close()
