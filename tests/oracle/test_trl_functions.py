"""Log-probs, entropies and group statistics against TRL's functions."""

import pytest
import torch

from agilerl.functional import (
    group_advantages,
    linear_logprobs,
    token_entropy,
    token_logprobs,
    top_entropy_mask,
)
from tests.oracle import trl_stubs
from tests.oracle.random_tensors import random_tensors

trl = trl_stubs.module("trainer.utils")
grpo_trainer = trl_stubs.module("trainer.grpo_trainer")


def random_logits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, and the tokens that are asked for."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 7, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    return hidden, weight, torch.randint(50, (3, 7), generator=generator)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_and_entropy(temperature: float) -> None:
    hidden, weight, ids = random_logits(0)
    leaf = hidden.clone().requires_grad_()
    logits = leaf @ weight.T
    expected = trl.selective_log_softmax(logits, ids, temperature=temperature)
    entropy = trl.entropy_from_logits(logits / temperature)
    slopes = torch.autograd.grad(expected.sum() + 0.3 * entropy.sum(), leaf)[0]

    leaf = hidden.clone().requires_grad_()
    logits = leaf @ weight.T
    plain, plain_entropy = token_logprobs(logits, ids, temperature), token_entropy(logits, temperature)
    gradient = torch.autograd.grad(plain.sum() + 0.3 * plain_entropy.sum(), leaf)[0]
    for mine, yours in ((plain, expected), (plain_entropy, entropy), (gradient, slopes)):
        torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-5)

    leaf = hidden.clone().requires_grad_()
    fused, fused_entropy = linear_logprobs(
        leaf.flatten(0, 1), weight, ids.flatten(), temperature=temperature, chunk_rows=16, entropy=True
    )
    assert fused_entropy is not None
    gradient = torch.autograd.grad(fused.sum() + 0.3 * fused_entropy.sum(), leaf)[0]
    for mine, yours in ((fused, expected.flatten()), (fused_entropy, entropy.flatten()), (gradient, slopes)):
        torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_group_statistics(seed: int) -> None:
    """TRL centres by group, and scales by the group's, the batch's or no standard deviation (ddof 1) plus 1e-4."""
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))
    groups = torch.arange(5).repeat_interleave(4)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    scales = {"mean_std": trl.nanstd(rewards, dim=1, keepdim=True), "batch_std": trl.nanstd(rewards)}
    for norm, scale in scales.items():
        expected = (centred / (scale + 1e-4)).flatten()
        torch.testing.assert_close(
            group_advantages(rewards.flatten(), groups, norm=norm), expected, rtol=1e-5, atol=1e-5
        )
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / 3
    rloo = group_advantages(rewards.flatten(), groups, norm="rloo")
    torch.testing.assert_close(rloo, (rewards - others).flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_top_entropy_tokens(share: float) -> None:
    x = random_tensors(0)
    stub = trl_stubs.trainer()
    expected = grpo_trainer.GRPOTrainer.get_high_entropy_mask(stub, x.entropy, x.mask, 1 - share) & x.mask
    threshold = torch.quantile(x.entropy[x.mask], 1 - share)
    assert torch.equal(top_entropy_mask(x.entropy, x.mask, threshold), expected)
    assert float(expected.sum() / x.mask.sum()) == pytest.approx(share, abs=0.03)
