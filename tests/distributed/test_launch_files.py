"""What the tutorials and the page about several machines give to torchrun, SLURM and Ray is what these take."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from agilerl.config.manifest import load_manifest
from agilerl.training.resolved import resolve
from tests.test_readme import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "distributed.md"
FOLDER = ROOT / "tutorials" / "manifests" / "distributed"


def launched(command: str) -> tuple[Any, list[str]]:
    """Return what torchrun makes of a command, and the command line of each process."""
    program, *rest = shlex.split(command.replace("\\\n", " "))
    assert program == "torchrun"
    found = get_args_parser().parse_args(rest)
    assert found.module
    return found, [found.training_script, *found.training_script_args]


@pytest.mark.parametrize("command", [text for text in blocks(PAGE, "bash") if text.startswith("torchrun")])
def test_torchrun_takes_the_commands_of_the_page(command: str) -> None:
    _, (program, *arguments) = launched(command)
    assert (program, arguments[0]) == ("agilerl", "train")
    assert arguments[-2:] == ["--resume", "auto"]


@pytest.mark.processes
def test_the_slurm_script_is_one_and_starts_what_torchrun_takes() -> None:
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    started = re.search(r"torchrun (?:.*\\\n)*.*&$", script.read_text(), re.MULTILINE)
    assert started is not None
    command = re.sub(r'"?\$\{?(\w+)[^"\s}]*\}?"?', "7", started[0].removesuffix("&"))
    found, process = launched(command)
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("7", "7", 3)
    assert found.shutdown_timeout == 240
    assert process == ["agilerl", "train", "7", "--out", "7", "--resume", "auto"]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:TERM@300"


def test_the_manifest_for_ray_is_valid() -> None:
    path = FOLDER / "ray.yaml"
    config = load_manifest(path, [])
    assert config.distributed.backend == "ray"
    assert resolve(config).without_effect == []
    assert f"agilerl train tutorials/manifests/distributed/{path.name}" in path.read_text()
