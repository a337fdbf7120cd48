"""GRPO and its relatives against Liger's loss on log-probs: values, gradients and metrics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, GSPO, LLMAlgorithm
from tests.oracle.random_tensors import MAX_LENGTH, assert_equal, ours, random_tensors

liger = pytest.importorskip(
    "liger_kernel.chunked_loss.grpo_loss", reason="Liger is not installed; make setup installs it"
)

# Liger's name of the loss decides the aggregation; its epsilons are distances from 1, ours of clip_coef are bounds.
CASES: list[tuple[type[LLMAlgorithm], dict[str, Any], dict[str, Any]]] = [
    (GRPO, {"beta": 0.0}, {"loss_type": "grpo", "beta": 0.0}),
    (GRPO, {"beta": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    (GRPO, {"beta": 0.04, "clip_coef": (0.9, 1.28)}, {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.28}),
    (GRPO, {"beta": 0.04, "delta": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    (GRPO, {"beta": 0.0, "loss_norm": "token-mean"}, {"loss_type": "bnpo", "beta": 0.0}),
    (GRPO, {"beta": 0.04, "loss_norm": "token-mean"}, {"loss_type": "bnpo"}),
    (
        GRPO,
        {"beta": 0.0, "loss_norm": "token-mean", "clip_coef": (0.8, 1.28)},
        {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28},
    ),
    (GRPO, {"beta": 0.04, "loss_norm": "fixed-length"}, {"loss_type": "dr_grpo", "max_completion_length": MAX_LENGTH}),
    # CISPO's bound is an absolute cap there, as our clip_max is; Liger's default of 0.2 would cap every weight.
    (CISPO, {"beta": 0.04, "clip_max": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    (CISPO, {"beta": 0.0}, {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.0}),
    (GSPO, {"beta": 0.04, "clip_coef": 0.2}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    # The default bounds of GSPO are the paper's here, GRPO's there.
    (
        GSPO,
        {"beta": 0.0},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "beta": 0.0,
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    (
        GSPO,
        {"beta": 0.04, "clip_coef": 0.1, "loss_norm": "token-mean"},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    ),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("algorithm", "settings", "theirs"), CASES)
def test_policy_losses(
    make: Callable[..., LLMAlgorithm],
    algorithm: type[LLMAlgorithm],
    settings: dict[str, Any],
    theirs: dict[str, Any],
    sampled: bool,
    seed: int,
) -> None:
    x = random_tensors(seed)
    # Liger's PyTorch reference has no corrected KL.
    uncorrected = {"use_bias_correction_kl": False} if settings["beta"] > 0 else {}
    agent = make(algorithm, **settings, **uncorrected)
    loss, gradient, metrics = ours(agent, x, sampled=sampled)
    leaf = x.leaf
    other, (*kl, clipped) = liger.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        leaf,
        x.mask,
        x.advantages,
        x.mask,
        ref_per_token_logps=x.ref,
        old_per_token_logps=x.old,
        # Liger leaves the correction to its caller: min(exp(old - sampled), 2), a weight for each token.
        vllm_is_ratio=torch.exp(x.old - x.sampled).clamp(max=2.0) if sampled else None,
        **theirs,
    )
    assert_equal(loss, gradient, other, leaf, x.mask)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped.item(), abs=1e-6)
    if kl:
        assert metrics["kl"] == pytest.approx(kl[0].item(), rel=1e-5)


def test_on_policy_old_logprobs_are_the_current_ones(make: Callable[..., LLMAlgorithm]) -> None:
    x = random_tensors(3)
    x.old = x.logp
    loss, gradient, _ = ours(make(GRPO, beta=0.0), x)
    leaf = x.leaf
    other, _ = liger.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        leaf, x.mask, x.advantages, x.mask, loss_type="grpo", beta=0.0
    )
    assert_equal(loss, gradient, other, leaf, x.mask)


@pytest.mark.parametrize("clips", [CASES[1], CASES[3], CASES[8], CASES[11], CASES[12]])
def test_the_random_tensors_reach_the_bounds(make: Callable[..., LLMAlgorithm], clips: Any) -> None:
    algorithm, settings, _ = clips
    shares = [ours(make(algorithm, **settings), random_tensors(seed))[2]["clip_ratio/region_mean"] for seed in range(3)]
    assert 0 < max(shares) < 1
