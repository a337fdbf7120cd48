"""Several processes in step: forward passes, for which each needs the others' part of the weights, and answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agilerl import errors
from agilerl.errors import AgileRLError, EngineError
from agilerl.processes import Processes

_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "peer")
"""What torch says, in errors without a type of their own, when another process does not take part."""
_FINE, _FAILED = b"\0", b"\1"
_ERRORS: dict[str, type[AgileRLError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AgileRLError)
}


class Lockstep:
    """Lets processes that hold a part of the weights each make equally many forward passes.

    A pass gathers the weights of every layer from all processes, so none can make one alone: before each, all say what
    they are about to do, and whoever has nothing left to compute keeps the others company with a pass over a few
    tokens. All processes are always in the same phase (sampling, log-probs, an optimizer step), which ends with
    :meth:`catch_up`.
    """

    def __init__(self, processes: Processes, company: Callable[[bool], None]) -> None:
        """``company(train)`` makes a small pass, with ``train`` there and back, that leaves nothing behind."""
        self.processes, self._company = processes, company
        self._inside = self._in_company = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround a forward pass of the body; with gradient it lasts until :meth:`backward` has been left."""
        if self._in_company:
            yield
            return
        self._check_whole()
        train = torch.is_grad_enabled()
        self._announce(train)
        self._inside = True
        with _lost_is_said():
            yield
        self._inside = train

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround the backward pass of what was computed last."""
        with _lost_is_said():
            yield
        self._inside = False

    def catch_up(self) -> None:
        """Keep the others company until all have come here."""
        self._check_whole()
        while (train := self._announce(None)) is not None:
            self._in_company = True
            try:
                with _lost_is_said():
                    self._company(train)
            finally:
                self._in_company = False

    def _announce(self, train: bool | None) -> bool | None:
        """Say that a pass comes, or with None that there is none left; returns what the others do, None: nothing."""
        passes = torch.tensor([float(train is False), float(train is True)])
        self.processes.add_(passes)
        if not passes.any():
            return None
        return bool(passes[1])

    def _check_whole(self) -> None:
        if self._inside:
            raise EngineError(
                f"process {self.processes.rank} broke off in the middle of a pass through a base whose weights several "
                "processes hold, where the others cannot go on without it; if its memory ran out, lower "
                "training.max_tokens_in_flight and training.max_rows_in_flight"
            )


def agreed(processes: Processes, compute: Callable[[], bytes], lockstep: Lockstep | None = None) -> list[bytes]:
    """Return what ``compute`` gave in every process, in the order of their ranks.

    An error that is raised on purpose in one process is raised in all of them, so that all end with the same sentence.
    Raises EngineError where a process is lost.
    """
    failed: AgileRLError | None = None
    try:
        sent = _FINE + compute()
    except AgileRLError as error:
        failed = error
        sent = _FAILED + json.dumps([type(error).__name__, str(error)]).encode()
    if lockstep is not None:
        lockstep.catch_up()
    received = processes.gather(sent)
    for part in received:
        if failed is None and part[:1] == _FAILED:
            kind, message = json.loads(part[1:])
            failed = _ERRORS.get(kind, AgileRLError)(message)
    if failed is not None:
        failed.everywhere = True
        raise failed
    return [part[1:] for part in received]


@contextmanager
def _lost_is_said() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in _SIGNS):
            raise EngineError(
                "another process of this run is lost or does not answer; go on from the last checkpoint with agilerl "
                "resume, or under the launcher with --resume auto"
            ) from error
        raise
