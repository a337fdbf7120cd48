"""Environments run in several threads; the task that they share was written for one."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.tools import ToolEnv
from tutorials.tools.calculator import calculator


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads change places all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_threads_leave_a_task_and_the_standard_output_in_order() -> None:
    # Such a task silences the standard output of the whole process for what it calls.
    task = ReasoningGymTask("chain_sum", exam_prompts=20)
    stdout = sys.stdout

    def played(seed: int) -> tuple[Any, ...]:
        env = ToolEnv(task, [calculator], parser="text", announce="none")
        observation = env.reset(seed=seed)
        return observation, env.step("5")

    seeds = [seed for seed in range(60) if seed % 3 < 2]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(played, seeds))
    silenced, sys.stdout = sys.stdout is not stdout, stdout
    assert not silenced
    assert found == [played(seed) for seed in seeds]
