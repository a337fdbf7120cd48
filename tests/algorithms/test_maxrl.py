"""MaxRL: the reward less the group's mean, divided by that mean, under GRPO's objective."""

from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, MaxRL
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, cls: type[GRPO] = MaxRL, **settings: Any) -> GRPO:
    return cls(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Groups {1, 0} and {3, 1}: means 1/2 and 2; (1 - 1/2) / (1/2) = 1, (3 - 2) / 2 = 1/2.
        ([1.0, 0.0, 3.0, 1.0], [1.0, -1.0, 0.5, -0.5]),
        # A mean of 0 or less has no likelihood to raise; equal rewards teach nothing.
        ([-1.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_credit_is_golden(runtime: Runtime, rewards: list[float], expected: list[float]) -> None:
    found = agent(runtime).credit(batch(rewards))
    assert torch.equal(found, torch.where(MASK, torch.tensor(expected)[:, None], 0.0))


def test_the_rarer_the_success_the_larger_the_step(runtime: Runtime) -> None:
    """One success among G: the mean is 1/G, so the advantage of the success is G - 1 and of the others -1."""
    data = batch([1.0, 0.0, 0.0, 0.0])
    object.__setattr__(data, "groups", torch.zeros(4, dtype=torch.int64))
    assert torch.equal(agent(runtime).credit(data)[:, 0], torch.tensor([3.0, -1.0, -1.0, -1.0]))


def test_objective_is_that_of_grpo(runtime: Runtime) -> None:
    maxrl, grpo = agent(runtime, beta=0.04), agent(runtime, GRPO, beta=0.04, adv_norm="mean")
    losses = [it.objective(inputs(it), MetricReducer()).item() for it in (maxrl, grpo)]
    assert losses[0] == losses[1] != 0


@pytest.mark.parametrize("name", ["adv_norm", "adv_eps", "loss_type"])
def test_what_it_fixes_is_no_setting(runtime: Runtime, name: str) -> None:
    with pytest.raises(ConfigError, match=f"MaxRL fixes {name}"):
        agent(runtime, **{name: "mean_std"})
