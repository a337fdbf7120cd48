"""GRPO's relatives: CISPO, GSPO, MaxRL, RLOO and DPPO, their objectives, their credit, and what they fix."""

import math
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, DPPO, GRPO, GSPO, RLOO, MaxRL, PolicyLoss
from agilerl.data import LossInputs
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import GOLDEN, MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, cls: type[GRPO], **settings: Any) -> GRPO:
    return cls(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


# -- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "key", "settings"),
    [
        (CISPO, "cispo eps_high=5 token-mean", {}),
        (CISPO, "cispo eps_high=1.2 token-mean", {"clip_max": 1.2}),
        (CISPO, "cispo two-sided [.8,1.2] token-mean", {"clip_max": 1.2, "clip_min": 0.8}),
        (CISPO, "cispo two-sided [.8,1.2] token-mean", {"clip_coef": 0.2}),
        (CISPO, "cispo two-sided [.8,1.2] seq-mean", {"clip_coef": (0.8, 1.2), "loss_norm": "seq-mean-token-mean"}),
        (GSPO, "gspo eps 3e-4/4e-4 (loss_type grpo, sequence)", {}),
        (GSPO, "gspo eps .2 (sequence)", {"clip_coef": 0.2}),
        (GSPO, "gspo eps .2 (sequence)", {"clip_coef": (0.8, 1.2), "importance_sampling_level": "trajectory"}),
        (RLOO, "rloo A=loo eps .2", {}),
    ],
)
def test_objective_is_golden(runtime: Runtime, cls: type[GRPO], key: str, settings: dict) -> None:
    it = agent(runtime, cls, **settings)
    assert it.objective(inputs(it), MetricReducer()).item() == pytest.approx(GOLDEN[key], abs=2e-7)


@pytest.mark.parametrize(
    ("cls", "key", "settings"),
    [
        (CISPO, "grad d(cispo eps_high=5, token-mean)/dlogp (weight detached)", {}),
        (GSPO, "grad d(gspo eps .2)/dlogp", {"clip_coef": 0.2}),
    ],
)
def test_gradient_is_golden(runtime: Runtime, cls: type[GRPO], key: str, settings: dict) -> None:
    it = agent(runtime, cls, **settings)
    x = inputs(it)
    it.objective(x, MetricReducer()).backward()
    assert torch.allclose(x.logp.grad, torch.tensor(GOLDEN[key]), atol=2e-7)


