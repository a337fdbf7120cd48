"""`agilerl train ... distributed.backend=ray`: Ray Train on this machine."""

import sys
from pathlib import Path

import pytest

from agilerl.cli.ray_train import launch
from agilerl.config.distributed import DistributedConfig
from agilerl.errors import ConfigError
from tests.distributed.test_group_faults import QUICK
from tests.distributed.test_processes import free_port
from tests.distributed.together import descendants, kill, wait_for
from tests.faults.evidence import differences, evidence
from tests.faults.pieces import begin
from tests.programs import Program
from tests.training.small_runs import environment

LONGER = (*QUICK, "training.max_steps=640", "training.checkpoint_steps=3")
"""Not over before the driver has printed its third iteration."""
ON_RAY = ("distributed.backend=ray", "distributed.cpus_per_worker=0.5", "distributed.max_restarts=1")
AWAKE = {"RAY_worker_niceness": "0"}
"""Ray's workers have a niceness of 15: on a busy machine they would not get to their first iteration in ten minutes."""


def on_ray(*arguments: str, cwd: Path) -> Program:
    command = ("-m", "agilerl", "train", *LONGER, *ON_RAY, "--out", "run", *arguments)
    return Program(*command, cwd=cwd, env={**environment(), **AWAKE})


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_a_worker_is_killed_and_the_bits_are_those_of_one_process(tmp_path: Path) -> None:
    with on_ray(cwd=tmp_path) as driver:
        wait_for("iteration 4 ", driver)
        workers = [child for child, name in descendants(driver.pid).items() if "RayTrainWorker" in name]
        assert len(workers) == 2
        kill(workers[1])
        output, errors = driver.communicate(timeout=400)
    assert driver.returncode == 0, errors
    assert "Resuming" in output
    alone = tmp_path / "alone"
    for _ in begin(alone, *LONGER):
        pass
    found, expected = (evidence(path, extra_checkpoints=True) for path in (tmp_path / "run", alone))
    assert differences(found, expected) == []


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_mistake_is_one_sentence_and_no_reason_to_start_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion):\n    raise ValueError('cannot grade this')\n")
    with on_ray("environment.graders=[{name: 'mine.py:reward'}]", "--allow-code", "--quiet", cwd=tmp_path) as driver:
        _, errors = driver.communicate(timeout=280)
    assert driver.returncode == 2
    (sentence,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "cannot grade this" in sentence


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-evolution\[ray\]'"):
        launch(DistributedConfig(backend="ray"), Path("run"), print, None)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"{address}.*distributed.address"):
        launch(DistributedConfig(backend="ray", address=address), Path("run"), print, None)
