"""GRPO and its relatives against TRL's trainers: values, gradients and metrics of their own loss method."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, GSPO, RLOO, LLMAlgorithm
from agilerl.functional import MetricReducer
from tests.oracle import trl_stubs
from tests.oracle.random_tensors import MAX_LENGTH, Tensors, assert_equal, loss_inputs, ours, random_tensors

grpo_trainer = trl_stubs.module("trainer.grpo_trainer")
rloo_trainer = trl_stubs.module("trainer.rloo_trainer")

CASES: list[tuple[type[LLMAlgorithm], dict[str, Any], dict[str, Any]]] = [
    (GRPO, {"beta": 0.0}, {"loss_type": "grpo"}),
    (GRPO, {"beta": 0.04, "clip_coef": (0.8, 1.28)}, {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.28}),
    (GRPO, {"beta": 0.0, "delta": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    # TRL's bnpo and dapo differ in the denominator only: the tokens of a micro-batch, or of the whole batch. Ours is
    # always told the window's; here the batch is one window.
    (GRPO, {"beta": 0.04, "loss_norm": "token-mean"}, {"loss_type": "bnpo", "beta": 0.04}),
    (
        GRPO,
        {"beta": 0.0, "loss_norm": "token-mean", "clip_coef": (0.8, 1.28)},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    (
        GRPO,
        {"beta": 0.04, "loss_norm": "fixed-length"},
        {"loss_type": "dr_grpo", "beta": 0.04, "max_completion_length": MAX_LENGTH},
    ),
    # luspo weighs a completion by its length: at sequence level that is the sum over its tokens, a mean over rows.
    (
        GSPO,
        {"beta": 0.04, "clip_coef": 0.2, "loss_norm": "seq-mean-token-sum"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.04},
    ),
    (GSPO, {"beta": 0.04, "clip_coef": 0.2}, {"importance_sampling_level": "sequence", "beta": 0.04}),
    (
        GSPO,
        {"beta": 0.0},  # the paper's bounds are the default here
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    # epsilon_high of CISPO is an absolute cap (and falls back to 0.2 there); ours is called clip_max, 5 by default.
    (CISPO, {"beta": 0.04, "clip_max": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.04}),
    (CISPO, {"beta": 0.0}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    (
        GRPO,
        {"beta": 0.04, "off_policy_sequence_mask_threshold": 0.02},
        {"beta": 0.04, "off_policy_mask_threshold": 0.02},
    ),
    # TRL's entropy bonus is always a mean over tokens; ours is aggregated as the loss is, so this aggregation agrees.
    (
        GRPO,
        {"beta": 0.0, "entropy_coef": 0.1, "loss_norm": "token-mean"},
        {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.1},
    ),
]


def theirs(x: Tensors, leaf: torch.Tensor, sampled: bool, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    stub = trl_stubs.grpo(leaf, x.entropy, use_vllm=sampled, **settings)
    stub.get_off_policy_mask = grpo_trainer.GRPOTrainer.get_off_policy_mask
    # TRL computes the weights while it makes the batch (mode token_truncate, which is our default; its own is
    # sequence_mask with a cap of 3) and the loss multiplies by them.
    weights = torch.exp((x.old - x.sampled) * x.mask).clamp(max=2.0)
    batch = trl_stubs.completions(
        x.mask,
        advantages=x.advantages,
        old_per_token_logps=x.old,
        ref_per_token_logps=x.ref,
        importance_sampling_ratio=weights,
        **({"sampling_per_token_logps": x.sampled} if sampled else {}),
    )
    loss = grpo_trainer.GRPOTrainer._compute_loss(stub, None, batch)
    return loss, {name: values[-1] for name, values in stub._metrics["eval"].items()}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("algorithm", "settings", "other_settings"), CASES)
def test_policy_losses(
    make: Callable[..., LLMAlgorithm],
    algorithm: type[LLMAlgorithm],
    settings: dict[str, Any],
    other_settings: dict[str, Any],
    corrected: bool,
    sampled: bool,
    seed: int,
) -> None:
    x = random_tensors(seed)
    if settings["beta"] > 0:
        settings = settings | {"use_bias_correction_kl": corrected}
    loss, gradient, metrics = ours(make(algorithm, **settings), x, sampled=sampled)
    leaf = x.leaf
    other, other_metrics = theirs(x, leaf, sampled, use_bias_correction_kl=corrected, **other_settings)
    assert_equal(loss, gradient, other, leaf, x.mask)
    shared = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    if algorithm is GSPO:
        # TRL counts clipped completions at this level, we count their tokens.
        shared = {"kl", "entropy"}
    if corrected:
        shared -= {"kl"}  # TRL's is what the loss has, ours the KL itself
    names = shared & set(other_metrics)
    assert "entropy" in names
    assert {n: metrics[n] for n in names} == pytest.approx({n: other_metrics[n] for n in names}, rel=1e-5, abs=1e-6)


def test_the_entropy_bonus_has_trls_gradient(make: Callable[..., LLMAlgorithm]) -> None:
    x = random_tensors(5)
    agent = make(GRPO, beta=0.0, entropy_coef=0.1, loss_norm="token-mean")
    x.entropy.requires_grad_()
    loss = agent.objective(loss_inputs(x, agent, x.leaf), MetricReducer())
    (gradient,) = torch.autograd.grad(loss, x.entropy)
    leaf = x.leaf
    other, _ = theirs(x, leaf, False, loss_type="dapo", _entropy_bonus_enabled=True, entropy_coef=0.1)
    (expected,) = torch.autograd.grad(other, x.entropy)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_rloo(make: Callable[..., LLMAlgorithm], seed: int, clip: float) -> None:
    """A completion is one action. Neither loss holds the KL, which both subtract from the reward."""
    x = random_tensors(seed, drift=0.2)
    loss, gradient, _ = ours(make(RLOO, beta=0.0, clip_coef=clip), x)
    leaf = x.leaf
    stub = trl_stubs.grpo(leaf, x.entropy, epsilon_low=clip, epsilon_high=clip)
    batch = trl_stubs.completions(x.mask, advantages=x.advantages, old_logps=x.old.sum(1))
    other = rloo_trainer.RLOOTrainer._compute_loss(stub, None, batch)
    assert_equal(loss, gradient, other, leaf, x.mask)
