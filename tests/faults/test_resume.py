"""A run that goes on is the run that was never interrupted: at every boundary, with every kind of agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agilerl.training.events import Event, Evolved, IterationDone
from tests.faults.evidence import differences, evidence
from tests.faults.pieces import an_iteration_each, begin, finish, go_on, stop_after
from tests.training.small_runs import lines

pytestmark = pytest.mark.model

TINY = ("training.pop_size=2", "training.max_steps=64", "environment.data_batch_size_per_gpu=2")
TINY += ("environment.eval_prompts=4", "environment.test_prompts=4", "training.evaluation_interval=1")
"""4 iterations of 2 agents, with an exam after each."""
EVENTS = 22


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("whole") / "run"
    events = list(begin(root, *TINY))
    assert len(events) == EVENTS
    return evidence(root)


ALIKE = {2, 4, 8, 9, 10, 14, 15, 16, 18}
"""Events that follow, and are followed by, the same as others do: of the second iteration of a generation, say."""


@pytest.mark.parametrize(
    "count", [pytest.param(n, marks=pytest.mark.nightly if n in ALIKE else ()) for n in range(1, EVENTS)]
)
def test_stopped_after_any_event(count: int, tiny: dict[str, str], tmp_path: Path) -> None:
    """Before, at and after every boundary of an iteration, an exam, a selection and the test."""
    assert stop_after(begin(tmp_path / "run", *TINY), count)
    finish(tmp_path / "run")
    assert differences(evidence(tmp_path / "run"), tiny) == []


def test_stopped_again_and_again(tiny: dict[str, str], tmp_path: Path) -> None:
    assert an_iteration_each(tmp_path / "run", *TINY) == 5  # the last one only tests
    assert differences(evidence(tmp_path / "run"), tiny) == []


def until(events: Iterator[Event], iteration: int) -> list[Event]:
    """Leave a run right after an iteration, before anything is saved; returns what happened."""
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        if isinstance(event, IterationDone) and event.iteration == iteration:
            events.close()  # type: ignore[attr-defined]
    return seen


def test_steps_are_counted_exactly(tmp_path: Path) -> None:
    """Also where the last checkpoint is that of the last selection, so that iterations are repeated."""
    out, sparse = tmp_path / "run", (*TINY, "training.checkpoint_steps=null", "training.evo_steps=3")
    events = begin(out, *sparse)
    assert [e.iteration for e in events if isinstance(e, IterationDone)] == [1, 2, 3, 4]
    expected = evidence(out)
    out = tmp_path / "again"
    until(begin(out, *sparse), 2)
    again = until(go_on(out), 4)
    assert [e.iteration for e in again if isinstance(e, IterationDone)] == [1, 2, 3, 4]  # nothing was saved yet
    assert [e.generation for e in again if isinstance(e, Evolved)] == [0]
    last = list(go_on(out))
    assert [e.iteration for e in last if isinstance(e, IterationDone)] == [4]
    steps = [(line["step"], line["agent"]) for line in lines(out / "metrics.jsonl") if line["kind"] == "train"]
    assert len(steps) == len(set(steps)) == 8
    assert differences(evidence(out), expected) == []
