"""GSPO: GRPO with the ratio of whole completions, its own narrow bounds, and nothing else to choose."""

from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, GSPO
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import GOLDEN, MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, cls: type[GRPO] = GSPO, **settings: Any) -> GRPO:
    return cls(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("gspo eps 3e-4/4e-4 (loss_type grpo, sequence)", {}),
        ("gspo eps .2 (sequence)", {"clip_coef": 0.2}),
        ("gspo eps .2 (sequence)", {"clip_coef": (0.8, 1.2), "importance_sampling_level": "trajectory"}),
    ],
)
def test_objective_is_golden(runtime: Runtime, key: str, settings: dict) -> None:
    gspo = agent(runtime, **settings)
    assert gspo.objective(inputs(gspo), MetricReducer()).item() == pytest.approx(GOLDEN[key], abs=2e-7)


def test_gradient_is_golden(runtime: Runtime) -> None:
    gspo = agent(runtime, clip_coef=0.2)
    x = inputs(gspo)
    gspo.objective(x, MetricReducer()).backward()
    assert torch.allclose(x.logp.grad, torch.tensor(GOLDEN["grad d(gspo eps .2)/dlogp"]), atol=2e-7)


def test_credit_is_that_of_grpo(runtime: Runtime) -> None:
    expected = torch.where(MASK, torch.tensor(GOLDEN["adv_trl_eps1e-4"])[:, None], 0.0)
    assert torch.allclose(agent(runtime).credit(batch()), expected, atol=1e-6)
    assert torch.equal(agent(runtime).credit(batch()), agent(runtime, GRPO).credit(batch()))


def test_it_is_grpo_with_the_objective_fixed(runtime: Runtime) -> None:
    settings = {"beta": 0.04, "clip_coef": (0.9, 1.1)}
    own, other = agent(runtime, **settings), agent(runtime, GRPO, loss_type="gspo", **settings)
    assert torch.equal(own.objective(inputs(own), MetricReducer()), other.objective(inputs(other), MetricReducer()))
    assert own.config.clip_range == (0.9, 1.1)
    assert agent(runtime).config.clip_range == (1 - 3e-4, 1 + 4e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "grpo"}, "loss_type='gspo', found loss_type='grpo'"),
        ({"loss_type": "gspo"}, "loss_type='gspo', found loss_type='gspo'"),
        ({"importance_sampling_level": "token"}, r"ratio .* trajectory, found .*'token'"),
        ({"importance_sampling_level": "turn"}, "pools the ratio over the trajectory"),
        ({"group_size": 1}, "group_size=1 .*GSPO's"),
        ({"clip_max": 3.0}, r"GSPO .* 'clip_max'"),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent(runtime, **settings)


def test_a_fixed_setting_cannot_be_assigned(runtime: Runtime) -> None:
    gspo = agent(runtime)
    with pytest.raises(ConfigError, match=r"GSPO.*loss_type"):
        gspo.loss_type = "grpo"
    assert gspo.config.loss_type == "gspo"


@pytest.mark.parametrize("preset", ["dapo", "dr_grpo"])
def test_presets_belong_to_grpo(runtime: Runtime, preset: str) -> None:
    with pytest.raises(ConfigError, match=rf"{preset}\(\).*GSPO"):
        getattr(GSPO, preset)(runtime=runtime, pad_token_id=PAD, max_output_tokens=8)
