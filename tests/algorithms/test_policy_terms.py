"""What joins the policy term: entropy bonus, top-entropy tokens, a clamped KL, a KL weight that follows a target."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.data import MicroBatch
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, make_agents
from tests.algorithms.test_grpo_golden import MASK, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, **settings: Any) -> GRPO:
    return GRPO(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


# -- entropy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["seq-mean-token-mean", "token-mean"])
def test_the_entropy_is_subtracted_from_the_loss(runtime: Runtime, norm: str) -> None:
    entropy = torch.where(MASK, torch.arange(20.0).reshape(4, 5), 0.0).requires_grad_()
    losses = []
    for coefficient in (0.0, 0.1):
        it = agent(runtime, entropy_coef=coefficient, loss_norm=norm)
        losses.append(it.objective(replace(inputs(it), entropy=entropy), MetricReducer()))
    per_row = [sum(entropy.detach()[i, : int(MASK[i].sum())].tolist()) for i in range(4)]
    mean = (
        sum(total / int(MASK[i].sum()) for i, total in enumerate(per_row)) / 4
        if norm == "seq-mean-token-mean"
        else sum(per_row) / int(MASK.sum())
    )
    assert float((losses[0] - losses[1]).detach()) == pytest.approx(0.1 * mean, rel=1e-5)
    losses[1].backward()
    assert (entropy.grad[MASK] < 0).all()
    assert (entropy.grad[~MASK] == 0).all()


def test_the_bonus_makes_the_policy_less_certain() -> None:
    """All rewards are equal, so that nothing but the bonus moves the policy: rows are not skipped for that."""
    (it,) = make_agents(1, beta=0.0, lr=3e-2, batch_size=16, entropy_coef=0.1)
    entropies = []
    for _ in range(8):
        data = batch_of(it)
        data.rewards.fill_(1.0)
        entropies.append(it.learn(data)["entropy"])
    assert entropies[-1] > entropies[0] + 0.2


def test_the_bonus_accumulates_over_micro_batches() -> None:
    gradients = []
    for micro in (None, 3):
        (it,) = make_agents(1, beta=0.0, batch_size=16, entropy_coef=0.05, micro_batch_size_per_gpu=micro)
        it.learn(batch_of(it))
        gradients.append(it.runtime.store.exp_avg[it.slot].clone())
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_only_the_most_uncertain_tokens_keep_their_advantage(share: float) -> None:
    (it,) = make_agents(1, beta=0.0, top_entropy_quantile=share, adv_norm="mean_only")
    (whole,) = make_agents(1, beta=0.0, adv_norm="mean_only")
    data = batch_of(it)
    got, plain = it.prepare(data).advantages, whole.prepare(data).advantages
    with torch.no_grad():
        logits = it.runtime.base.model(data.ids).logits[:, :-1]
        logp = (logits / it.config.temperature).log_softmax(dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)  # adapters are at their start, so the base speaks for the agent
    ranked = entropy[data.action_mask].sort(descending=True).values
    number = len(ranked)
    # Linear interpolation between order statistics; every token at least at the threshold stays.
    keep = math.floor(share * (number - 1)) + 1
    expected = torch.where(data.action_mask & (entropy >= ranked[keep - 1] - 1e-5), plain, 0.0)
    assert torch.allclose(got, expected, atol=1e-7)
    assert it.window_denominator(data.action_mask) == whole.window_denominator(data.action_mask)


def test_rows_without_a_kept_token_are_idle() -> None:
    (it,) = make_agents(1, beta=0.0, top_entropy_quantile=0.0)
    idle = it.prepare(batch_of(it)).idle
    assert idle is not None
    assert int((~idle).sum()) <= 1
    assert it.learn(batch_of(it))["skipped_steps"] == 0


# -- KL --------------------------------------------------------------------------------------------------------------


def test_a_clamped_kl_counts_for_no_more(runtime: Runtime) -> None:
    x = inputs(agent(runtime, beta=0.1, kl_estimator="k1", use_bias_correction_kl=False))
    far = replace(x, ref_logp=torch.where(MASK, x.logp.detach() - 3.0, 0.0))
    plain, clamped = (
        agent(runtime, beta=0.1, kl_estimator="k1", use_bias_correction_kl=False),
        agent(runtime, beta=0.1, kl_estimator="k1", use_bias_correction_kl=False, kl_clamp_value=0.5),
    )
    reducer = MetricReducer()
    difference = plain.objective(far, MetricReducer()) - clamped.objective(far, reducer)
    assert float(difference.detach()) == pytest.approx(0.1 * (3.0 - 0.5), rel=1e-5)
    assert reducer.result()["kl"] == pytest.approx(3.0)  # what is reported is the KL, not what counts
    assert torch.equal(plain.objective(x, MetricReducer()), clamped.objective(x, MetricReducer()))


def test_the_kl_weight_follows_its_target() -> None:
    """At the start the KL is 0: error -1, clipped to -0.2, 16 samples of a horizon of 64: factor 1 - 0.2 / 4."""
    (it,) = make_agents(1, beta=0.01, batch_size=16, kl_target=1e-4, kl_horizon=64, lr=3e-2)
    assert it.kl_coef == 0.01
    metrics = it.learn(batch_of(it))
    assert it.kl_scale == pytest.approx(0.95)
    assert metrics["kl_coef"] == pytest.approx(0.0095)
    for _ in range(3):
        data = batch_of(it)
        kl = fixed_logprobs(it.runtime, it.slot, data, it.temperature, MicroBatch(99)) - fixed_logprobs(
            it.runtime, None, data, it.temperature, MicroBatch(99)
        )
        error = min(max(float(kl.sum(dim=1).mean()) / 1e-4 - 1, -0.2), 0.2)
        expected = it.kl_scale * (1 + error / 4)
        it.learn(data)
        assert it.kl_scale == pytest.approx(expected)
    it.beta = 0.5  # a mutation changes where it starts, and the factor found so far stays
    assert it.kl_coef == pytest.approx(0.5 * it.kl_scale)


def test_the_adapted_weight_is_what_the_loss_uses(runtime: Runtime) -> None:
    it, x = agent(runtime, beta=0.1, kl_target=1.0), None
    x = inputs(it)
    before = it.objective(x, MetricReducer())
    bare = it.objective(replace(x, ref_logp=None), MetricReducer())
    it.kl_scale = 3.0
    after = it.objective(x, MetricReducer())
    assert torch.allclose(after - bare, 3 * (before - bare), atol=1e-7)


def test_more_samples_than_a_horizon_never_turn_the_weight_negative() -> None:
    (it,) = make_agents(1, beta=0.01, batch_size=16, kl_target=1.0, kl_horizon=1)
    it.learn(batch_of(it))
    assert it.kl_scale == pytest.approx(0.8)
