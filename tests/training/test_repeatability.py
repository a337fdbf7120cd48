"""The same seed gives the same run, another seed another one."""

import json
import shutil
from pathlib import Path

import pytest

from tests.training.small_runs import FinishedRun, less_times, lines, run_here

pytestmark = pytest.mark.model

ADAPTER = "elite/adapter_model.safetensors"


@pytest.fixture(scope="module")
def run_here_again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("again") / "run")


@pytest.mark.parametrize("file", ["metrics.jsonl", "lineage.jsonl"])
@pytest.mark.processes
def test_the_same_seed_gives_the_same_lines(file: str, finished_run: FinishedRun, run_here_again: Path) -> None:
    """In another process, and beside whatever else this one has done before."""
    assert less_times(lines(run_here_again / file)) == less_times(lines(finished_run.root / file))


def sums(root: Path) -> dict[str, str]:
    """Of the files of the last checkpoint; only its clock is not the same twice."""
    entries = json.loads((root / "checkpoints" / "000004" / "MANIFEST.json").read_text())
    return {name: entry["sha256"] for name, entry in entries.items() if name != "clock.json"}


@pytest.mark.processes
def test_the_same_seed_gives_the_same_files(finished_run: FinishedRun, run_here_again: Path) -> None:
    for name in (ADAPTER, "completions/step_000004.parquet"):
        assert (run_here_again / name).read_bytes() == (finished_run.root / name).read_bytes(), name
    assert sums(run_here_again) == sums(finished_run.root)
    summaries = [json.loads((root / "summary.json").read_text()) for root in (run_here_again, finished_run.root)]
    assert len({s.pop("seconds") for s in summaries}) == 2
    assert summaries[0] == summaries[1]


@pytest.mark.processes
def test_another_seed_gives_another_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    other = run_here(tmp_path / "run", "training.seed=43")
    first, second = (less_times(lines(root / "metrics.jsonl")) for root in (finished_run.root, other))
    of_step_1 = [[r for r in records if r.get("step") == 1] for records in (first, second)]
    assert of_step_1[0] != of_step_1[1]
    births = [
        [r["hyperparameters"] for r in lines(root / "lineage.jsonl") if r["event"] == "birth"]
        for root in (finished_run.root, other)
    ]
    assert births[0][0] == births[1][0] == {"lr": 1e-5}  # member 0 is the manifest's, whatever the seed
    assert births[0][1:3] != births[1][1:3]
    assert (other / ADAPTER).read_bytes() != (finished_run.root / ADAPTER).read_bytes()
    assert json.loads((other / "run.json").read_text())["seed"] == 43


@pytest.mark.processes
def test_what_is_only_written_down_does_not_change_the_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    """More exams and fewer logs leave the training as it was."""
    other = run_here(
        tmp_path / "run", "training.evaluation_interval=1", "training.log_completions=0", "training.keep_checkpoints=2"
    )
    kinds = ("train", "evolution", "test")
    first, second = (
        [r for r in less_times(lines(root / "metrics.jsonl")) if r["kind"] in kinds]
        for root in (finished_run.root, other)
    )
    # The elite may come from an exam that the first run did not hold.
    assert first[:-1] == second[:-1]
    assert not list((other / "completions").iterdir())
    exams = [(r["step"], r["agent"]) for r in lines(other / "metrics.jsonl") if r["kind"] == "eval"]
    assert len(exams) == len(set(exams)) == 4 * 3  # none is held twice on the same weights
    shutil.rmtree(other)
