"""What goes on with a run directory that means harm, and what must hold then."""

import time
from pathlib import Path

import pytest

from agilerl.algorithms import ALGORITHMS
from agilerl.errors import AgileRLError
from agilerl.training.checkpoint import read_checkpoint
from agilerl.training.records import RunWriter
from agilerl.training.saved import open_run
from tests.faults.unfinished import Unfinished


def go_on(root: Path, unfinished: Unfinished) -> None:
    """Do what ``agilerl resume`` does before it samples, with the base model that is loaded already."""
    runtime, made = unfinished.session.population.runtime, []
    saved = open_run(root, report=lambda sentence: None)
    with saved.run:
        assert saved.checkpoint is not None
        state = read_checkpoint(saved.checkpoint, runtime)
        try:
            for agent in [*state.states, *filter(None, [state.progress.elite])]:
                made.append(ALGORITHMS[agent.algorithm].from_state(agent, runtime))
            RunWriter(saved.run, state).close()
        finally:
            for one in made:
                one.clean_up()


def refused(root: Path, unfinished: Unfinished) -> str:
    """Return the sentence; nothing outside the run directory may change, and it may not take long."""
    outside = {p: p.stat().st_mtime_ns for p in root.parent.rglob("*") if root not in p.parents and p != root}
    start = time.thread_time()
    with pytest.raises(AgileRLError) as caught:
        go_on(root, unfinished)
    assert time.thread_time() - start < 3  # on a busy machine a CPU second does half of what it does on a quiet one
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert outside == {p: p.stat().st_mtime_ns for p in root.parent.rglob("*") if root not in p.parents and p != root}
    return str(caught.value)
