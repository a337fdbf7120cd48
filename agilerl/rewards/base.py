"""What graders share: the base class of those that hold resources, and how an answer is found in a completion."""

import os
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from agilerl.arguments import checked


@runtime_checkable
class Resource(Protocol):
    """Any object with ``setup`` and ``close``."""

    def setup(self) -> None:
        """Open what grading needs."""

    def close(self) -> None:
        """Release it."""


class BaseGrader:
    """A grader with a name and a resource to open: a model, a connection, a process, other graders.

    Subclasses implement ``open`` and ``release``, and ``__call__`` with one of the two signatures. ``setup`` may be
    called any number of times and opens once per process; a process that was forked from one where the grader was open
    opens it again. The package's graders call it themselves when they are first used.
    """

    name: str = "grader"
    """The grader's name in messages and metrics."""
    _opened_by: int | None = None

    def setup(self) -> None:
        """Open what grading needs, unless this process has already done so."""
        if self._opened_by != os.getpid():
            self.open()
            self._opened_by = os.getpid()

    def close(self) -> None:
        """Release it, if this process has opened it; ``setup`` can open it again."""
        if self._opened_by == os.getpid():
            self._opened_by = None
            self.release()

    def open(self) -> None:
        """Open the resource; called by ``setup``."""

    def release(self) -> None:
        """Undo ``open``."""

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def setup(grader: object) -> None:
    """Call the grader's ``setup`` if it has one; plain functions do not."""
    if isinstance(grader, Resource):
        grader.setup()


def close(grader: object) -> None:
    """Call the grader's ``close`` if it has one."""
    if isinstance(grader, Resource):
        grader.close()


# -- reward functions that only need text -----------------------------------------------------------------------------


OPEN, CLOSE = "<answer>", "</answer>"


@checked
def extract_answer(completion: str) -> str:
    """Return the text between the last ``<answer>`` and ``</answer>``, else the whole completion; stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    return completion[start + len(OPEN) : end].strip() if start >= 0 else completion.strip()


@checked
def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer equals ``answer``, ignoring outer whitespace; else 0.0."""
    return 1.0 if extract_answer(completion) == answer.strip() else 0.0
