"""Call many environments at once, with a timeout."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic

from agilerl.custom_code import left, torch_restored

_WORKERS = 8
_POLL = 0.05
"""Polling interval in seconds while calls are running."""


def call_all(calls: Sequence[Callable[[], object]], timeout: float | None) -> list[Exception | None]:
    """Make all calls and return what each raised, or None.

    Args:
        calls: functions without arguments that do not share state.
        timeout: seconds for each call, from its own start; None calls them in sequence in this thread. A call that
            takes longer counts as a TimeoutError: its thread is abandoned and its later results are lost.
    """
    with torch_restored():
        if timeout is None:
            return [_caught(call) for call in calls]
        batch = _Batch(calls)
        for _ in range(min(_WORKERS, len(calls))):
            batch.start_worker()
        return batch.results(timeout)


def _caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    except SystemExit as error:  # an environment must not end the process
        return left(error)
    return None


class _Batch:
    """Calls, the threads that run them, and their results."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = calls
        self.waiting: SimpleQueue[int] = SimpleQueue()
        for number in range(len(calls)):
            self.waiting.put(number)
        self.started: dict[int, float] = {}
        self.done: SimpleQueue[tuple[int, Exception | None]] = SimpleQueue()

    def start_worker(self) -> None:
        # A daemon, because a call that never returns must not keep the process from ending.
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                number = self.waiting.get_nowait()
            except Empty:
                return
            self.started[number] = monotonic()
            self.done.put((number, _caught(self.calls[number])))

    def results(self, timeout: float) -> list[Exception | None]:
        found: dict[int, Exception | None] = {}
        while len(found) < len(self.calls):
            try:
                number, error = self.done.get(timeout=min(_POLL, timeout))
                found.setdefault(number, error)
            except Empty:
                now = monotonic()
                for number, start in list(self.started.items()):
                    if number not in found and now - start > timeout:
                        found[number] = TimeoutError(f"no answer within {timeout:g} seconds")
                        self.start_worker()  # replaces the one that hangs
        return [found[number] for number in range(len(self.calls))]
