"""A population of one: nothing to select among, and everything else of a run."""

import json
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.training.resolved import resolve
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.faults.pieces import go_on, leave_after
from tests.training.small_runs import SMALL, agilerl, less_times, lines

ALONE = [*SMALL, "training.pop_size=1", "training.max_steps=64"]


@pytest.mark.model
@pytest.mark.processes
def test_the_default_manifest_with_one_agent(tmp_path: Path) -> None:
    done = agilerl("train", *ALONE, "--out", "run", cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["agents"], summary["generations"], summary["iterations"]) == (1, 2, 4)
    assert set(summary["test"]) == {"base", "median_first_generation", "elite"}
    assert summary["elite"]["index"] == 0
    assert "<html" in (tmp_path / "run" / "report.html").read_text().lower()


@pytest.mark.model
@pytest.mark.parametrize("elitism", ["true", "false"])
def test_a_run_with_one_agent_goes_on_as_if_never_interrupted(elitism: str, tmp_path: Path) -> None:
    config = load_manifest(None, [*ALONE, f"selection_strategy.elitism={elitism}", "training.checkpoint_steps=1"])
    whole, root = tmp_path / "whole", tmp_path / "run"
    for _ in train(build(config), whole, command=["test"]):
        pass
    leave_after(train(build(config), root, command=["test"]), 4)
    for _ in go_on(root):
        pass
    for name in ("metrics.jsonl", "lineage.jsonl"):
        assert less_times(lines(root / name)) == less_times(lines(whole / name))


def test_a_tournament_that_was_asked_for_stays_as_large_or_is_refused() -> None:
    config = load_manifest(None, ["training.pop_size=1"])
    assert resolve(config).document()["selection_strategy"]["tournament_size"] == config.tournament_size == 1
    assert load_manifest(None).tournament_size == 2
    assert load_manifest(None, ["selection_strategy.tournament_size=3"]).tournament_size == 3
