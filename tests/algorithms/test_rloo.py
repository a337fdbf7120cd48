"""RLOO: one action a completion, the others of the prompt as its baseline, the KL in the reward."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, RLOO
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, make_agents
from tests.algorithms.test_grpo_golden import GOLDEN, MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, **settings: Any) -> RLOO:
    return RLOO(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


def test_objective_and_credit_are_golden(runtime: Runtime) -> None:
    rloo = agent(runtime)
    expected = torch.where(MASK, torch.tensor(GOLDEN["adv_rloo"])[:, None], 0.0)
    assert torch.allclose(rloo.credit(batch()), expected, atol=1e-6)
    assert rloo.objective(inputs(rloo), MetricReducer()).item() == pytest.approx(GOLDEN["rloo A=loo eps .2"], abs=2e-7)


def test_the_ratio_is_that_of_the_completions_probabilities(runtime: Runtime) -> None:
    """Row 1 of the fixture: lr = 0.1 + 0.4 - 0.2 = 0.3, A = -1, nothing clips a rising ratio there."""
    rloo = agent(runtime)
    x = inputs(rloo)
    rloo.objective(x, MetricReducer()).backward()
    # -A exp(0.3) / 4 on each of the row's tokens; the mean of the log-ratios would give exp(0.1) / 3 of it.
    assert torch.allclose(x.logp.grad[1, :3], torch.full((3,), math.exp(0.3) / 4), atol=1e-6)


def test_the_kl_is_taken_off_the_reward(runtime: Runtime) -> None:
    rloo = agent(runtime, beta=0.1)
    assert (rloo.config.kl_estimator, rloo.config.kl_placement) == ("k1", "reward")
    kl = torch.where(MASK, 0.5, 0.0)
    # r - 0.1 * 0.5 * length = 0.75, -0.15 and 0.3, 0.1; with two members A is the difference.
    expected = torch.tensor([0.9, -0.9, 0.2, -0.2])[:, None]
    assert torch.allclose(rloo.credit(batch(), kl), torch.where(MASK, expected, 0.0), atol=1e-6)
    x = replace(inputs(rloo), ref_logp=inputs(rloo).logp.detach() + 1.0)
    assert torch.equal(rloo.objective(x, MetricReducer()), rloo.objective(inputs(rloo), MetricReducer()))


def test_an_update_uses_the_reference(runtime: Runtime) -> None:
    credits = []
    for beta in (0.0, 0.5):
        (base,) = make_agents(1, beta=0.0, lr=1e-2)
        base.learn(batch_of(base))  # away from the reference
        rloo = RLOO(runtime=base.runtime, pad_token_id=PAD, beta=beta, max_output_tokens=9, batch_size=64, seed=5)
        rloo.runtime.store.load_adapter(rloo.slot, base.runtime.store.adapter(base.slot))
        credits.append(rloo.prepare(batch_of(rloo)).advantages)
    assert not torch.allclose(credits[0], credits[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_sampling_level": "token"}, r"RLOO .* completion .* action.*'token'"),
        ({"importance_sampling_level": "turn"}, r"RLOO .* completion"),
        ({"adv_norm": "mean_std"}, "adv_norm='rloo', found adv_norm='mean_std'"),
        ({"adv_eps": 1e-6}, "RLOO fixes adv_eps"),
        ({"loss_type": "gspo"}, "RLOO fixes loss_type"),
        ({"group_size": 1}, r"RLOO's .* 2, or REINFORCE"),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent(runtime, **settings)


def test_grpo_can_be_told_the_same_credit(runtime: Runtime) -> None:
    grpo = GRPO(runtime=runtime, pad_token_id=PAD, adv_norm="rloo", beta=0.0)
    assert torch.equal(grpo.credit(batch()), agent(runtime).credit(batch()))