@pytest.mark.parametrize(
    ("cls", "key"),
    [(CISPO, "adv_trl_eps1e-4"), (GSPO, "adv_trl_eps1e-4"), (DPPO, "adv_trl_eps1e-4"), (RLOO, "adv_rloo")],
)
def test_credit_is_golden(runtime: Runtime, cls: type[GRPO], key: str) -> None:
    expected = torch.where(MASK, torch.tensor(GOLDEN[key])[:, None], 0.0)
    assert torch.allclose(agent(runtime, cls).credit(batch()), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (CISPO, {"loss_type": "cispo"}, "CISPO fixes loss_type='cispo'"),
        (CISPO, {"dual_clip": 3.0}, r"CISPO .* GRPO\(dual_clip=3.0\)"),
        (CISPO, {"clip_coef": 0.2, "clip_max": 2.0}, r"clip_coef=0.2 .* weight, found clip_max"),
        (CISPO, {"clip_coef": (1.1, 1.2)}, "gives the ratio bounds"),
        (CISPO, {"group_size": 1}, "group_size=1 .*CISPO's"),
        (GSPO, {"loss_type": "grpo"}, "loss_type='gspo', found loss_type='grpo'"),
        (GSPO, {"loss_type": "gspo"}, "loss_type='gspo', found loss_type='gspo'"),
        (GSPO, {"importance_sampling_level": "token"}, r"ratio .* trajectory, found .*'token'"),
        (GSPO, {"importance_sampling_level": "turn"}, "pools the ratio over the trajectory"),
        (GSPO, {"group_size": 1}, "group_size=1 .*GSPO's"),
        (GSPO, {"clip_max": 3.0}, r"GSPO .* 'clip_max'"),
        (MaxRL, {"adv_norm": "mean_std"}, "MaxRL fixes adv_norm"),
        (MaxRL, {"adv_eps": 1e-6}, "MaxRL fixes adv_eps"),
        (MaxRL, {"loss_type": "gspo"}, "MaxRL fixes loss_type"),
        (RLOO, {"importance_sampling_level": "token"}, r"RLOO .* completion .* action.*'token'"),
        (RLOO, {"importance_sampling_level": "turn"}, r"RLOO .* completion"),
        (RLOO, {"adv_norm": "mean_std"}, "adv_norm='rloo', found adv_norm='mean_std'"),
        (RLOO, {"adv_eps": 1e-6}, "RLOO fixes adv_eps"),
        (RLOO, {"loss_type": "gspo"}, "RLOO fixes loss_type"),
        (RLOO, {"group_size": 1}, r"RLOO's .* 2, or REINFORCE"),
        *((DPPO, {n: 0.2}, f"DPPO .* {n}") for n in ("clip_coef", "dual_clip", "delta", "importance_sampling_level")),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, cls: type[GRPO], settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent(runtime, cls, **settings)


# -- CISPO: a clipped, detached importance weight on the log-probs, so no token loses its gradient ---------------------


# -- GSPO: GRPO with the ratio of whole completions, its own narrow bounds, and nothing else to choose -----------------


def test_it_is_grpo_with_the_objective_fixed(runtime: Runtime) -> None:
    settings = {"beta": 0.04, "clip_coef": (0.9, 1.1)}
    own, other = agent(runtime, GSPO, **settings), agent(runtime, GRPO, loss_type="gspo", **settings)
    assert torch.equal(own.objective(inputs(own), MetricReducer()), other.objective(inputs(other), MetricReducer()))
    assert own.config.clip_range == (0.9, 1.1)
    assert agent(runtime, GSPO).config.clip_range == (1 - 3e-4, 1 + 4e-4)


@pytest.mark.parametrize("preset", ["dapo", "dr_grpo"])
def test_presets_belong_to_grpo(runtime: Runtime, preset: str) -> None:
    with pytest.raises(ConfigError, match=rf"{preset}\(\).*GSPO"):
        getattr(GSPO, preset)(runtime=runtime, pad_token_id=PAD, max_output_tokens=8)


# -- MaxRL: the reward less the group's mean, divided by that mean -----------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Groups {1, 0} and {3, 1}: means 1/2 and 2; (1 - 1/2) / (1/2) = 1, (3 - 2) / 2 = 1/2.
        ([1.0, 0.0, 3.0, 1.0], [1.0, -1.0, 0.5, -0.5]),
        # A mean of 0 or less has no likelihood to raise; equal rewards teach nothing.
        ([-1.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_credit_is_divided_by_the_mean(runtime: Runtime, rewards: list[float], expected: list[float]) -> None:
    found = agent(runtime, MaxRL).credit(batch(rewards))
    assert torch.equal(found, torch.where(MASK, torch.tensor(expected)[:, None], 0.0))


def test_objective_is_that_of_grpo(runtime: Runtime) -> None:
    maxrl, grpo = agent(runtime, MaxRL, beta=0.04), agent(runtime, GRPO, beta=0.04, adv_norm="mean")
    losses = [it.objective(inputs(it), MetricReducer()).item() for it in (maxrl, grpo)]
    assert losses[0] == losses[1] != 0


# -- RLOO: one action a completion, the others of the prompt as its baseline, the KL in the reward ---------------------


def test_the_ratio_is_that_of_the_completions_probabilities(runtime: Runtime) -> None:
    """Row 1 of the fixture: lr = 0.1 + 0.4 - 0.2 = 0.3, A = -1, nothing clips a rising ratio there."""
    rloo = agent(runtime, RLOO)
    x = inputs(rloo)
    rloo.objective(x, MetricReducer()).backward()
    # -A exp(0.3) / 4 on each of the row's tokens; the mean of the log-ratios would give exp(0.1) / 3 of it.
    assert torch.allclose(x.logp.grad[1, :3], torch.full((3,), math.exp(0.3) / 4), atol=1e-6)


def test_the_kl_is_taken_off_the_reward(runtime: Runtime) -> None:
    rloo = agent(runtime, RLOO, beta=0.1)
    assert (rloo.config.kl_estimator, rloo.config.kl_placement) == ("k1", "reward")
    kl = torch.where(MASK, 0.5, 0.0)
    # r - 0.1 * 0.5 * length = 0.75, -0.15 and 0.3, 0.1; with two members A is the difference.
    expected = torch.tensor([0.9, -0.9, 0.2, -0.2])[:, None]
    assert torch.allclose(rloo.credit(batch(), kl), torch.where(MASK, expected, 0.0), atol=1e-6)
    x = replace(inputs(rloo), ref_logp=inputs(rloo).logp.detach() + 1.0)
    assert torch.equal(rloo.objective(x, MetricReducer()), rloo.objective(inputs(rloo), MetricReducer()))


# -- DPPO: a token stops where its probability has moved too far, whatever its ratio ---------------------------------

OLD, NEW, ADVANTAGES = [0.5, 0.01, 0.9, 0.6], [0.8, 0.1, 0.6, 0.3], [1.0, 1.0, -1.0, 1.0]
"""Up by 0.3 and wanted up; up tenfold, by 0.09; down by 0.3 and wanted down; down by 0.3, but wanted up."""


def moved() -> LossInputs:
    return LossInputs(
        logp=torch.tensor([NEW]).log().requires_grad_(),
        mask=torch.ones(1, 4, dtype=torch.bool),
        old_logp=torch.tensor([OLD]).log(),
        advantages=torch.tensor([ADVANTAGES]),
        denominator=1.0,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Total variation 0.3, 0.09, 0.3, 0.3: the first and the third stop, the last is on its way back. Weights are
        # 0.1 / 0.01 = 10 and 0.3 / 0.6 = 0.5.
        ({}, (-10 * log(0.1) - 0.5 * log(0.3)) / 4),
        ({"weight_max": 4.0}, (-4 * log(0.1) - 0.5 * log(0.3)) / 4),
        # 0.05 stops the second as well.
        ({"divergence_limit": 0.05}, -0.5 * log(0.3) / 4),
        # KL of "this token" against "any other", in nats: 0.223, 0.071, 0.226.
        ({"divergence": "kl"}, (-10 * log(0.1) - 0.5 * log(0.3)) / 4),
        (
            {"divergence": "kl", "divergence_limit": 0.3},
            (-1.6 * log(0.8) - 10 * log(0.1) + 0.6 / 0.9 * log(0.6) - 0.5 * log(0.3)) / 4,
        ),
    ],
)
def test_objective_of_dppo_is_golden(runtime: Runtime, settings: dict, expected: float) -> None:
    assert agent(runtime, DPPO, **settings).objective(moved(), MetricReducer()).item() == pytest.approx(
        expected, rel=1e-6
    )


def test_gradient_and_metrics_of_dppo_are_golden(runtime: Runtime) -> None:
    x, metrics = moved(), MetricReducer()
    agent(runtime, DPPO).objective(x, metrics).backward()
    # -weight * A / 4 tokens
    assert torch.allclose(x.logp.grad, torch.tensor([[0.0, -2.5, 0.0, -0.125]]), atol=1e-6)
    found = metrics.result()
    regions = [found[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region")]
    assert regions == [0.25, 0.25, 0.5]


def test_the_first_step_is_reinforce(runtime: Runtime) -> None:
    x = replace(moved(), old_logp=torch.tensor([NEW]).log())
    agent(runtime, DPPO).objective(x, MetricReducer()).backward()
    assert torch.allclose(x.logp.grad, -torch.tensor([ADVANTAGES]) / 4)


def test_a_custom_loss_may_name_it(runtime: Runtime) -> None:
    own = PolicyLoss(surrogate="dppo")
    loss, metrics = own(moved(), divergence_limit=0.05)
    assert loss.item() == pytest.approx(-0.5 * log(0.3) / 4)
    assert metrics["clip_ratio/region_mean"].tolist() == [[True, True, True, False]]
    for cls in (DPPO, GRPO):
        agent(runtime, cls, loss=own)
