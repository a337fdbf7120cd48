"""One agent on two real processes: the same updates as on one, with the base whole or divided."""

import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.data.batch import union
from agilerl.errors import ConfigError, EngineError, RewardError
from agilerl.models.sharding import Lockstep
from agilerl.processes import ALONE, Processes
from tests.distributed.one_agent_cases import Found, new_runtime, run
from tests.distributed.test_processes import free_port
from tests.programs import Program

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.model


def on_two(out: Path, names: list[str]) -> Found:
    """Run cases on two processes that compare what they come to."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = ("-m", "tests.distributed.one_agent_cases", out, *names)
    children = [
        Program(*command, cwd=ROOT, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    said = [child.communicate(timeout=280) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert json.loads(said[0][0].splitlines()[-1]) == {"equal": True}
    return load_file(out)


def largest_gap(found: Found, expected: Found, case: str, like: str, names: tuple[str, ...]) -> float:
    return max(float((found[f"{case}/{n}"] - expected[f"{like}/{n}"]).abs().max()) for n in names)


@dataclass(frozen=True)
class Recording(Processes):
    """A group in which the others have said what they say already."""

    others: tuple[bytes, ...] = ()
    said: list[bytes] = field(default_factory=list)

    def gather(self, data: bytes) -> list[bytes]:
        self.said.append(data)
        return [data, *self.others]


def test_rows_of_two_processes_are_one_batch() -> None:
    def episode(length: int, group: int, number: int = 0) -> Trajectory:
        return Trajectory([2, 3], [5] * length, [True] * length, [-1.0] * length, [0.5], group=group, episode=number)

    first = [episode(3, 0), episode(4, 1)]
    second = [episode(40, 0, 7), episode(2, 0, 7), episode(1, 1)]  # an episode of two rows
    recorded = Recording(0, 2)
    union(recorded, collate(second, 0), 0)
    found = union(Recording(0, 2, others=tuple(recorded.said)), collate(first, 0), 0)
    for trajectory in second:
        trajectory.group += 2
    expected = collate([*first, *second], 0)
    for name in (f.name for f in fields(RolloutBatch) if f.name != "episodes"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is other is None) or torch.equal(one, other), name
    assert [places.tolist() for places in found.heads()] == [places.tolist() for places in expected.heads()]
    assert union(Recording(0, 2), collate(first, 0), 0).episodes is None


@pytest.mark.processes
def test_two_processes_update_as_one(tmp_path: Path) -> None:
    algorithms = ["grpo", "ppo", "dpo"]
    names = [
        "population-exact",
        "accelerated",
        "tight",
        "at-once",
        *algorithms,
        *(f"{name}-double" for name in algorithms),
    ]
    two, one = on_two(tmp_path / "two.safetensors", names), run(names)
    assert set(two) == set(one)
    assert one["grpo/steps"].min() > 0
    for key in two:
        if key.startswith("population-exact") or key.endswith("steps"):
            assert torch.equal(two[key].nan_to_num(), one[key].nan_to_num()), key
    assert 0 < two["tight/limit"] < 3 * 32  # what one of them has learned of memory, both know
    for name in (*algorithms, "accelerated", "tight", "at-once"):
        assert largest_gap(two, one, name, name, ("theta", "exp_avg")) < 1e-6
    assert torch.equal(two["accelerated/scores"], one["accelerated/scores"])
    for name in algorithms:
        assert largest_gap(two, one, f"{name}-double", f"{name}-double", ("theta", "exp_avg", "metrics")) < 1e-13


@pytest.mark.processes
def test_a_divided_base_computes_the_same(tmp_path: Path) -> None:
    names = ["grpo-fsdp2", "ppo-zero3", "accelerated-zero3"]
    two, one = on_two(tmp_path / "two.safetensors", names), run(["grpo", "ppo", "accelerated"])
    for name in names:
        assert largest_gap(two, one, name, name.partition("-")[0], ("theta", "exp_avg")) < 1e-6


def test_an_error_of_another_process_is_raised_here_too() -> None:
    said = b"\1" + json.dumps(["RewardError", "grading failed"]).encode()
    with pytest.raises(RewardError, match="grading failed") as caught:
        Recording(0, 2, others=(said,)).agreed(lambda: b"fine")
    assert caught.value.everywhere


def test_a_pass_that_breaks_off_among_divided_weights_ends_the_run() -> None:
    """The others wait for its part of the weights: there is no second try, and no going on."""
    lockstep = Lockstep(Processes(), lambda train: None)
    with torch.no_grad(), lockstep.forward():
        pass
    lockstep.catch_up()  # all is well, also with what fails between two passes
    with pytest.raises(MemoryError), torch.no_grad(), lockstep.forward():
        raise MemoryError
    with pytest.raises(EngineError, match=r"process 0 .*max_tokens_in_flight"):
        lockstep.catch_up()


def test_what_cannot_be_divided_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, two = new_runtime(ALONE), Processes(0, 2)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-evolution\[deepspeed\]'"):
        runtime.share(two, "zero3")
    runtime.options = runtime.options.model_copy(update={"torch_compiler": "default"})
    with pytest.raises(ConfigError, match="torch_compiler compiles layers"):
        runtime.share(two, "fsdp2")
    runtime.options = runtime.options.model_copy(update={"torch_compiler": None, "use_vllm": True})
    with pytest.raises(ConfigError, match=r"use_vllm.*vLLM"):
        runtime.share(two, "fsdp2")
    runtime.options = runtime.options.model_copy(update={"use_vllm": False})
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
    runtime.base.model.register_parameter("packed", weight)
    with pytest.raises(ConfigError, match="found packed quantised"):
        runtime.share(two, "fsdp2")
    assert runtime.processes == ALONE
