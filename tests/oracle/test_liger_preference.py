"""The menu of preference losses against Liger's, on summed log-probs: values and gradients."""

from typing import Any

import pytest
import torch

from agilerl.functional import PreferenceOptions, PreferenceScores, preference_loss, preference_metrics

liger = pytest.importorskip(
    "liger_kernel.chunked_loss.dpo_loss", reason="Liger is not installed; make setup installs it"
)

free = {
    name: getattr(pytest.importorskip(f"liger_kernel.chunked_loss.{name}_loss"), f"LigerFusedLinear{title}Function")
    for name, title in (("simpo", "SimPO"), ("cpo", "CPO"), ("orpo", "ORPO"))
}

PAIRS, BETA = 6, 0.3


def random_scores(seed: int) -> tuple[list[torch.Tensor], PreferenceScores]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected, ref_chosen, ref_rejected = (3 * torch.randn(4, PAIRS, generator=generator) - 8).unbind()
    leaves = [chosen.requires_grad_(), rejected.requires_grad_()]
    count = torch.full((PAIRS,), 5)
    return leaves, PreferenceScores(*leaves, ref_chosen, ref_rejected, count, count)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("sigmoid", {}, {}),
        ("hinge", {}, {}),
        ("nca_pair", {}, {}),
        ("sppo_hard", {}, {}),
        ("apo_zero", {}, {}),
        ("apo_down", {}, {}),
        ("discopop", {}, {}),
        ("discopop", {"discopop_tau": 0.5}, {"discopop_tau": 0.5}),
        ("robust", {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        ("exo_pair", {"label_smoothing": 0.01}, {"label_smoothing": 0.01}),
        ("exo_pair", {}, {"label_smoothing": 1e-3}),  # 0 counts as 1e-3 here, and is an error there
        # Without the running mean of rewards that the paper subtracts; ours subtracts one unless told otherwise.
        ("bco_pair", {"reward_baseline": 0.0}, {}),
    ],
)
def test_preference_losses(name: str, options: dict[str, Any], theirs: dict[str, Any], seed: int) -> None:
    leaves, scores = random_scores(seed)
    loss = preference_loss(scores, {name: 1.0}, BETA, pairs=PAIRS, options=PreferenceOptions(**options))
    gradients = torch.autograd.grad(loss, leaves)
    other, chosen, rejected = liger.LigerFusedLinearDPOFunction.preference_loss_fn(
        *leaves,
        torch.zeros(2 * PAIRS, 1),
        scores.ref_chosen,
        scores.ref_rejected,
        beta=BETA,
        loss_type=name,
        **theirs,
    )
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    for mine, yours in zip(gradients, torch.autograd.grad(other, leaves)):
        assert yours.abs().max() > 1e-4
        torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chosen, BETA * scores.chosen)
    torch.testing.assert_close(rejected, BETA * scores.rejected)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("simpo", {}, {}),
        ("simpo", {"simpo_gamma": 1.5, "label_smoothing": 0.1}, {"gamma": 1.5, "label_smoothing": 0.1}),
        ("cpo", {}, {}),
        ("cpo", {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        ("orpo", {}, {}),
    ],
)
def test_losses_without_a_reference(name: str, options: dict[str, Any], theirs: dict[str, Any], seed: int) -> None:
    """Liger is given the mean over tokens where the loss is of means, and the sum for CPO."""
    leaves, scores = random_scores(seed)
    loss = preference_loss(scores, {name: 1.0}, BETA, pairs=PAIRS, options=PreferenceOptions(**options))
    gradients = torch.autograd.grad(loss, leaves)
    inputs = leaves if name == "cpo" else [leaf / 5 for leaf in leaves]
    target = torch.zeros(2 * PAIRS, 1)
    other, chosen, *_ = free[name].preference_loss_fn(*inputs, target, beta=BETA, **theirs)
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    for mine, yours in zip(gradients, torch.autograd.grad(other, leaves)):
        assert yours.abs().max() > 1e-4
        torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-5)
    own = preference_metrics(scores, BETA, per_token=name != "cpo")["rewards/chosen"]
    torch.testing.assert_close(own, (chosen if name != "cpo" else chosen - BETA * scores.ref_chosen).detach())
