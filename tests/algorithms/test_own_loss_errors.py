"""Own losses that go wrong: what is not finite skips a step, what is no loss is refused with a sentence."""

from typing import Any

import pytest
import torch

from agilerl.algorithms.custom_loss import PolicyLoss, loss_denominator
from agilerl.algorithms.update import learn_together
from agilerl.data import collate
from agilerl.errors import ConfigError
from tests.algorithms.conftest import batch_of, equal, make_agents, sample, weights
from tests.algorithms.off_policy import SETTINGS, tangents, trained
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    "bad",
    [
        lambda inputs: inputs.logp.sum() * float("nan"),
        lambda inputs: (inputs.logp.sum() - inputs.logp.sum()).sqrt(),  # 0, with an infinite gradient
        lambda inputs: inputs.logp.sum() + float("inf"),  # with a finite gradient
    ],
)
def test_a_loss_that_is_not_finite_skips_the_step_of_its_agent_only(bad: Any) -> None:
    agents = make_agents(2, **SETTINGS)
    batches = [collate(own, PAD) for own in sample(agents)]
    twin = make_agents(2, **SETTINGS)[1]
    twin.learn(batches[1])
    agents[0].loss = bad
    before = weights(agents[0])
    metrics = learn_together(agents, batches)
    assert equal(weights(agents[0]), before)
    assert metrics[0]["skipped_steps"] == 2  # two epochs
    assert equal(weights(agents[1]), weights(twin))
    agents[0].accumulate(batches[0])
    agents[0].optim_step()
    assert equal(weights(agents[0]), before)
    agents[0].loss = None
    agents[0].accumulate(batches[0])
    assert agents[0].optim_step()["skipped_steps"] == 3
    assert not equal(weights(agents[0]), before)


def test_a_tangent_that_is_not_finite_skips_the_step() -> None:
    agent, batch = trained()
    slopes = tangents(agent, batch)
    slopes[batch.action_mask.nonzero()[0].tolist()[0], batch.action_mask.nonzero()[0].tolist()[1]] = float("inf")
    agent.accumulate(batch)
    agent.accumulate_tangents(batch, slopes)
    before = weights(agent)
    assert agent.optim_step()["skipped_steps"] == 1
    assert equal(weights(agent), before)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda inputs: inputs.logp, r"tensor.*found shape \(16, \d+\).*agilerl\.functional\.aggregate"),
        (lambda inputs: inputs.logp.sum().item(), r"found -?[\d.]+ of type float; .*\.item"),
        (lambda inputs: None, r"found None .* NoneType"),
        (lambda inputs: inputs.logp.detach().sum(), r"found .* inputs.logp"),
        (lambda inputs: inputs.mask.sum(), "found one without gradient"),
        (lambda inputs: (inputs.logp.sum(), 3.0), "of type tuple"),
        (lambda inputs: (inputs.logp.sum(), {"loss": 1.0}), "metric named 'loss'"),
        (lambda inputs: (inputs.logp.sum(), {"reward": 1.0}), "metric named 'reward'"),
        (
            lambda inputs: (inputs.logp.sum(), {"x": "high"}),
            "metric 'x' .*, found 'high'",
        ),
        (lambda inputs: (inputs.logp.sum(), {"x": inputs.logp[:, :2]}), r"'x' .* found \(16, 2\)"),
        (PolicyLoss(surrogate=lambda ratio, advantages, logp: 1.0), r"tensor of shape .*, found a float"),
        (PolicyLoss(ratio=lambda inputs: inputs.logp[:, :1]), r"PolicyLoss\(ratio=...\) must return .* \(16, 1\)"),
    ],
)
def test_a_wrong_result_is_told_in_a_sentence(loss: Any, message: str) -> None:
    (agent,) = make_agents(1, **SETTINGS)
    batch = batch_of(agent)
    with pytest.raises(ConfigError, match=message):
        agent.accumulate(batch, loss)
    agent.loss = loss
    with pytest.raises(ConfigError, match=message):
        agent.learn(batch)
    agent.loss = None
    twin = agent.clone()
    agent.learn(batch)  # the failure left nothing behind
    twin.learn(batch)
    assert equal(weights(agent), weights(twin))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, r"for loss, found 3; .* LossInputs"),
        (lambda: None, "LossInputs; it takes none"),
        (lambda *, inputs: None, "as its first argument, by position"),
        (
            lambda inputs, clip_coeff: None,
            "'clip_coeff', .*'clip_coef'",
        ),
        (PolicyLoss(kl="k3"), r"PolicyLoss\(kl='k3'\) contradicts beta=0"),
    ],
)
def test_what_is_no_loss_function_is_refused_at_construction(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_agents(1, loss=loss, beta=0.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ratio": "sequence"}, "PolicyLoss: .* 'token', 'turn' or 'trajectory', or a function .* for ratio, found"),
        ({"surrogate": None}, "'clipped', 'cispo', 'dppo' or 'reinforce', or a function .* for surrogate, found None"),
        ({"kl": "k4"}, "'k1', 'k2', 'k3' or 'k3.', or a function .* or None for kl, found 'k4'"),
        ({"aggregation": "mean"}, "one of 'seq-mean-token-mean', 'token-mean'"),
    ],
)
def test_unknown_parts_are_refused(parts: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(**parts)


def test_a_kl_part_needs_the_reference_and_fixed_length_its_length() -> None:
    agent, batch = trained(beta=0.0)
    agent.max_output_tokens = None
    with pytest.raises(ConfigError, match=r"kl='k3'.*beta"):
        agent.accumulate(batch, PolicyLoss(kl="k3"))
    with pytest.raises(ConfigError, match=r"max_output_tokens.*None"):
        loss_denominator(agent, PolicyLoss(aggregation="fixed-length"), batch.action_mask)


@pytest.mark.parametrize(
    ("slopes", "found"),
    [(torch.zeros(16, 3), r"shape \(16, 3\)"), (torch.zeros(16), r"shape \(16,\)"), ([0.0], r"\[0\.0\] of type list")],
)
def test_tangents_of_another_shape_are_refused(slopes: Any, found: str) -> None:
    agent, batch = trained()
    with pytest.raises(ConfigError, match=f"found {found}"):
        agent.accumulate_tangents(batch, slopes)
