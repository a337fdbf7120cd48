"""Many calls at once: what each raised, and none that is waited for too long."""

import threading
import time

import pytest

from agilerl.envs.episode_task import call_all


def fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_each_call_has_its_own_outcome(timeout: float | None) -> None:
    done = []
    calls = [lambda: done.append(0), fail, lambda: done.append(2)] + [lambda: None] * 30
    found = call_all(calls, timeout)
    assert isinstance(found[1], ValueError)
    assert [error for place, error in enumerate(found) if place != 1] == [None] * 32
    assert sorted(done) == [0, 2]
    assert call_all([], timeout) == []


def test_calls_that_hang_are_left_behind() -> None:
    release = threading.Event()
    calls = [release.wait] * 12 + [lambda: None] * 20  # more than there are workers
    start = time.monotonic()
    found = call_all(calls, 0.2)
    assert time.monotonic() - start < 5
    assert all(isinstance(error, TimeoutError) for error in found[:12])
    assert found[12:] == [None] * 20
    assert "no answer within 0.2 seconds" in str(found[0])
    release.set()


def test_the_clock_starts_with_the_call_and_not_with_the_queue() -> None:
    found = call_all([lambda: time.sleep(0.15)] * 24, 0.4)  # three rounds of eight
    assert found == [None] * 24
