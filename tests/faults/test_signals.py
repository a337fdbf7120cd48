"""SIGKILL, SIGTERM and Ctrl-C sent to `agilerl train` as a process of its own, and the run that comes of it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.runs.stopping import Interrupted, StopRequest, stop_on_signals
from agilerl.training.events import IterationDone, PhaseStarted
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import begin, go_on
from tests.programs import Program
from tests.training.small_runs import agilerl, environment

pytestmark = pytest.mark.model

LONGER = (*SHORT, "training.max_steps=576", "training.evo_steps=4", "training.checkpoint_steps=null")
"""12 iterations in 3 generations, saved after each generation only."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("whole") / "run"
    for _ in begin(root, *LONGER):
        pass
    return evidence(root, extra_checkpoints=True)


def send(signals: list[int], line: str, *arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Send signals to ``agilerl`` when it prints a line that begins so; returns exit code and what else it prints."""
    with Program("-m", "agilerl", *arguments, cwd=cwd, env=environment()) as process:
        assert any(found.startswith(line) for found in iter(process.stdout.readline, ""))
        for number in signals:
            process.send_signal(number)
        output, errors = process.communicate(timeout=120)
        return process.returncode, output, errors


def checkpoints(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "checkpoints").iterdir() if p.name.isdigit())


@pytest.mark.processes
def test_a_process_is_killed_and_stopped_and_the_run_is_what_it_would_have_been(
    expected: dict[str, str], tmp_path: Path
) -> None:
    """The next process goes on each time; the last one is told to do what the first was."""
    train_it = ("train", *LONGER, "--out", "run", "--resume", "auto")
    code, _, errors = send([signal.SIGTERM], "iteration 1 ", *train_it, cwd=tmp_path)
    assert code == 143
    assert errors.splitlines() == [
        "SIGTERM: will save a checkpoint and stop after this iteration; a second signal stops it at once",
        "stopped; resume with: agilerl resume run",
    ]
    assert checkpoints(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()

    code, _, errors = send([signal.SIGKILL], "iteration 5 ", "resume", "run", cwd=tmp_path)
    assert (code, errors) == (-signal.SIGKILL, "")
    assert "000004" in checkpoints(tmp_path / "run")

    # The second leaves at once, without a checkpoint, unless the first has been dealt with before it comes.
    code, _, _ = send([signal.SIGINT, signal.SIGTERM], "iteration 7 ", *train_it, cwd=tmp_path)
    assert code in (-signal.SIGTERM, 130)

    done = agilerl(*train_it, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Resuming run after iteration " in done.stdout
    found = evidence(tmp_path / "run", extra_checkpoints=True)
    assert differences(found, expected) == []


def test_the_second_signal_does_what_the_first_would_have_done() -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    # A shell starts what it runs in the background with SIGINT ignored, and these tests may be.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_on_signals(told.append) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.signal, stop.code, len(told)) == (signal.SIGTERM, 143, 1)
            assert ended == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended == [signal.SIGTERM]
        with stop_on_signals(told.append):
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    assert len(told) == 2


def test_an_ignored_interrupt_stays_ignored_and_threads_catch_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals(print) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGINT, before)
    handlers = []

    def elsewhere() -> None:
        with stop_on_signals(print):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


TINY = ("training.pop_size=2", "training.max_steps=64", "environment.data_batch_size_per_gpu=2")
TINY += ("environment.eval_prompts=4", "environment.test_prompts=4", "training.checkpoint_steps=null")


@pytest.mark.parametrize("when", [1, 4, 5, 8, 11, 13])
def test_a_request_at_any_moment_is_heeded_after_the_iteration(when: int, tmp_path: Path) -> None:
    """At its start, within a generation, at its end, in the exam, after the selection, and when all that is left is the
    test.
    """
    stop, seen, told = StopRequest(), 0, 0
    events = train(build(load_manifest(None, [*SHORT, *TINY])), tmp_path / "run", command=["test"], stop=stop)
    with pytest.raises(Interrupted, match="agilerl resume") as raised:  # noqa: PT012
        for number, event in enumerate(events, start=1):
            seen += isinstance(event, IterationDone)
            if number == when:
                stop.signal, told = signal.SIGTERM, seen
    assert raised.value.code == 143
    assert told <= seen <= told + 1
    assert checkpoints(tmp_path / "run")[-1] == f"{seen:06d}"
    rest = list(go_on(tmp_path / "run"))
    assert seen + sum(isinstance(event, IterationDone) for event in rest) == 4
    assert PhaseStarted("test") in rest


def test_an_interrupt_while_modules_are_imported_shows_nothing() -> None:
    program = """
import os, signal, sys
from agilerl.cli import main

class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
