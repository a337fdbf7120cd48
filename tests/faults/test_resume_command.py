"""`agilerl resume` and `agilerl train --resume auto`: what they say, and what they refuse."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from agilerl.runs.directory import RunDirectory
from agilerl.training.events import IterationDone, PhaseStarted
from agilerl.training.run import resume
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests import programs
from tests.cli.outcome import Agilerl, Outcome
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import begin
from tests.training.small_runs import environment

pytestmark = pytest.mark.model

TINY = (*SHORT, "training.pop_size=2", "training.max_steps=64", "environment.data_batch_size_per_gpu=2")
TINY += ("environment.eval_prompts=4", "environment.test_prompts=4")


@pytest.fixture
def agilerl(agilerl: Agilerl) -> Agilerl:
    """The command line, with all that it prints in one line."""

    def call(*arguments: str) -> Outcome:
        done = agilerl(*arguments)
        return Outcome(done.code, " ".join(done.output.split()), " ".join(done.errors.split()))

    return call


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run when it is ``done``, ``early``, before a checkpoint, ``half`` done, and ``late``, before its test."""
    place = tmp_path_factory.mktemp("runs")
    for event in begin(place / "done", *TINY):
        if isinstance(event, PhaseStarted) and event.name in ("base test", "test"):
            shutil.copytree(place / "done", place / {"base test": "early", "test": "late"}[event.name])
        if isinstance(event, IterationDone) and event.iteration == 3:
            shutil.copytree(place / "done", place / "half")
    return place


def copy(kept: Path, name: str, place: Path) -> Path:
    return Path(shutil.copytree(kept / name, place / "run"))


@pytest.mark.parametrize("command", [("resume", "run"), ("train", *TINY, "--out", "run", "--resume", "auto")])
def test_a_finished_run_says_so_and_stays_as_it_is(
    command: tuple[str, ...], kept: Path, agilerl: Agilerl, tmp_path: Path
) -> None:
    root = copy(kept, "done", tmp_path)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.name != ".lock"}
    outcome = agilerl(*command)
    assert (outcome.code, outcome.errors) == (0, "")
    assert outcome.output == "The run in run is finished; there is nothing left to do. Results: run/summary.json"
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.name != ".lock"} == before
    as_json = agilerl(*command, "--json")
    assert json.loads(as_json.output) == json.loads((root / "summary.json").read_text())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("early", "Resuming run: no checkpoint yet, so from the beginning."),
        ("half", "Resuming run after iteration 2 (checkpoint 000002): generation 1, 2 agents, 32 of 64 samples."),
        ("late", "Resuming run after iteration 4 (checkpoint 000004): generation 2, 2 agents, 64 of 64 samples."),
    ],
)
def test_it_says_where_it_goes_on_and_gets_to_the_same_end(
    name: str, words: str, kept: Path, agilerl: Agilerl, tmp_path: Path
) -> None:
    copy(kept, name, tmp_path)
    outcome = agilerl("resume", "run")
    assert (outcome.code, outcome.errors) == (0, "")
    assert outcome.output.startswith(f"Resuming run: loading the libraries and the model. {words}")
    assert "Held-out test" in outcome.output
    assert differences(evidence(tmp_path / "run"), evidence(kept / "done")) == []


