import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from agilerl.errors import CheckpointError
from agilerl.runs import RunDirectory, collect_hardware, collect_versions, directory, read_run
from agilerl.runs.directory import ARITHMETIC_VERSION

CONFIG = {"algorithm": {"name": "GRPO", "lr": 5e-6}, "population": {"size": 4}, "limit": float("inf")}

HOLD = """
import sys, time
from agilerl.runs import RunDirectory
run = RunDirectory.{how}(sys.argv[1]{arguments})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Start a process that holds a run directory, and end it afterwards."""
    processes = []

    def start(root, how="create", arguments=", {}, 0"):
        code = HOLD.format(how=how, arguments=arguments)
        process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def tree(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*"))


def test_the_status_of_a_run(tmp_path):
    with RunDirectory.create(tmp_path / "run", CONFIG, 7) as run:
        assert run.status == "running"
    assert run.status == "stopped"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (run.root / ".lock").write_text(f"{ended.pid} {socket.gethostname()}\n")  # as a kill leaves it
    assert run.status == "stopped"
    (run.root / ".lock").write_text(f"{ended.pid} elsewhere\n")
    assert run.status == "running"
    (run.root / ".lock").write_bytes(b"\xff elsewhere\n")
    assert run.status == "stopped"
    (run.root / ".lock").unlink()
    os.mkfifo(run.root / ".lock")  # in a directory from a stranger: reading it would wait for ever
    assert run.status == "stopped"
    run.summary.write_text('{"status": "interrupted"}')
    assert run.status == "interrupted"


def test_create_writes_what_the_run_was_started_with(tmp_path):
    with RunDirectory.create(tmp_path / "a" / "run", CONFIG, 7, command=["agilerl", "train"]) as run:
        info = json.loads(run.run_json.read_text())
        assert info["config"]["algorithm"] == CONFIG["algorithm"]
        assert info["config"]["limit"] == "Infinity"
        assert (info["seed"], info["schema_version"], info["command"]) == (7, 1, ["agilerl", "train"])
        assert len(info["config_sha256"]) == 64
        assert {"python", "torch", "transformers", "peft", "reasoning_gym", "agilerl"} <= set(info["versions"])
        assert run.completions.is_dir()
        assert run.checkpoints.is_dir()
        assert not run.is_finished
        assert repr(run) == f"<RunDirectory {run.root}: seed 7, unfinished>"
    assert read_run(run.root)["config"]["limit"] == float("inf")


def test_the_hash_depends_on_the_configuration_only(tmp_path):
    def digest(name, config, seed):
        with RunDirectory.create(tmp_path / name, config, seed) as run:
            return run.info["config_sha256"]

    assert digest("a", {"x": 1, "y": 2}, 0) == digest("b", {"y": 2, "x": 1}, 1)
    assert digest("c", {"x": 1, "y": 3}, 0) != digest("d", {"x": 1, "y": 2}, 0)


def test_open_goes_on_with_an_unfinished_run(tmp_path):
    RunDirectory.create(tmp_path, CONFIG, 7).close()
    with RunDirectory.open(tmp_path) as run:
        assert run.info["seed"] == 7


def test_finish_closes_the_run_for_good(tmp_path):
    with RunDirectory.create(tmp_path, CONFIG, 7) as run:
        run.finish({"generations": 3})
        assert json.loads(run.summary.read_text()) == {"status": "finished", "generations": 3}
        assert run.is_finished
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="finished"):
        RunDirectory.create(tmp_path, CONFIG, 7)
    with pytest.raises(CheckpointError, match="finished"):
        RunDirectory.open(tmp_path)
    with pytest.raises(CheckpointError, match="closed"):
        run.finish({})
    assert tree(tmp_path) == before


def test_an_interrupted_summary_leaves_the_run_open(tmp_path):
    with RunDirectory.create(tmp_path, CONFIG, 7) as run:
        run.finish({"status": "interrupted"})
    with RunDirectory.open(tmp_path) as run:
        assert not run.is_finished


