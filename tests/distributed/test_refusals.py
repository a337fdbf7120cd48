"""What several processes need and do not find is said in one sentence, and what they do is in the plan."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.distributed import ray_launcher
from agilerl.distributed.ray_launcher import launch
from agilerl.distributed.topology import arranged
from agilerl.errors import ConfigError
from agilerl.processes import Processes
from agilerl.runs.stopping import stop_on_signals
from tests.distributed.test_islands_faults import LAUNCHED, QUICK
from tests.distributed.test_processes import free_port
from tests.distributed.together import ends, started
from tests.training.small_runs import environment

ONE = {**LAUNCHED, "WORLD_SIZE": "1"}


@pytest.mark.parametrize("variables", [{}, ONE])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"processes_per_island": 2}, r"processes_per_island=2 .* torchrun --nproc-per-node 2"),
        ({"processes_per_island": 3, "sharding": "fsdp2"}, r"processes_per_island=3 needs .* --nproc-per-node 3"),
        ({"sharding": "fsdp2"}, r"sharding=fsdp2 needs .* --nproc-per-node 2 .*distributed\.processes_per_island=2"),
        ({"sharding": "zero3", "backend": "none"}, r"sharding=zero3 needs .* as distributed\.backend=none says"),
    ],
)
def test_one_process_is_not_several(settings: dict[str, object], sentence: str, variables: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=sentence):
        asked_for(DistributedConfig(**settings), variables)


def test_what_one_process_can_do_is_not_refused() -> None:
    for settings in (
        {},
        {"processes_per_island": 1},
        {"sharding": "none"},
        {"processes_per_island": 2, "backend": "ray"},
    ):
        assert asked_for(DistributedConfig(**settings), {}) is False


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.processes
def test_the_command_line_refuses_before_anything_is_written(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agilerl", "train", "distributed.processes_per_island=2", "--out", "run", *more],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: distributed.processes_per_island=2 needs several processes, found one")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", ""), ("RANK", "-1")])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}, found '{value}'"):
        asked_for(DistributedConfig(), {**LAUNCHED, name: value})


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("missing", [("MASTER_ADDR",), ("MASTER_PORT",), ("MASTER_ADDR", "MASTER_PORT")], ids=str)
def test_processes_that_cannot_meet_do_not_train_alone(backend: str, missing: tuple[str, ...]) -> None:
    variables = {name: value for name, value in LAUNCHED.items() if name not in missing}
    with pytest.raises(ConfigError, match=f"{' and '.join(missing)}.* WORLD_SIZE=2.*torchrun.*backend=none"):
        asked_for(DistributedConfig(backend=backend), variables)
    for config, alone in (
        (DistributedConfig(backend=backend), {"WORLD_SIZE": "1"}),
        (DistributedConfig(backend="none"), {}),
    ):
        assert asked_for(config, variables | alone) is False


def test_islands_of_one_process_cannot_divide_the_base() -> None:
    with pytest.raises(ConfigError, match="sharding=fsdp2 "):
        arranged(Processes(0, 2), DistributedConfig(sharding="fsdp2"), {})
    by_plugin = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with pytest.raises(ConfigError, match="sharding=fsdp2 "):
        arranged(Processes(0, 2), DistributedConfig(processes_per_island=1), by_plugin)
    assert arranged(Processes(0, 2), DistributedConfig(sharding="fsdp2", processes_per_island=2), {}).island.size == 2


@pytest.mark.model
@pytest.mark.processes
def test_processes_that_cannot_be_divided_say_so_once(tmp_path: Path) -> None:
    command = ("-m", "agilerl", "train", *QUICK, "distributed.processes_per_island=3", "--out", "run")
    with started(2, *command, cwd=tmp_path) as children:
        writer, other = ends(children)
    assert (writer.code, other.code) == (2, 2)
    assert writer.errors.startswith("error: 2 processes cannot be divided into islands")
    assert writer.errors.count("\n") == 1
    assert other.output + other.errors == ""


@pytest.mark.model
@pytest.mark.processes
def test_the_plan_says_who_has_which_agents_and_what_each_process_needs(tmp_path: Path) -> None:
    command = ("-m", "agilerl", "train", *QUICK, "training.pop_size=3", "--out", "run", "--dry-run")
    with started(2, *command, cwd=tmp_path) as children:
        writer, other = ends(children)
    assert writer.code == other.code == 0, writer.errors + other.errors
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in writer.output.splitlines() if line.strip()}
    assert rows["islands"] == "2 of 1 process; agents 0-1, 2"
    assert " MiB in each process on top of Python and torch" in writer.output

    with started(2, *command, "distributed.processes_per_island=2", "--json", cwd=tmp_path) as children:
        writer, other = ends(children)
    plan = json.loads(writer.output)
    assert plan["islands"] == {"processes_per_island": 2, "agents": [[0, 1, 2]]}
    parts = plan["memory_megabytes"]
    turns = sum(parts.values()) - min(parts["decode_cache"], parts["training_activations"])
    assert plan["peak_memory_megabytes"] == pytest.approx(turns, abs=0.5)


@pytest.mark.model
@pytest.mark.processes
def test_a_disk_that_refuses_ends_all_islands_alike(tmp_path: Path) -> None:
    """Files of this process may not grow beyond a few kilobytes, so that the first checkpoint fails."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        "from agilerl.cli import main; sys.argv[0] = 'agilerl'; main()"
    )
    with started(2, "-c", script, "train", *QUICK, "--out", "run", "--quiet", cwd=tmp_path) as children:
        writer, other = ends(children)
    assert (writer.code, other.code) == (1, 1), (writer, other)
    assert "agilerl resume run" in writer.errors
    assert other.output + other.errors == ""


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"{address}.*distributed.address"):
        launch(DistributedConfig(address=address), [], print, lambda: stop_on_signals(print))


@pytest.mark.parametrize("address", ["", "auto", "local", "head"])
def test_addresses_without_a_port_are_left_to_ray(address: str) -> None:
    ray_launcher._check_answers(address)


def test_an_address_that_answers_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_launcher._check_answers(f"ray://127.0.0.1:{server.getsockname()[1]}")


def test_each_actor_is_told_how_many_share_its_machine() -> None:
    places = ray_launcher._variables([("10.0.0.1", 5), ("10.0.0.1", 6), ("10.0.0.2", 7)], {"VLLM_API_KEY": "k"})
    assert {place["VLLM_API_KEY"] for place in places} == {"k"}
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["2", "2", "1"]
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    assert {(p["WORLD_SIZE"], p["MASTER_ADDR"], p["MASTER_PORT"], p["LOCAL_RANK"]) for p in places} == {
        ("3", "10.0.0.1", "5", "0")
    }
