"""What becomes of a command whose output cannot be written, or not in these characters."""

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agilerl.cli.output import console
from agilerl.cli.progress import watch
from agilerl.cli.running import stoppable
from agilerl.config.manifest import load_manifest
from agilerl.errors import WriteError
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.training.small_runs import SMALL, environment, lines

FULL = Path("/dev/full")
C_LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def run(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agilerl", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), text=True, **{"stderr": -1, **options})


@needs_full
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"]])
@pytest.mark.processes
def test_a_full_disk_below_the_output(arguments: list[str], tmp_path: Path) -> None:
    with open(FULL, "w") as full:
        done = run(*arguments, cwd=tmp_path, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")
    assert os.strerror(28) in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"]])
@pytest.mark.processes
def test_a_reader_that_has_gone(arguments: list[str], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run(*arguments, cwd=tmp_path, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@needs_full
@pytest.mark.processes
def test_errors_that_cannot_be_said_keep_their_exit_code(tmp_path: Path) -> None:
    with open(FULL, "w") as full:
        assert run("frobnicate", cwd=tmp_path, stderr=full).returncode == 2


@pytest.mark.processes
def test_streams_that_are_closed_from_the_start(tmp_path: Path) -> None:
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        command = f"{sys.executable} -m agilerl --version {closed}"
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("given", [{"PYTHONIOENCODING": "ascii"}, C_LOCALE], ids=["ascii", "C locale"])
@pytest.mark.processes
def test_ascii_is_enough(given: dict[str, str], tmp_path: Path) -> None:
    text = ascii("0.5 ± 0.1 → café ☂")
    code = f"from agilerl.cli.output import prepare_streams; prepare_streams(); print({text})"
    command = [sys.executable, "-c", code]
    options: Any = {"cwd": tmp_path, "env": {**environment(), **given}, "capture_output": True, "check": True}
    assert subprocess.run(command, **options).stdout == b"0.5 +- 0.1 -> caf\\xe9 \\u2602\n"


@pytest.mark.processes
def test_a_name_that_is_no_text_passes(tmp_path: Path) -> None:
    code = "from agilerl.cli.output import prepare_streams; prepare_streams(); print('caf\\udce9')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True)
    assert done.stdout == b"caf\xe9\n"


@pytest.mark.model
@pytest.mark.processes
def test_a_run_in_ascii(tmp_path: Path) -> None:
    short = (*SMALL, "training.max_steps=48", "training.evo_steps=1", "--out", "run")
    command = [sys.executable, "-m", "agilerl", "train", *short]
    done = subprocess.run(command, cwd=tmp_path, env={**environment(), **C_LOCALE}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" +- 0." in done.stdout


# -- a run whose output goes away -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Does something at the first line about an iteration."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self.happens = happens

    def write(self, text: str) -> int:
        if text.startswith("iteration 1 "):
            self.happens()
        return super().write(text)


def fails(number: int) -> Callable[[], None]:
    def happens() -> None:
        raise OSError(number, os.strerror(number))

    return happens


def hangs_up() -> None:
    for _ in range(2):  # the kernel says so, and the shell
        signal.raise_signal(signal.SIGHUP)


ENDINGS = {
    "the reader goes away": (fails(errno.EPIPE), 141),
    "the disk is full": (fails(errno.ENOSPC), WriteError),
    "the terminal is gone": (fails(errno.EIO), WriteError),
    "the terminal hangs up": (hangs_up, 129),
}


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """What a terminal gives a program, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.model
@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_whose_output_goes_away_stops_at_a_checkpoint(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    happens, code = ENDINGS[ending]
    root, shown = tmp_path / "run", console(file=Terminal(happens))
    session = build(load_manifest(None, [*SMALL, "training.checkpoint_steps=null"]))
    ends = pytest.raises(SystemExit if isinstance(code, int) else code)
    with ends as ended, stoppable(root, shown) as stop:
        watch(train(session, root, stop=stop), session, shown, stop=stop)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == code
    told = str(ended.value) + capsys.readouterr().err
    assert f"agilerl resume {root}" in told
    done = [line["step"] for line in lines(root / "metrics.jsonl") if line["kind"] == "train"]
    assert set(done) == {1}
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["000001"]


def test_a_terminal_gets_whole_words_and_a_pipe_whole_lines() -> None:
    sentence = "Starting a run of 'my.yaml' in 'runs/my': loading the libraries and the model."
    for is_terminal in (True, False):
        file = io.StringIO()
        screen = console(file=file, width=40)
        screen._force_terminal = is_terminal
        screen.print(sentence)
        lines = file.getvalue().splitlines()
        assert len(lines) == (3 if is_terminal else 1)
        assert " ".join(map(str.strip, lines)) == sentence


@pytest.mark.model
def test_a_hangup_that_nohup_has_made_harmless(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        root, shown = tmp_path / "run", console(file=Terminal(hangs_up))
        session = build(load_manifest(None, [*SMALL, "training.max_steps=48"]))
        with stoppable(root, shown) as stop:
            watch(train(session, root, stop=stop), session, shown, stop=stop)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (root / "summary.json").exists()
