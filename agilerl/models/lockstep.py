"""Several processes in step: their forward passes, which need the weights that the others hold, and their answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agilerl import errors
from agilerl.errors import AgileRLError, EngineError
from agilerl.processes import Processes

_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "peer")
"""What torch's errors say, which have no type of their own, if another process does not take part."""
_FINE, _FAILED = b"\0", b"\1"
_ERRORS: dict[str, type[AgileRLError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AgileRLError)
}


class Lockstep:
    """Makes processes that each hold a part of the weights run the same number of forward passes.

    A pass gathers the weights of every layer from all processes, so no process can run one alone. Before each pass all
    processes announce what they are about to do, and a process that has nothing left to compute joins in with a dummy
    pass over a few tokens. All processes are always in the same phase (sampling, log-probs, an optimizer step), which
    ends with :meth:`catch_up`.
    """

    def __init__(self, processes: Processes, dummy: Callable[[bool], None]) -> None:
        """``dummy(train)`` runs a small forward pass, with ``train`` also a backward pass, without side effects."""
        self.processes, self._dummy = processes, dummy
        self._inside = self._in_dummy = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround a forward pass of the body; with gradients, the pass lasts until the end of :meth:`backward`."""
        if self._in_dummy:
            yield
            return
        self._check_whole()
        train = torch.is_grad_enabled()
        self._announce(train)
        self._inside = True
        with _reporting_lost_process():
            yield
        self._inside = train

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround the backward pass of the last forward pass."""
        with _reporting_lost_process():
            yield
        self._inside = False

    def catch_up(self) -> None:
        """Run dummy passes until all processes have reached this point."""
        self._check_whole()
        while (train := self._announce(None)) is not None:
            self._in_dummy = True
            try:
                with _reporting_lost_process():
                    self._dummy(train)
            finally:
                self._in_dummy = False

    def _announce(self, train: bool | None) -> bool | None:
        """Announce a pass, or with None that none is left; returns what any process is about to do, None: nothing."""
        passes = torch.tensor([float(train is False), float(train is True)])
        self.processes.add_(passes)
        if not passes.any():
            return None
        return bool(passes[1])

    def _check_whole(self) -> None:
        if self._inside:
            raise EngineError(
                f"process {self.processes.rank} failed in the middle of a pass through the sharded base, which the "
                "other processes cannot finish without it; if it ran out of memory, lower "
                "training.max_tokens_in_flight and training.max_rows_in_flight"
            )


def agreed(processes: Processes, compute: Callable[[], bytes], lockstep: Lockstep | None = None) -> list[bytes]:
    """Return the result of ``compute`` in every process, in the order of their ranks.

    An error of this package that one process raises is raised in all of them, so that all end with the same message.
    Raises EngineError if a process is lost.
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
def _reporting_lost_process() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in _SIGNS):
            raise EngineError(
                "another process of this run is lost or does not answer; continue from the last checkpoint with "
                "agilerl resume, or under the launcher with --resume auto"
            ) from error
        raise