def test_a_death_while_it_was_being_finished(kept: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    """The elite folder is there, or half of it; then the summary, but no report."""
    root = copy(kept, "late", tmp_path)
    shutil.copytree(kept / "done" / "elite", root / "elite")
    shutil.copytree(kept / "done" / "elite", root / ".elite.4711.tmp")
    (root / "elite" / "adapter_model.safetensors").write_bytes(b"of another time")
    for name in (".summary.json.4711.tmp", "completions/.step_000004.parquet.4711.tmp", ".report.html.4711.tmp"):
        (root / name).write_bytes(b"half")
    assert agilerl("resume", "run", "--quiet") == Outcome(0, "", "")
    assert differences(evidence(root), evidence(kept / "done")) == []

    (root / "report.html").rename(root / ".report.html.4711.tmp")
    assert agilerl("resume", "run").output.startswith("The run in run is finished")
    assert differences(evidence(root), evidence(kept / "done")) == []


@pytest.mark.parametrize("name", ["half", "done"])
def test_other_settings_are_refused_and_the_first_is_named(
    name: str, kept: Path, agilerl: Agilerl, tmp_path: Path
) -> None:
    root = copy(kept, name, tmp_path)
    other = ("algorithm.lr=3e-4", "training.evo_steps=3")
    refused = agilerl("train", *TINY, *other, "--out", "run", "--resume", "auto")
    assert (refused.code, refused.errors) == (
        2,
        "error: the run in 'run' was started with algorithm.lr=1e-05, now it is 0.0003; use the same settings, or "
        "another directory",
    )
    shape = agilerl("train", *TINY, "network.lora_config={r: 3}", "--out", "run", "--resume", "auto")
    assert "was started with network.lora_config.r=4, now it is 3;" in shape.errors
    assert evidence(root) == evidence(kept / name)


def test_a_setting_that_was_given_and_no_longer_is(agilerl: Agilerl, tmp_path: Path) -> None:
    """Where the algorithm is a choice, defaults are not written down."""
    several = (*TINY, "algorithm={name: 'choice[GRPO, CISPO]', group_size: 4, batch_size: 8}")
    next(events := begin(tmp_path / "run", *several, "algorithm.lr=1e-3"))
    events.close()  # type: ignore[attr-defined]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind":"train"}\n')  # else the run has learned nothing, and begins again
    outcome = agilerl("train", *several, "--out", "run", "--resume", "auto")
    assert outcome.code == 2
    assert "started with algorithm.lr=0.001, now it is left out" in outcome.errors


def test_of_what_differs_the_setting_that_was_given_is_named(kept: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    copy(kept, "half", tmp_path)
    outcome = agilerl("train", *TINY, "--seed", "7", "--out", "run", "--resume", "auto")
    assert outcome.code == 2
    assert "started with training.seed=42, now it is 7" in outcome.errors


@pytest.mark.parametrize("learned_nothing", [False, True])
def test_resume_auto_starts_where_there_is_no_run(learned_nothing: bool, agilerl: Agilerl, tmp_path: Path) -> None:
    """Also in what a process leaves that dies before ``run.json`` is there, or before it learned anything."""
    if learned_nothing:  # with other settings, and other files
        RunDirectory.create(tmp_path / "run", {"a": 1}, 7, files={"code": {"gone.py": "0"}}).close()
    for folder in ("completions", "checkpoints"):
        (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
    for name in (".lock", ".run.json.4711.tmp"):
        (tmp_path / "run" / name).touch()
    short = (*TINY, "training.max_steps=16", "training.evo_steps=1")
    outcome = agilerl("train", *short, "--out", "run", "--resume", "auto")
    assert (outcome.code, outcome.errors) == (0, "")
    assert ("where one ended before it learned anything" in outcome.output) == learned_nothing
    assert "iteration 1 (100%" in outcome.output
    assert (tmp_path / "run" / "summary.json").exists()
    without = agilerl("train", *short, "--resume", "auto")
    assert without.code == 2
    assert without.errors == "error: --resume auto resumes the run in --out, found no --out; pass the directory"


AGAIN = "If it was killed before it wrote anything, start it again with its train command."


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", f"error: expected a run directory at nowhere, found nothing. {AGAIN}"),
        ("file", "error: expected a run directory at file, found a file."),
        (
            "empty",
            "error: empty is not a run directory: it has no run.json. Give the folder that a run was written to. "
            f"{AGAIN}",
        ),
    ],
)
def test_what_is_no_run_is_refused(place: str, message: str, agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert agilerl("resume", place) == Outcome(2, "", message)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_that_somebody_works_on_is_refused(kept: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    root = copy(kept, "half", tmp_path)
    with RunDirectory.open(root):
        before = evidence(root)
        for command in (("resume", "run"), ("train", *TINY, "--out", "run", "--resume", "auto")):
            outcome = agilerl(*command)
            assert (outcome.code, outcome.output) == (2, "")
            assert f"run is in use by process {os.getpid()} on " in outcome.errors
        assert evidence(root) == before


def test_without_resume_an_unfinished_run_is_left_alone(kept: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    root = copy(kept, "half", tmp_path)
    outcome = agilerl("train", *TINY, "--out", "run")
    assert outcome.code == 2
    assert outcome.errors.startswith("error: run holds an unfinished run; resume it with: agilerl resume run - or")
    assert evidence(root) == evidence(kept / "half")


def test_time_that_ran_out_while_nobody_worked_on_the_run(tmp_path: Path) -> None:
    """Then nothing is trained any more, but the run gets its exam, its test and its summary."""
    events = begin(tmp_path / "run", *TINY, "training.max_seconds=3600")
    while not isinstance(event := next(events), IterationDone) or event.iteration < 2:
        pass
    events.close()  # type: ignore[attr-defined]
    saved = open_run(tmp_path / "run", report=print)
    session = build(saved.config, saved.checkpoint)
    assert session.saved is not None
    session.saved.progress.seconds_before = 3601
    assert [e for e in resume(session, saved.run) if isinstance(e, IterationDone)] == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["iterations"], summary["test"]["elite"]["n"]) == (1, 4)


def test_a_summary_alone_does_not_finish_a_run(kept: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    root = copy(kept, "half", tmp_path)
    (root / "summary.json").write_text('{"status": "finished"}')
    for command in (("resume", "run"), ("train", *TINY, "--out", "run", "--resume", "auto")):
        outcome = agilerl(*command)
        assert outcome.code == 2
        assert "says that the run is finished, but it gives no number of generations" in outcome.errors
    shutil.copy(kept / "done" / "summary.json", root)
    assert "run/elite holds no adapter; restore the missing part, or delete" in agilerl("resume", "run").errors
    shutil.copytree(kept / "done" / "elite", root / "elite")
    assert "is after iteration 2, which contradicts the summary" in agilerl("resume", "run").errors
    (root / "summary.json").unlink()
    assert agilerl("resume", "run").code == 0
    assert differences(evidence(root), evidence(kept / "done")) == []


def test_a_run_without_an_elite_fails_and_says_why(agilerl: Agilerl) -> None:
    """Also when it is resumed after its end, and where nothing else is printed."""
    wild = ("algorithm.lr=1e30", "mutation.rl_hp_selection={temperature: {}}", "training.evo_steps=4")
    outcome = agilerl("train", *TINY, *wild, "--out", "run", "--quiet")
    assert (outcome.code, outcome.output) == (1, "")
    assert outcome.errors.startswith("error: the run has no elite: ")
    assert "ended with a loss or gradient that was not finite: lower algorithm.lr" in outcome.errors
    again = agilerl("resume", "run", "--quiet")
    assert (again.code, again.errors) == (1, outcome.errors)


SPARSE = """
algorithm: {name: GRPO, group_size: 2, batch_size: 4}
environment:
  env_type: reasoning
  task: "reasoning_gym:spell_backward"
  data_batch_size_per_gpu: 2
  eval_prompts: 4
  test_prompts: 4
training: {pop_size: 2, max_steps: 16, evo_steps: 1}
"""
"""No ``network``: what is not said there must be the same after a restart from ``run.json``."""


def kill_at_first_checkpoint(operation: str, path: str) -> None:
    if operation == "mkdir" and "checkpoints" in path and path.endswith(".tmp"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_a_kill_before_the_first_checkpoint_of_a_manifest_with_defaults(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "sparse.yaml").write_text(SPARSE)
    whole = agilerl("train", "sparse.yaml", "--out", "whole")
    assert whole.code == 0, whole.errors
    script = (
        "import sys; from pathlib import Path; from tests.faults import failpoints, test_resume_command as here\n"
        "failpoints.arm(Path('run'), here.kill_at_first_checkpoint)\n"
        "from agilerl.cli import main; sys.argv = ['agilerl', 'train', 'sparse.yaml', '--out', 'run']; main()"
    )
    done = programs.run("-c", script, cwd=tmp_path, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "run" / "run.json").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    outcome = agilerl("resume", "run")
    assert outcome.code == 0, outcome.errors
    assert "no checkpoint yet, so from the beginning" in outcome.output
    assert differences(evidence(tmp_path / "run"), evidence(tmp_path / "whole")) == []
