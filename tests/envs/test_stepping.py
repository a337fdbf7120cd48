"""Many calls at once: what each raised, and none that is waited for too long."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from agilerl.envs.episode_task import Stepping


def call_all(calls: Sequence[Callable[[], object]], timeout: float | None) -> list[Exception | None]:
    """Make all calls and return what each raised, or None."""
    with Stepping(timeout) as stepping:
        for call in calls:
            stepping.add(call)
        return stepping.results()


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


def test_calls_begin_when_they_are_added() -> None:
    begun = threading.Event()
    with Stepping(5.0) as stepping:
        stepping.add(begun.set)
        assert begun.wait(5.0)
        stepping.add(fail)
        found = stepping.results()
    assert found[0] is None
    assert isinstance(found[1], ValueError)
    assert len(stepping.seconds) == 2


def test_without_a_timeout_they_wait_for_whoever_asks() -> None:
    threads: list[threading.Thread] = []
    with Stepping(None) as stepping:
        stepping.add(lambda: threads.append(threading.current_thread()))
        assert threads == []
        assert stepping.results() == [None]
    assert threads == [threading.current_thread()]


def test_a_call_that_ended_too_late_before_anybody_looked_is_late() -> None:
    ended = threading.Event()

    def slow() -> None:
        time.sleep(0.2)
        ended.set()

    with Stepping(0.05) as stepping:
        stepping.add(slow)
        assert ended.wait(5.0)
        (found,) = stepping.results()
    assert isinstance(found, TimeoutError)


def test_after_an_error_nothing_begins_and_what_runs_is_waited_for() -> None:
    started, release, done = threading.Semaphore(0), threading.Event(), []

    def held() -> None:
        started.release()
        release.wait(5.0)
        done.append(0)

    before = set(threading.enumerate())

    def interrupted() -> None:
        with Stepping(5.0) as stepping:
            for call in (held, lambda: done.append(1)):
                for _ in range(8):
                    stepping.add(call)
            assert all(started.acquire(timeout=5.0) for _ in range(8))
            threading.Timer(0.05, release.set).start()
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        interrupted()
    assert done == [0] * 8
    assert not [thread for thread in set(threading.enumerate()) - before if not isinstance(thread, threading.Timer)]
