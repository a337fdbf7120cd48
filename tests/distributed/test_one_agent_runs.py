"""Whole runs on a base that two processes divide: the same table as alone, one end for both, one sentence."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_group_faults import QUICK
from tests.distributed.together import Job, check_a_loss_is_noticed, ends, run_jobs, started, wait_for
from tests.training.small_runs import run_here

DIVIDED = ("distributed.sharding=fsdp2",)
pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def table(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {name: summary[name] for name in ("fitness", "test", "tokens", "elite", "iterations")}


@pytest.mark.parametrize("agents", [3, 1])
@pytest.mark.processes
def test_two_processes_come_to_the_same_table_as_one(agents: int, tmp_path: Path) -> None:
    """Of three agents one process trains two, in step with the other; of one agent both train some rows."""
    settings = (*QUICK, "algorithm.lr=1e-3")
    settings = (*settings, f"training.pop_size={agents}", "algorithm.beta=0.01", "training.max_steps=96")
    run_jobs(2, Job(tmp_path / "divided", (*settings, *DIVIDED)))
    assert table(tmp_path / "divided") == table(run_here(tmp_path / "alone", *settings))


@pytest.mark.processes
def test_what_both_meet_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion):\n    raise ValueError('cannot grade this')\n")
    own = ("environment.graders=[{name: 'mine.py:reward'}]", "--allow-code", "--quiet", "--out", "run")
    with started(2, "-m", "agilerl", "train", *QUICK, *own, cwd=tmp_path) as children:
        writer, other = ends(children)
    assert (writer.code, other.code) == (2, 2), (writer, other)
    assert writer.errors.count("\n") == 1
    assert "cannot grade this" in writer.errors
    assert other.errors == ""


@pytest.mark.processes
def test_a_divided_base_stops_for_all_and_is_missed_by_all(tmp_path: Path) -> None:
    command = ("-m", "agilerl.cli", "train", *QUICK, *DIVIDED, "--out", "run", "--resume", "auto")
    with started(2, *command, cwd=tmp_path) as children:
        wait_for("iteration 1 ", children[0])
        children[1].send_signal(signal.SIGTERM)
        writer, other = ends(children)
    assert (writer.code, other.code) == (143, 143), (writer, other)
    assert writer.errors.splitlines()[-1] == "stopped; resume with: agilerl resume run"
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    with started(2, *command, cwd=tmp_path) as children:
        check_a_loss_is_noticed(children)
