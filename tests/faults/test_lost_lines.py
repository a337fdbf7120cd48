"""Metrics, lineage or journal that lack lines: an older checkpoint that can do without them, or a way to go on."""

import json
import shutil
from pathlib import Path

import pytest

from agilerl.errors import CheckpointError
from agilerl.training.saved import open_run
from tests.cli.outcome import Agilerl
from tests.faults.evidence import differences, evidence
from tests.faults.unfinished import Unfinished, contents

pytestmark = pytest.mark.model

NAMES = ("metrics.jsonl", "lineage.jsonl", "journal.jsonl")


def lengths(root: Path, checkpoint: str, name: str) -> int:
    """Return how many bytes of a file a checkpoint needs."""
    folder = root / "checkpoints" / checkpoint
    clock = json.loads((folder / "clock.json").read_text())
    if name == "metrics.jsonl":
        return int(clock["metrics_bytes"])
    if name == "lineage.jsonl":
        return int(json.loads((folder / "state.json").read_text())["lineage_bytes"])
    return sum(map(len, (root / name).read_bytes().splitlines(keepends=True)[: clock["journal_records"]]))


@pytest.mark.parametrize("name", NAMES)
def test_an_older_checkpoint_that_can_do_without_them_is_used(
    name: str, unfinished: Unfinished, reference: Path, tmp_path: Path, agilerl: Agilerl
) -> None:
    root = unfinished.copy(tmp_path / "run")
    needs = {number: lengths(root, number, name) for number in ("000001", "000002")}
    assert needs["000001"] < needs["000002"]
    data = (root / name).read_bytes()
    (root / name).write_bytes(data[: needs["000002"] - 1])
    ended = agilerl("resume", "run")
    assert ended.code == 0, ended.errors
    lost, goes_on = ended.errors.splitlines()
    counted = "records" if name == "journal.jsonl" else f"{needs['000002']:,} bytes, found {needs['000002'] - 1:,}"
    assert f"{name} should have at least " in lost
    assert counted in lost
    assert "was set aside as run/checkpoints/000002.corrupt" in lost
    assert goes_on == "The run resumes after iteration 1; its later work is lost and is repeated."
    assert "Resuming run after iteration 1 " in ended.output
    shutil.rmtree(root / "checkpoints" / "000002.corrupt")
    # Done again is done the same; only the journal has noted when checkpoints were gone on from.
    assert differences(evidence(root), evidence(reference)) in ([], ["journal.jsonl"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["missing", "empty", "one line"])
def test_where_no_checkpoint_can_the_run_says_how_to_go_on_and_stays_as_it_is(
    name: str, what: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    data = (root / name).read_bytes()
    if what == "missing":
        (root / name).unlink()
    else:
        (root / name).write_bytes(data[: data.index(b"\n") + 1] if what == "one line" else b"")
    if name == "journal.jsonl":  # the first checkpoint of a run comes before the first record
        saved = open_run(root, report=lambda sentence: None)
        saved.run.close()
        assert saved.checkpoint == root / "checkpoints" / "000001"
        return
    before = contents(root)
    with pytest.raises(CheckpointError) as refusal:
        open_run(root, report=pytest.fail)
    needs = lengths(root, "000002", name)
    size = len(before.get(name, b""))
    found = "but it does not exist" if what == "missing" else f"found {size:,}; lines were lost"
    assert f"{root / name} should have " in str(refusal.value)
    assert f"{needs:,} bytes" in str(refusal.value)
    assert found in str(refusal.value)
    assert "restore the file from a copy, or start another run from an adapter" in str(refusal.value)
    assert list((root / "checkpoints" / "000002").glob("agent_*/actor"))
    assert "\n" not in str(refusal.value)
    before.pop(".lock", None)
    now = contents(root)
    now.pop(".lock", None)
    assert now == before
    (root / name).write_bytes(data)
    saved = open_run(root, report=pytest.fail)
    saved.run.close()
    assert saved.checkpoint == root / "checkpoints" / "000002"


def test_a_line_that_grew_is_no_place_to_cut(unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    place = lengths(root, "000001", "metrics.jsonl")
    data = (root / "metrics.jsonl").read_bytes()
    (root / "metrics.jsonl").write_bytes(data[:place] + b" " + data[place:])
    said: list[str] = []
    saved = open_run(root, report=said.append)
    saved.run.close()
    assert saved.checkpoint == root / "checkpoints" / "000001"
    assert "metrics.jsonl should have a line that ends at byte" in said[0]


def test_with_every_checkpoint_damaged_the_command_says_that_it_starts_again(
    unfinished: Unfinished, reference: Path, tmp_path: Path, agilerl: Agilerl
) -> None:
    root = unfinished.copy(tmp_path / "run")
    for folder in (root / "checkpoints").iterdir():
        (folder / "state.json").write_bytes(b"")
    ended = agilerl("resume", "run")
    assert ended.code == 0, ended.errors
    *_, told = ended.errors.splitlines()
    assert told == "No checkpoint of run is intact: the run restarts from its beginning, and its work is lost."
    assert "Resuming run: no intact checkpoint, so from the beginning." in ended.output
    for name in ("000001.corrupt", "000002.corrupt"):
        shutil.rmtree(root / "checkpoints" / name)
    assert differences(evidence(root), evidence(reference)) in ([], ["journal.jsonl"])


# -- what no checkpoint needs -----------------------------------------------------------------------------------------


def notes(root: Path) -> str:
    """Return what the report of a run says is missing."""
    from agilerl.report.load import load_run
    from agilerl.report.page import sample_groups

    run = load_run(root)
    sample_groups(run)
    return "\n".join(run.notes)


def test_deleted_completions_are_named_on_resuming_and_in_the_report(
    unfinished: Unfinished, reference: Path, tmp_path: Path
) -> None:
    assert "lacks" not in notes(unfinished.root) + notes(reference)
    root = unfinished.copy(tmp_path / "run")
    (root / "completions" / "step_000001.parquet").unlink()
    lacks = "lacks the completions of 1 of 2 steps, the first of them step_000001.parquet: they were deleted"
    assert lacks in notes(root)
    said: list[str] = []
    open_run(root, report=said.append).run.close()
    assert len(said) == 1
    assert lacks in said[0]
    shutil.rmtree(root / "completions")
    assert "lacks the completions of 2 of 2 steps" in notes(root)


def test_deleted_metrics_are_named_in_the_report(reference: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(reference, tmp_path / "run"))
    (root / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing or empty, although there were exams" in notes(root)
    assert "no metrics yet" not in notes(root)
