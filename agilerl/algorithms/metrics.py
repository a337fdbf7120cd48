"""Metrics of an update: rewards and lengths before it; ratios, advantages and entropy while it runs."""

import torch
from torch import Tensor

from agilerl.data import LossInputs, RolloutBatch
from agilerl.functional import (
    MetricReducer,
    Reduction,
    zero_variance_groups,
)

_ADVANTAGES: dict[str, Reduction] = {"advantages/mean": "mean", "advantages/std": "std", "advantages/abs_mean": "mean"}


def record_batch(batch: RolloutBatch, metrics: MetricReducer) -> None:
    """Add the metrics of rewards and lengths before any update; a row without a grade has no reward, not one of 0."""
    heads, _ = batch.heads()  # an episode of several rows has one return
    rewards, groups, graded = batch.rewards[heads], batch.groups[heads], batch.graded[heads]
    returns = rewards.nansum(dim=1)[graded]
    lengths = batch.action_mask.sum(dim=1)
    metrics.add("reward", returns)
    metrics.add("reward_std", returns, reduction="std")
    metrics.add("frac_reward_zero_std", zero_variance_groups(returns, groups[graded]))
    if not graded.all():
        metrics.add("completions/ungraded", ~graded)
    metrics.add("completions/mean_length", lengths)
    metrics.add("completions/min_length", lengths, reduction="min")
    metrics.add("completions/max_length", lengths, reduction="max")
    if batch.truncated is not None:
        metrics.add("completions/clipped_ratio", batch.truncated)


def record_idle(tokens: int, metrics: MetricReducer) -> None:
    """Count action tokens that were skipped because their advantages, and so all of these metrics, are 0."""
    if tokens:
        # Else these would be means over the rows that were computed.
        zeros = torch.zeros(tokens)
        for name in ("policy_loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            metrics.add(name, zeros)
        for name, reduction in _ADVANTAGES.items():
            metrics.add(name, zeros, reduction=reduction)


@torch.no_grad()
def record_policy(
    inputs: LossInputs, ratio: Tensor, regions: tuple[Tensor, Tensor] | None, metrics: MetricReducer
) -> None:
    """Add the metrics of a policy update; ``regions`` are the tokens that its lower and its upper bound stopped."""
    if regions is not None:
        below, above = regions
        metrics.add("clip_ratio/low_mean", below, inputs.mask)
        metrics.add("clip_ratio/high_mean", above, inputs.mask)
        metrics.add("clip_ratio/region_mean", below | above, inputs.mask)
    record_tokens(inputs, ratio, metrics)


@torch.no_grad()
def record_tokens(inputs: LossInputs, ratio: Tensor, metrics: MetricReducer) -> None:
    """Add the metrics of a policy update that no clip bound enters."""
    mask, advantages = inputs.mask, inputs.advantages
    for reduction in ("mean", "min", "max"):
        metrics.add(f"is_ratio/{reduction}", ratio, mask, reduction=reduction)
    for name, reduction in _ADVANTAGES.items():
        metrics.add(name, advantages.abs() if name.endswith("abs_mean") else advantages, mask, reduction=reduction)
    if inputs.entropy is not None:
        metrics.add("entropy", inputs.entropy, mask)
    if inputs.sampling_logp is not None:
        gap = (inputs.old_logp - inputs.sampling_logp).abs()
        metrics.add("sampling/sampling_logp_difference/mean", gap, mask)
        metrics.add("sampling/sampling_logp_difference/max", gap, mask, reduction="max")
