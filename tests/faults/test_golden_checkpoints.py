"""Checkpoints of earlier versions are read bit by bit, written the same, and resumed to the same bits."""

import json
import shutil
from pathlib import Path

import pytest

from agilerl.algorithms import GRPO
from agilerl.algorithms.codec import read_state, write_state
from agilerl.config.manifest import load_manifest
from agilerl.errors import CheckpointError
from agilerl.runtime import Runtime
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests.faults.evidence import differences
from tests.fixtures.checkpoints.make import HERE, RUNS, finish, machine

pytestmark = pytest.mark.model

EXPECTED = json.loads((HERE / "expected.json").read_text())
AGENTS = sorted(path.parent.relative_to(HERE).as_posix() for path in HERE.glob("*/checkpoints/*/*/agent.json"))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    """The base model, with the adapted layers that all of these agents have."""
    return build(load_manifest(None, list(RUNS["grpo"]))).population.runtime


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_is_written_as_it_was_read(agent: str, runtime: Runtime, tmp_path: Path) -> None:
    state = read_state(HERE / agent, runtime.store.layers)
    assert state.moments
    write_state(state, tmp_path, runtime, runtime.lora_config)
    files = {p.relative_to(HERE / agent): p for p in (HERE / agent).rglob("*") if p.is_file()}
    assert len(files) >= 4
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()) == sorted(files)
    for name, path in files.items():
        if name.name != "adapter_config.json":  # it names the folder of the base model
            assert (tmp_path / name).read_bytes() == path.read_bytes(), name


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_resumed_to_the_same_bits(run: str, tmp_path: Path) -> None:
    """Where this machine computes what the one did that made them: others differ in the last bits."""
    found = finish(Path(shutil.copytree(HERE / run, tmp_path / "run")))
    assert found.keys() == EXPECTED[run].keys()
    if machine() != EXPECTED["machine"]:
        pytest.skip("this processor, or this version of torch, computes other bits than the one that made them")
    assert differences(found, EXPECTED[run]) == []


def test_a_run_of_the_arithmetic_before_is_refused_and_its_agents_load(runtime: Runtime, tmp_path: Path) -> None:
    root = Path(shutil.copytree(HERE / "of_arithmetic_1", tmp_path / "run"))
    with pytest.raises(CheckpointError, match="version 1 of the arithmetic"):
        open_run(root, report=print)
    agents = sorted(root.glob("checkpoints/*/agent_*"))
    assert agents
    for folder in agents:
        assert GRPO.load(folder).steps > 0
