"""CISPO: a clipped, detached importance weight on the log-probs, so no token loses its gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import GOLDEN, MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, cls: type[GRPO] = CISPO, **settings: Any) -> GRPO:
    return cls(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("cispo eps_high=5 token-mean", {}),
        ("cispo eps_high=1.2 token-mean", {"clip_max": 1.2}),
        ("cispo two-sided [.8,1.2] token-mean", {"clip_max": 1.2, "clip_min": 0.8}),
        ("cispo two-sided [.8,1.2] token-mean", {"clip_coef": 0.2}),
        ("cispo two-sided [.8,1.2] seq-mean", {"clip_coef": (0.8, 1.2), "loss_norm": "seq-mean-token-mean"}),
    ],
)
def test_objective_is_golden(runtime: Runtime, key: str, settings: dict) -> None:
    cispo = agent(runtime, **settings)
    assert cispo.objective(inputs(cispo), MetricReducer()).item() == pytest.approx(GOLDEN[key], abs=2e-7)


def test_gradient_is_golden(runtime: Runtime) -> None:
    cispo = agent(runtime)
    x = inputs(cispo)
    cispo.objective(x, MetricReducer()).backward()
    expected = torch.tensor(GOLDEN["grad d(cispo eps_high=5, token-mean)/dlogp (weight detached)"])
    assert torch.allclose(x.logp.grad, expected, atol=2e-7)


def test_credit_is_that_of_grpo(runtime: Runtime) -> None:
    expected = torch.where(MASK, torch.tensor(GOLDEN["adv_trl_eps1e-4"])[:, None], 0.0)
    assert torch.allclose(agent(runtime).credit(batch()), expected, atol=1e-6)


def test_every_token_keeps_its_gradient_where_grpo_clips_it(runtime: Runtime) -> None:
    gradients = []
    for cls in (CISPO, GRPO):
        it = agent(runtime, cls, loss_norm="token-mean")
        x = inputs(it)
        it.objective(x, MetricReducer()).backward()
        gradients.append(x.logp.grad[MASK])
    assert (gradients[0] != 0).all()
    assert (gradients[1] == 0).any()


def test_on_policy_its_gradient_is_that_of_grpo(runtime: Runtime) -> None:
    gradients = []
    for cls in (CISPO, GRPO):
        it = agent(runtime, cls, loss_norm="token-mean")
        x = inputs(it)
        x = replace(x, old_logp=x.logp.detach())
        it.objective(x, MetricReducer()).backward()
        gradients.append(x.logp.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-8)
    assert torch.allclose(gradients[0], torch.where(MASK, -inputs(agent(runtime)).advantages / MASK.sum(), 0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, "CISPO fixes loss_type='cispo'"),
        (
            {"dual_clip": 3.0},
            r"CISPO .* GRPO\(dual_clip=3.0\)",
        ),
        ({"clip_coef": 0.2, "clip_max": 2.0}, r"clip_coef=0.2 .* weight, found clip_max"),
        ({"clip_coef": (1.1, 1.2)}, "gives the ratio bounds"),
        ({"group_size": 1}, "group_size=1 .*CISPO's"),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent(runtime, **settings)
