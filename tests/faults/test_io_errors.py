"""A disk that is full, breaks, or may not be written to: the old stays intact, and one sentence says what happened."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agilerl.errors import CheckpointError
from agilerl.runs import Journal
from agilerl.runs.checkpoints import CheckpointStore
from tests import programs
from tests.cli.outcome import Agilerl
from tests.faults.evidence import SHORT
from tests.faults.unfinished import Unfinished, contents
from tests.training.small_runs import ROOT, environment

pytestmark = pytest.mark.model

ACTIONS = ("commit", "journal", "metrics", "completions", "elite", "summary", "start")
HARMLESS = ("mkdir ", "ftruncate ")
"""Operations that may fail and nothing is lost: making a folder that is there, emptying a lock that is given back."""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.processes
def test_an_error_at_any_operation_leaves_the_old_intact_and_is_told(
    every: int, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    command = ("-m", "tests.faults.refusing_disk", root, every, *ACTIONS)
    done = programs.run(*command, cwd=ROOT, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    for name in ACTIONS:
        assert sum(attempt["action"] == name for attempt in attempts) >= 3, name
    kinds = {attempt["call"].partition(" ")[0] for attempt in attempts}
    assert kinds >= {"write", "half", "fsync", "rename", "replace", "open", "mkdir"}
    assert sum(attempt["action"].endswith("on a full disk") for attempt in attempts) == 12
    for attempt in attempts:
        assert attempt["wrong"] == "", attempt
        if attempt["call"].startswith(HARMLESS) and not attempt["kind"]:
            continue
        expected = ("WriteError", "CheckpointError") if attempt["action"] == "start" else ("WriteError",)
        assert attempt["kind"] in expected, attempt
        assert attempt["reason"] in attempt["message"], attempt
        assert "\n" not in attempt["message"]


def test_a_line_that_cannot_be_taken_back_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses the rest of a line, and then to cut what it took: nothing may be written after that."""
    from agilerl.runs import journal

    path = tmp_path / "journal.jsonl"
    broken = Journal(path)
    broken.append({"number": 1})
    write = journal.os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "write", half)
        patched.setattr(journal.os, "ftruncate", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            broken.append({"text": "x" * 200})
    with pytest.raises(CheckpointError, match="has been closed"):
        broken.append({"number": 2})
    with Journal(path) as again:
        assert again.records == [{"number": 1}]
        assert again.append({"number": 2}) == 1


@pytest.mark.processes
def test_a_run_on_a_disk_without_room_ends_in_one_sentence_and_can_go_on(
    unfinished: Unfinished, tmp_path: Path, agilerl: Agilerl
) -> None:
    """A limit on the size of files, as ``ulimit -f`` sets it, stands for the disk."""
    root = unfinished.copy(tmp_path / "run")
    before = contents(root)
    command = f"ulimit -f 8; exec {sys.executable} -m agilerl resume run"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert done.stderr.endswith(": agilerl resume run\n")
    now = contents(root)
    assert {k: v for k, v in now.items() if k.startswith("checkpoints/")} == {
        k: v for k, v in before.items() if k.startswith("checkpoints/")
    }
    again = agilerl("resume", "run")
    assert again.code == 0, again.errors
    assert json.loads((root / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("command", ["report", "lineage", "resume", "chat", "schedule"])
@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_cannot_be_listed_is_told(
    command: str, named: bool, unfinished: Unfinished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agilerl: Agilerl
) -> None:
    """``readdir`` fails with the name of the folder, or after the first entries without it."""
    root = unfinished.copy(tmp_path / "run")

    def broken(path: object = ".") -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), *([str(path)] if named else []))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", broken)
        patch.setattr(os, "scandir", broken)
        done = agilerl(command, "run")
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
            CheckpointStore(root / "checkpoints").numbers()
    assert done.code == 2
    assert done.errors.startswith("error: ")
    assert done.errors.count("\n") == 1
    assert "Input/output error" in done.errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("PYTHONOPTIMIZE=2 exec {python} -m agilerl train --dry-run", "unset PYTHONOPTIMIZE"),
        ("ulimit -v 300000; exec {python} -m agilerl train --dry-run", "ulimit -a"),
    ],
)
@pytest.mark.processes
def test_a_python_that_lacks_something_is_told(command: str, words: str, tmp_path: Path) -> None:
    command = command.format(python=sys.executable)
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch, agilerl: Agilerl) -> None:
    def refused(*given: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done = agilerl("train", *SHORT, "--out", "run")
    assert done.code == 2
    assert "ulimit -a" in done.errors, done.errors
