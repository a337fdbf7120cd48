"""Many processes and one run directory: one proceeds, the others stop at once and name it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agilerl.runs import RunDirectory
from tests.cli.outcome import Agilerl
from tests.faults.unfinished import Unfinished, contents
from tests.training.small_runs import ROOT, SMALL, environment

START = """
import sys
from agilerl.errors import CheckpointError
from agilerl.runs import RunDirectory
sys.stdin.readline()
try:
    run = RunDirectory.{how}
except CheckpointError as error:
    print(error, flush=True)
else:
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are ended afterwards."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list["subprocess.Popen[str]"], how: str, root: Path) -> None:
    """Add a process that takes a run as soon as it is told to."""
    command = [sys.executable, "-c", START.format(how=how), str(root)]
    started.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=-1, stdout=-1, stderr=-1, text=True))


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("how", ["create(sys.argv[1], {}, 0)", "open(sys.argv[1])"])
@pytest.mark.processes
def test_exactly_one_of_many_that_start_at_once_proceeds(
    count: int, how: str, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    if how.startswith("open"):
        RunDirectory.create(tmp_path / "run", {}, 0).close()
    for _ in range(count):
        start(started, how, tmp_path / "run")
    for process in started:
        tell(process)
    answers = list(map(answer, started))
    assert answers.count("mine") == 1, answers
    owner = started[answers.index("mine")].pid
    assert all(f"is in use by process {owner} " in answer for answer in answers if answer != "mine"), answers


COMMANDS = {
    "resume": ["resume", "run"],
    "train": ["train", *SMALL, "--out", "run"],
    "train --resume auto": ["train", *SMALL, "--out", "run", "--resume", "auto"],
}


@pytest.mark.model
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.processes
def test_a_second_command_stops_before_its_imports_and_changes_nothing(
    name: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    """In less than a second of work, however busy the machine is: seconds of imports would come later."""
    root = unfinished.copy(tmp_path / "run")
    with RunDirectory.open(root):
        before = contents(root)
        start = os.times()
        done = subprocess.run(
            [sys.executable, "-m", "agilerl", *COMMANDS[name]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        end = os.times()
        assert contents(root) == before
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"is in use by process {os.getpid()} " in done.stderr
    assert end.children_user - start.children_user + end.children_system - start.children_system < 1.5


@pytest.mark.model
@pytest.mark.processes
def test_an_owner_that_was_killed_is_no_owner(
    unfinished: Unfinished, tmp_path: Path, started: list["subprocess.Popen[str]"], agilerl: Agilerl
) -> None:
    root = unfinished.copy(tmp_path / "run")
    start(started, "open(sys.argv[1])", root)
    (owner,) = started
    tell(owner)
    assert answer(owner) == "mine"
    assert f"is in use by process {owner.pid} " in agilerl("resume", "run").errors
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    ended = agilerl("resume", "run")
    assert ended.code == 0, ended.errors


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("command", ["train", "resume"])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.processes
def test_of_many_real_commands_one_gets_to_the_end(
    command: str, count: int, unfinished: Unfinished, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    if command == "resume":
        unfinished.copy(tmp_path / "run")
    arguments = ["resume", "run"] if command == "resume" else ["train", *SMALL, "--out", "run"]
    for _ in range(count):
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "agilerl", *arguments],
                cwd=tmp_path,
                env=environment(),
                stdout=-1,
                stderr=-1,
                text=True,
            )
        )
    waited = time.monotonic() + 240
    while any(process.poll() is None for process in started) and time.monotonic() < waited:
        time.sleep(0.05)
    codes = [process.returncode for process in started]
    assert sorted(codes) == [0] + [2] * (count - 1)
    for process in started:
        errors = process.communicate()[1]
        if process.returncode:
            # The one that is named was at work then; with resume it may have been one that only looked.
            assert re.search(r"is in use by process \d+ |holds a finished run", errors), errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