def test_an_unfinished_run_is_not_started_over(tmp_path):
    RunDirectory.create(tmp_path, CONFIG, 7).close()
    (tmp_path / "metrics.jsonl").write_text('{"kind":"test"}\n')
    RunDirectory.create(tmp_path, CONFIG, 8).close()  # in place of one that learned nothing
    assert (read_run(tmp_path)["seed"], (tmp_path / "metrics.jsonl").exists()) == (8, False)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not part of a run"):
        RunDirectory.create(tmp_path, CONFIG, 9)
    (tmp_path / "thesis.tex").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train"}\n')
    with pytest.raises(
        CheckpointError, match="no checkpoint, so nothing is lost if you start it again with train --overwrite"
    ):
        RunDirectory.create(tmp_path, CONFIG, 7)
    (tmp_path / "checkpoints" / "000001").mkdir()
    with pytest.raises(CheckpointError, match="unfinished run; resume it"):
        RunDirectory.create(tmp_path, CONFIG, 7)


def test_a_run_that_another_process_made_a_moment_ago_is_not_overwritten(tmp_path, monkeypatch):
    """Another process creates a run, and ends, between our first look and our lock."""
    lock = directory.DirectoryLock

    def late(path):
        monkeypatch.undo()
        RunDirectory.create(tmp_path / "run", CONFIG, 1).close()
        (tmp_path / "run" / "metrics.jsonl").write_text('{"kind":"train"}\n')
        return lock(path)

    monkeypatch.setattr(directory, "DirectoryLock", late)
    with pytest.raises(CheckpointError, match="holds an unfinished run"):
        RunDirectory.create(tmp_path / "run", CONFIG, 2)
    assert read_run(tmp_path / "run")["seed"] == 1
    RunDirectory.open(tmp_path / "run").close()


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"found thesis\.tex"):
        RunDirectory.create(tmp_path, CONFIG, 7)
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        RunDirectory.open(tmp_path)
    assert tree(tmp_path) == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="found a file"):
        RunDirectory.create(tmp_path / "thesis.tex", CONFIG, 7)
    with pytest.raises(CheckpointError, match="found nothing"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot be used"):
        RunDirectory.create(tmp_path / "thesis.tex" / "run", CONFIG, 7)
    with pytest.raises(CheckpointError, match="cannot be used"):
        RunDirectory.create(tmp_path / ("x" * 300), CONFIG, 7)


def filled(root):
    with RunDirectory.create(root, CONFIG, 1) as run:
        run.metrics.write_text("{}\n")
        (run.checkpoints / "000001").mkdir()
        (run.checkpoints / "000001" / "state.json").write_text("{}")
        (root / ".summary.json.42.tmp").write_text("{")
        run.finish({"generations": 3})


def test_a_run_is_overwritten_only_if_asked(tmp_path):
    filled(tmp_path / "run")
    with RunDirectory.create(tmp_path / "run", CONFIG, 2, overwrite=True) as run:
        assert not run.is_finished
        assert tree(run.root) == [".lock", "checkpoints", "completions", "run.json"]
    assert read_run(tmp_path / "run")["seed"] == 2
    RunDirectory.create(tmp_path / "new", CONFIG, 3, overwrite=True).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / "thesis.tex").write_text("..."), "not part of a run"),
        (lambda root: (root / "elite").symlink_to(root.parent), "is a link"),
        (lambda root: (root / "run.json").write_text('{"config": {}}'), "expected schema_version"),
        (lambda root: (root / "run.json").unlink(), "is not empty"),
    ],
)
def test_what_is_not_all_of_a_run_is_never_overwritten(tmp_path, change, words):
    filled(tmp_path / "run")
    change(tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        RunDirectory.create(tmp_path / "run", CONFIG, 2, overwrite=True)
    assert tree(tmp_path) == before


def test_a_run_in_use_or_behind_a_link_is_not_overwritten(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with RunDirectory.create(tmp_path / "run", CONFIG, 1) as run:
        with pytest.raises(CheckpointError, match="is in use by"):
            RunDirectory.create(tmp_path / "run", CONFIG, 2, overwrite=True)
        assert run.info["seed"] == 1
    with pytest.raises(CheckpointError, match="is a link"):
        RunDirectory.create(tmp_path / "link", CONFIG, 2, overwrite=True)
    assert read_run(tmp_path / "run")["seed"] == 1


def test_a_start_that_was_killed_half_way_can_be_repeated(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".run.json.42.tmp").write_text("{")
    (tmp_path / "checkpoints").mkdir()
    RunDirectory.create(tmp_path, CONFIG, 7).close()


def test_a_configuration_that_json_cannot_hold_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        RunDirectory.create(tmp_path / "run", {"x": {1}}, 7)
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"x": 1}}, "match its sha256"),
        ({"schema_version": 99}, "install a newer one"),
        ({"seed": None}, "expected seed as int, found None"),
    ],
)
def test_a_changed_run_json_is_refused(tmp_path, change, message):
    with RunDirectory.create(tmp_path, CONFIG, 7) as run:
        info = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**info, **change}))
    with pytest.raises(CheckpointError, match=message):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("begun", [None, 1, ARITHMETIC_VERSION - 1, ARITHMETIC_VERSION + 1, "2"])
