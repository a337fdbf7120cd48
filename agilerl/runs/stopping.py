"""SIGTERM, SIGHUP and Ctrl-C: the first asks a run to stop where it can be resumed, the second exits at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none
_SIGNALS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP) if number is not None)
AFTER_ITERATION = "will save a checkpoint and stop after this iteration"


class Interrupted(Exception):  # noqa: N818  (not an error: the run can be resumed)
    """A run has stopped on request; it can be resumed from its last checkpoint."""

    def __init__(self, code: int, root: Path) -> None:
        super().__init__(f"stopped; resume with: agilerl resume {root}")
        self.code, self.root = code, root


class StopRequest:
    """Whether the run has been asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that requested it."""
        self.lost: OSError | None = None
        """Why nothing can be printed any more."""
        self.what = AFTER_ITERATION
        """What a signal does at this point of the run; whoever follows the run keeps it up to date."""

    def lose_output(self, error: OSError) -> None:
        """Ask the run to stop because nothing can be printed any more, as SIGPIPE does with other programs."""
        self.lost = error
        self.signal = self.signal or 13  # SIGPIPE, which Windows has no name for

    @property
    def sentence(self) -> str:
        """What happens now that a signal has come; "" as long as none has."""
        if self.signal is None or self.lost is not None:
            return ""
        again = "press Ctrl-C again to stop" if self.signal == signal.SIGINT else "a second signal stops it"
        return f"{signal.Signals(self.signal).name}: {self.what}; {again} at once"

    @property
    def code(self) -> int:
        """Exit code of a process that stopped because of the signal: 129, 130, 141 or 143."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def stop_on_signals(report: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside, the first signal sets the request and is passed to ``report``; the next has its usual effect.

    A signal that the process ignores stays ignored: e.g. SIGINT if a shell started it in the background, SIGHUP under
    nohup. Outside the main thread nothing is caught, because signals do not arrive there.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}

    def stop(number: int, _: FrameType | None) -> None:
        if request.signal is not None:
            if number == _HANGUP:
                return  # a closing terminal sends it more than once: from the kernel and from the shell
            # The handler from before decides what leaving is: Ctrl-C raises KeyboardInterrupt.
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        request.signal = number
        report(request.sentence)

    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield request
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
