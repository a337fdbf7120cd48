"""What several processes need and do not find is said in one sentence, and what they do is in the plan."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.errors import ConfigError
from tests.distributed.test_group_faults import LAUNCHED, QUICK
from tests.distributed.together import ends, started
from tests.training.small_runs import environment

ONE = {**LAUNCHED, "WORLD_SIZE": "1"}


@pytest.mark.parametrize("variables", [{}, ONE])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sharding": "fsdp2"}, r"sharding=fsdp2 needs .* --nproc-per-node 2 "),
        ({"sharding": "zero3", "backend": "none"}, r"sharding=zero3 needs .* as distributed\.backend=none says"),
    ],
)
def test_one_process_is_not_several(settings: dict[str, object], sentence: str, variables: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=sentence):
        asked_for(DistributedConfig(**settings), variables)


def test_what_one_process_can_do_is_not_refused() -> None:
    for settings in ({}, {"sharding": "none"}, {"sharding": "fsdp2", "backend": "ray"}):
        assert asked_for(DistributedConfig(**settings), {}) is False


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.processes
def test_the_command_line_refuses_before_anything_is_written(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agilerl", "train", "distributed.sharding=fsdp2", "--out", "run", *more],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: distributed.sharding=fsdp2 needs several processes, found one")
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


@pytest.mark.model
@pytest.mark.processes
def test_the_plan_says_what_processes_divide_and_what_each_needs(tmp_path: Path) -> None:
    command = ("-m", "agilerl", "train", *QUICK, "--out", "run", "--dry-run")
    with started(2, *command, "training.pop_size=3", cwd=tmp_path) as children:
        writer, other = ends(children)
    assert writer.code == other.code == 0, writer.errors + other.errors
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in writer.output.splitlines() if line.strip()}
    assert rows["processes"] == "2, which divide the agents among them"
    assert " MiB in each process on top of Python and torch" in writer.output

    with started(2, *command, "training.pop_size=1", "--json", cwd=tmp_path) as children:
        writer, other = ends(children)
    plan = json.loads(writer.output)
    parts = plan["memory_megabytes"]
    turns = sum(parts.values()) - min(parts["decode_cache"], parts["training_activations"])
    assert plan["peak_memory_megabytes"] == pytest.approx(turns, abs=0.5)


@pytest.mark.model
@pytest.mark.processes
def test_a_disk_that_refuses_ends_all_processes_alike(tmp_path: Path) -> None:
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
