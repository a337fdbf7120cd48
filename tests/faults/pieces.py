"""Runs of this process that end before they are done, and go on in the same directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.training.events import Event, IterationDone, PhaseStarted
from agilerl.training.run import resume, train
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests.faults.evidence import SHORT


def begin(out: Path, *overrides: str, allow_code: bool = False) -> Iterator[Event]:
    """Start a run."""
    return train(build(load_manifest(None, [*SHORT, *overrides]), allow_code=allow_code), out, command=["test"])


def go_on(out: Path, report: Callable[[str], None] = pytest.fail) -> Iterator[Event]:
    """Resume a run as a process that knows nothing but its directory."""
    saved = open_run(out, report=report)
    return resume(build(saved.config, saved.checkpoint), saved.run)


def finish(out: Path, report: Callable[[str], None] = pytest.fail) -> Path:
    """Resume a run and go to its end."""
    for _ in go_on(out, report):
        pass
    return out


def until(events: Iterator[Event], iteration: int) -> IterationDone:
    """Go through the events of a run up to an iteration, and return that."""
    for event in events:
        if isinstance(event, IterationDone) and event.iteration == iteration:
            return event
    pytest.fail("it ended before that")


def whole(out: Path, *overrides: str) -> Path:
    """Run to the end in one go."""
    for _ in begin(out, *overrides):
        pass
    return out


def stop_after(events: Iterator[Event], count: int) -> bool:
    """Leave a run after this many events; returns whether there are more."""
    for _ in range(count):
        if next(events, None) is None:
            return False
    events.close()  # type: ignore[attr-defined]
    return True


def leave_after(events: Iterator[Event], iteration: int) -> None:
    """Leave a run as a crash would, when an iteration is in its files but in no checkpoint yet."""
    for event in events:
        if isinstance(event, IterationDone) and event.iteration == iteration:
            events.close()  # type: ignore[attr-defined]


def an_iteration_each(out: Path, *overrides: str) -> int:
    """Run to the end, each iteration by another process; returns how many there were."""
    events, count = begin(out, *overrides), 1
    while _one_iteration(events):
        events, count = go_on(out), count + 1
    return count


def _one_iteration(events: Iterator[Event]) -> bool:
    """Leave a run when the checkpoint after its first iteration has been committed; returns whether it goes on."""
    done = 0
    for event in events:
        done += isinstance(event, IterationDone)
        if done > 1 or (done and isinstance(event, PhaseStarted) and event.name in ("train", "test")):
            events.close()  # type: ignore[attr-defined]
            return True
    return False
