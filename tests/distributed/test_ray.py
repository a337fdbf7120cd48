"""`agilerl train ... distributed.backend=ray`, with a real Ray on this machine."""

import signal
import sys
from pathlib import Path

import pytest

from agilerl.config.distributed import DistributedConfig
from agilerl.config.manifest import load_manifest
from agilerl.distributed.ray_launcher import launch, serving
from agilerl.errors import ConfigError
from agilerl.runs.stopping import stop_on_signals
from tests.distributed.pretended_vllm import ask
from tests.distributed.test_islands_faults import QUICK
from tests.distributed.together import descendants, kill, wait_for
from tests.faults.evidence import differences, evidence
from tests.faults.pieces import begin
from tests.programs import Program
from tests.training.small_runs import ROOT, environment

ON_RAY = ("distributed.backend=ray", "distributed.islands=2", "distributed.cpus_per_island=0.5")
AWAKE = {"RAY_worker_niceness": "0"}
"""Ray's workers have a niceness of 15: on a busy machine they would not get to their first iteration in ten minutes."""


def on_ray(*arguments: str, cwd: Path) -> Program:
    return Program("-m", "agilerl", "train", *QUICK, *ON_RAY, *arguments, cwd=cwd, env={**environment(), **AWAKE})


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_interrupted_then_an_island_is_killed_and_the_bits_are_those_of_one_process(tmp_path: Path) -> None:
    with on_ray("--out", "run", cwd=tmp_path) as driver:
        wait_for("iteration 1 ", driver)
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=200)
    assert driver.returncode == 130
    assert errors.splitlines()[-1] == f"stopped; resume with: agilerl resume {tmp_path / 'run'}"

    with on_ray("--out", "run", "--resume", "auto", cwd=tmp_path) as driver:
        wait_for("iteration 4 ", driver)
        islands = [child for child, name in descendants(driver.pid).items() if name.startswith("ray::Island")]
        assert len(islands) == 2
        kill(islands[1])
        output, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors
    assert "resuming from the last checkpoint (1 of 3)" in output
    assert "Resuming" in output
    alone = tmp_path / "alone"
    for _ in begin(alone, *QUICK):
        pass
    assert (
        differences(evidence(tmp_path / "run", extra_checkpoints=True), evidence(alone, extra_checkpoints=True)) == []
    )


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-evolution\[ray\]'"):
        launch(DistributedConfig(), [], print, lambda: stop_on_signals(print))


@pytest.mark.processes
def test_more_islands_than_agents(tmp_path: Path) -> None:
    with on_ray("distributed.islands=3", cwd=tmp_path) as driver:
        _, errors = driver.communicate(timeout=100)
    assert driver.returncode == 2
    assert "more islands than agents: distributed.islands=3, training.pop_size=2" in errors


@pytest.mark.timeout(600)
@pytest.mark.processes
def test_a_cluster_without_room_says_what_it_has(tmp_path: Path) -> None:
    with on_ray("distributed.gpus_per_island=64", "distributed.timeout_seconds=5", cwd=tmp_path) as driver:
        _, errors = driver.communicate(timeout=200)
    assert driver.returncode == 2
    assert errors.count("\n") == 1
    assert "the Ray cluster has no room for" in errors


def test_the_command_of_a_server_has_room_for_every_adapter() -> None:
    overrides = ["distributed.vllm_servers=1", "training.pop_size=4", "network.lora_config.r=4"]
    command = serving(load_manifest(None, overrides))
    assert command[:2] == ["vllm", "serve"]
    assert command[command.index("--max-loras") + 1] == "5"
    assert command[command.index("--max-lora-rank") + 1] == "8"
    ranks = ["mutation.probabilities.arch_mut=1", "mutation.rank_range=[4, 20]"]
    wider = serving(load_manifest(None, [*overrides, *ranks]))
    assert wider[wider.index("--max-lora-rank") + 1] == "32"
    assert serving(load_manifest(None, [])) == []


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_server_listens_to_this_machine_alone_and_asks_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**AWAKE, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = DistributedConfig(islands=1, vllm_servers=1, gpus_per_server=0, cpus_per_island=0.5)
    told: list[str] = []
    serve = [sys.executable, "-m", "tests.distributed.pretended_vllm"]
    assert launch(config, [ask], told.append, lambda: stop_on_signals(print), serve).kind == "done"
    (url, allowed, key), (status, *arguments), refused = told[0].split(), told[1].split(), told[2]
    assert (allowed, status, refused) == ("True", "200", "401")
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert url.startswith("http://127.0.0.1:")
    assert len(key) > 40
    assert key not in arguments  # every user of the machine sees them
