"""What all policy-gradient algorithms share: whose log-probs count as old, the reference's, and the metrics."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agilerl.data import LossInputs, RolloutBatch
from agilerl.functional import MetricReducer, clip_regions, zero_variance_groups

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = ["behaviour_logprobs", "is_off_policy", "record_batch", "record_policy", "reference_logprobs"]


def is_off_policy(agent: "LLMAlgorithm", rows: int) -> bool:
    """Return whether a batch of this many rows takes more than one optimizer step, so that rho leaves 1."""
    return agent.config.update_epochs > 1 or rows > agent.window_rows


def behaviour_logprobs(agent: "LLMAlgorithm", batch: RolloutBatch) -> tuple[Tensor, Tensor | None]:
    """Return old log-probs ``[B, L]`` and, where a foreign engine sampled, those that it reported.

    Our own engine's log-probs are the policy's, so they serve as old ones without a second forward.
    """
    sampled = batch.sampling_logps
    if sampled is not None and agent.runtime.engine.exact:
        return sampled, None
    return _fixed(agent, agent.slot, batch), sampled


def reference_logprobs(agent: "LLMAlgorithm", batch: RolloutBatch) -> Tensor:
    """Return the reference policy's log-probs ``[B, L]``: its slot, or the base model with adapters off."""
    return _fixed(agent, agent.reference_slot, batch)


def _fixed(agent: "LLMAlgorithm", slot: int | None, batch: RolloutBatch) -> Tensor:
    temperature = getattr(agent.config, "temperature", 1.0)
    return agent.runtime.fixed_logprobs(slot, batch, temperature, agent.micro_rows(batch))


def record_batch(batch: RolloutBatch, metrics: MetricReducer) -> None:
    """Add what rewards and lengths say before any update."""
    returns = batch.returns
    lengths = batch.action_mask.sum(dim=1)
    metrics.add("reward", returns)
    metrics.add("reward_std", returns, reduction="std")
    metrics.add("frac_reward_zero_std", zero_variance_groups(returns, batch.groups))
    metrics.add("completions/mean_length", lengths)
    metrics.add("completions/min_length", lengths, reduction="min")
    metrics.add("completions/max_length", lengths, reduction="max")
    if batch.truncated is not None:
        metrics.add("completions/clipped_ratio", batch.truncated)


@torch.no_grad()
def record_policy(inputs: LossInputs, ratio: Tensor, low: float, high: float, metrics: MetricReducer) -> None:
    """Add the metrics of a policy update; ``low`` and ``high`` bound the ratio."""
    mask, advantages = inputs.mask, inputs.advantages
    below, above = clip_regions(ratio, advantages, 1 - low, high - 1)
    metrics.add("clip_ratio/low_mean", below, mask)
    metrics.add("clip_ratio/high_mean", above, mask)
    metrics.add("clip_ratio/region_mean", below | above, mask)
    for reduction in ("mean", "min", "max"):
        metrics.add(f"is_ratio/{reduction}", ratio, mask, reduction=reduction)
    metrics.add("advantages/mean", advantages, mask)
    metrics.add("advantages/std", advantages, mask, reduction="std")
    metrics.add("advantages/abs_mean", advantages.abs(), mask)
    if inputs.entropy is not None:
        metrics.add("entropy", inputs.entropy, mask)
    if inputs.sampling_logp is not None:
        gap = (inputs.old_logp - inputs.sampling_logp).abs()
        metrics.add("sampling/sampling_logp_difference/mean", gap, mask)
        metrics.add("sampling/sampling_logp_difference/max", gap, mask, reduction="max")
