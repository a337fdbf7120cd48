"""Forward passes of several processes in step: each of them needs the others' part of the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agilerl.errors import EngineError
from agilerl.processes import Processes

__all__ = ["Lockstep"]

_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "peer")
"""What torch says, in errors without a type of their own, when another process does not take part."""


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
