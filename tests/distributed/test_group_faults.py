"""What ends one process of a run ends all of them, soon and with one sentence; and the run goes on from there."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.processes import ALONE, Processes
from agilerl.training.setup import device_of
from tests.distributed.together import check_a_loss_is_noticed, descendants, ends, kill, started, wait_for
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import begin
from tests.training.small_runs import environment

QUICK = (
    *SHORT,
    *("training.pop_size=2", "training.max_steps=128", "environment.data_batch_size_per_gpu=2"),
    *("environment.eval_prompts=4", "environment.test_prompts=4"),
)
"""8 iterations of 2 agents in 4 generations."""
TRAIN = ("-m", "agilerl", "train", *QUICK, "--out", "run", "--resume", "auto")


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_stopped_then_killed_then_killed_under_torchrun(tmp_path: Path) -> None:
    """A run that meets it all has the same bits as one that meets nothing."""
    with started(2, *TRAIN, cwd=tmp_path) as children:
        wait_for("iteration 1 ", children[0])
        children[1].send_signal(signal.SIGTERM)
        writer, other = ends(children)
    assert (writer.code, other.code) == (143, 143)
    assert writer.errors.splitlines()[-1] == "stopped; resume with: agilerl resume run"
    assert other.output + other.errors == ""

    with started(2, *TRAIN, cwd=tmp_path) as children:
        check_a_loss_is_noticed(children)

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    with subprocess.Popen(
        [sys.executable, *launcher, *TRAIN], cwd=tmp_path, env=environment(), stdout=-1, stderr=-1, text=True
    ) as elastic:
        wait_for("iteration 5 ", elastic)
        workers = [child for child, name in descendants(elastic.pid).items() if "agilerl train" in name]
        kill(max(workers))
        output, errors = elastic.communicate(timeout=300)
    assert elastic.returncode == 0, errors
    assert "Resuming run after iteration " in output
    alone = tmp_path / "alone"
    for _ in begin(alone, *QUICK):
        pass
    assert (
        differences(evidence(tmp_path / "run", extra_checkpoints=True), evidence(alone, extra_checkpoints=True)) == []
    )


@pytest.mark.model
@pytest.mark.processes
def test_a_mistake_that_one_process_finds_is_said_once(tmp_path: Path) -> None:
    """The second process may not run the grader; so neither of them does, and nothing is written."""
    (tmp_path / "mine.py").write_text("def reward(completion):\n    return 1.0\n")
    own = ("environment.graders=[{name: 'mine.py:reward'}]",)
    with started(2, *TRAIN, *own, cwd=tmp_path, own=[["--allow-code"], []]) as children:
        writer, other = ends(children)
    assert (writer.code, other.code) == (2, 2)
    assert writer.errors.count("\n") == 1
    assert writer.errors.startswith("error: ")
    assert "--allow-code" in writer.errors
    assert other.output + other.errors == ""
    assert not (tmp_path / "run").exists()


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("backend", "variables", "expected"),
    [
        ("auto", {}, False),
        ("auto", LAUNCHED, True),
        ("auto", {**LAUNCHED, "WORLD_SIZE": "1"}, False),
        ("none", LAUNCHED, False),
        ("ray", LAUNCHED, False),
        ("torch", LAUNCHED, True),
    ],
)
def test_who_is_asked_to_work_together(backend: str, variables: Mapping[str, str], expected: bool) -> None:
    assert asked_for(DistributedConfig(backend=backend), variables) == expected


@pytest.mark.processes
def test_torch_without_a_launcher_says_what_to_type(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agilerl", "train", "distributed.backend=torch", "--out", "run"],
        cwd=tmp_path,
        env={k: v for k, v in environment().items() if k != "WORLD_SIZE"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: distributed.backend=torch needs a launcher")
    assert "torchrun --nproc-per-node 2" in done.stderr


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    two = Processes(1, 2)
    assert [device_of(device, two) for device in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    assert device_of("cuda", ALONE) == "cuda"
    monkeypatch.delenv("LOCAL_RANK")
    assert device_of("cuda", two) == "cuda"