def test_a_run_of_another_arithmetic_is_read_but_not_resumed(tmp_path, begun):
    with RunDirectory.create(tmp_path, CONFIG, 7) as run:
        info = json.loads(run.run_json.read_text())
    assert info.pop("arithmetic_version") == ARITHMETIC_VERSION
    run.run_json.write_text(json.dumps(info if begun is None else {**info, "arithmetic_version": begun}))
    assert read_run(tmp_path)["seed"] == 7
    before = tree(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=rf"version '?{begun or 1}'? .* version {ARITHMETIC_VERSION}",
    ):
        RunDirectory.open(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("how", "arguments"), [("create", ", {}, 0"), ("open", "")])
@pytest.mark.processes
def test_a_second_process_is_refused_at_once_with_the_owners_pid(tmp_path, other, how, arguments):
    root = tmp_path / "run"
    if how == "open":
        RunDirectory.create(root, CONFIG, 7).close()
    owner = other(root, how, arguments)
    before = tree(root)
    for attempt in (lambda: RunDirectory.create(root, CONFIG, 7), lambda: RunDirectory.open(root)):
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=f"in use by process {owner.pid} "):
            attempt()
        assert time.monotonic() - start < 1
    assert tree(root) == before
    read_run(root)  # Reading is free.
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    RunDirectory.open(root).close()


@pytest.mark.processes
def test_one_of_many_that_start_at_once_proceeds(tmp_path):
    code = (
        "import sys\nfrom agilerl.runs import RunDirectory\nfrom agilerl.errors import CheckpointError\n"
        "sys.stdin.readline()\n"
        "try:\n    run = RunDirectory.create(sys.argv[1], {}, 0)\n"
        "except CheckpointError as error:\n    print(f'refused {error}', flush=True)\n"
        "else:\n    print('proceeds', flush=True)\n    sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate("end\n")
    assert sum(answer.startswith("proceeds") for answer in answers) == 1, answers
    winner = processes[[answer.startswith("proceeds") for answer in answers].index(True)]
    assert all(f"in use by process {winner.pid} " in answer for answer in answers if answer.startswith("refused"))


@pytest.mark.processes
def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_owner(tmp_path):
    """The owner forks a worker and is killed; the worker lives on."""
    code = (
        "import os, sys, time\nfrom agilerl.runs import RunDirectory\nrun = RunDirectory.create(sys.argv[1], {}, 0)\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    worker = int(owner.stdout.readline())
    try:
        owner.kill()
        owner.wait()
        os.kill(worker, 0)
        RunDirectory.open(tmp_path / "run").close()
    finally:
        os.kill(worker, signal.SIGKILL)
        owner.stdout.close()


def test_versions_and_hardware_say_what_there_is():
    versions = collect_versions()
    assert versions["python"].startswith("3.")
    assert versions["reasoning_gym"]
    hardware = collect_hardware()
    assert hardware["cores"] >= 1
    assert hardware["memory_bytes"] > 1e8
    assert isinstance(hardware["cuda"], list)
    json.dumps(hardware)


@pytest.mark.processes
def test_importing_runs_is_light():
    code = "import sys, agilerl.runs; print([m for m in ('torch', 'pyarrow', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
