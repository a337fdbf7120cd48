"""Lines of a run that somebody has changed, and checkpoints that somebody has renamed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agilerl.errors import CheckpointError
from agilerl.training.run import resume
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests.faults.evidence import differences, evidence
from tests.faults.pieces import finish
from tests.faults.test_lost_lines import lengths
from tests.faults.unfinished import Unfinished, change_json, sealed

pytestmark = pytest.mark.model

NAMES = ("metrics.jsonl", "lineage.jsonl")


def change_digit(path: Path, start: int, end: int) -> None:
    """Replace the last digit of a number between two places of a file by another one."""
    data = bytearray(path.read_bytes())
    place = max(i for i in range(start, end) if 48 <= data[i] <= 57)
    data[place] = 48 + (data[place] - 47) % 10
    path.write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_one_digit_is_found_and_an_older_checkpoint_used(
    name: str, unfinished: Unfinished, reference: Path, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    change_digit(root / name, lengths(root, "000001", name), lengths(root, "000002", name))
    said: list[str] = []
    finish(root, said.append)
    assert name in said[0]
    assert "000002.corrupt" in said[0]
    shutil.rmtree(root / "checkpoints" / "000002.corrupt")
    assert differences(evidence(root), evidence(reference)) in ([], ["journal.jsonl"])


@pytest.mark.parametrize("name", NAMES)
def test_one_digit_before_every_checkpoint_stops_the_run_unless_it_is_allowed(
    name: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    change_digit(root / name, 0, lengths(root, "000001", name))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="--allow-changes") as refusal:
            open_run(root, report=pytest.fail)
        assert str(root / name) in str(refusal.value)
    saved = open_run(root, report=pytest.fail, allow_changes=True)
    assert saved.checkpoint == root / "checkpoints" / "000002"
    for _ in resume(build(saved.config, saved.checkpoint), saved.run):
        pass
    assert (root / "report.html").exists()


@pytest.mark.parametrize("noted", [True, False], ids=["with sha256", "of an older version"])
@pytest.mark.parametrize("name", NAMES)
def test_a_line_that_is_not_json_is_found_at_the_start(
    name: str, noted: bool, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    if not noted:
        forget(root)
    data = bytearray((root / name).read_bytes())
    data[0:1] = b"?"
    (root / name).write_bytes(data)
    for allow_changes in (False, True):
        with pytest.raises(CheckpointError, match=r"line 1 .*JSON") as refusal:
            open_run(root, report=pytest.fail, allow_changes=allow_changes)
        assert "--allow-changes" not in str(refusal.value)


def forget(root: Path) -> None:
    """Make the checkpoints those of a version that did not note the sha256 of lines."""
    for folder in (root / "checkpoints").iterdir():
        change_json(folder / "state.json", lambda state: state.pop("lineage_sha256") and None)
        change_json(folder / "clock.json", lambda clock: clock.pop("metrics_sha256") and None)
        sealed(folder)


def test_a_run_of_an_older_version_goes_on(unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    forget(root)
    assert "sha256" not in (root / "checkpoints" / "000002" / "clock.json").read_text()
    finish(root)
    newest = json.loads((root / "checkpoints" / "000004" / "clock.json").read_text())
    assert len(newest["metrics_sha256"]) == 64


# -- names ------------------------------------------------------------------------------------------------------------


def swap(checkpoints: Path) -> None:
    (checkpoints / "000001").rename(checkpoints / "x")
    (checkpoints / "000002").rename(checkpoints / "000001")
    (checkpoints / "x").rename(checkpoints / "000002")


def move_up(checkpoints: Path) -> None:
    (checkpoints / "000002").rename(checkpoints / "000004")


def shift(checkpoints: Path) -> None:
    (checkpoints / "000002").rename(checkpoints / "000003")
    (checkpoints / "000001").rename(checkpoints / "000002")


def longer(checkpoints: Path) -> None:
    (checkpoints / "000002").rename(checkpoints / "0000002")


def double(checkpoints: Path) -> None:
    shutil.copytree(checkpoints / "000001", checkpoints / "000004")


@pytest.mark.parametrize("rename", [swap, move_up, shift, longer, double])
def test_checkpoints_that_were_renamed_are_found(
    rename: Callable[[Path], None], unfinished: Unfinished, reference: Path, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    rename(root / "checkpoints")
    said: list[str] = []
    saved = open_run(root, report=said.append)
    saved.run.close()
    assert saved.checkpoint == root / "checkpoints" / "000002"
    assert said
    assert all("holds iteration" in sentence for sentence in said)
    finish(root)
    for aside in (root / "checkpoints").glob("*.corrupt"):
        shutil.rmtree(aside)
    assert differences(evidence(root), evidence(reference)) in ([], ["journal.jsonl"])
