"""The log-probs that a batch is compared with: of the policy at rollout, of a foreign engine, of the reference."""

from typing import NamedTuple

from torch import Tensor

from agilerl.algorithms.learner import Learner, PolicyLearner
from agilerl.algorithms.reference import ReferenceLogprobs
from agilerl.data import RolloutBatch
from agilerl.functional import adaptive_kl_coefficient, kl_estimate, masked_sum

__all__ = [
    "Sampled",
    "behaviour_entropy",
    "behaviour_logprobs",
    "is_off_policy",
    "reference_logprobs",
    "reported_logprobs",
    "sampled_as_trained",
    "sampled_logprobs",
]


def is_off_policy(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the ratio leaves 1: the batch takes more than one optimizer step, or has been learned from."""
    several = agent.config.update_epochs > 1 or len(batch) > agent.window_rows
    return several or (agent.learns_again and sampled_as_trained(agent, batch))


def sampled_as_trained(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the log-probs that came with a batch are what the trainer's own forward would have said."""
    runtime = agent.runtime
    return batch.sampling_logps is not None and runtime.engine.exact and runtime.base.decodes_exactly


def behaviour_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return old log-probs ``[B, L]``: those of the policy at rollout.

    Our own engine's log-probs are the policy's, so they serve as old ones without a second forward, unless it rounds in
    another way than the trainer does. Then, and where there are none, they are those of the policy before the update.
    """
    if batch.sampling_logps is not None and sampled_as_trained(agent, batch):
        return batch.sampling_logps
    return agent.runtime.fixed_logprobs(agent.slot, batch, _temperature(agent), agent.micro_rows(batch))


def reported_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor | None:
    """Return the log-probs ``[B, L]`` that a foreign engine reported of its samples; None where it is our own."""
    return None if agent.runtime.engine.exact else batch.sampling_logps


def reference_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the reference's log-probs ``[B, L]`` on the CPU: its slot's, or those of the base with adapters off.

    Completions that several agents, or one agent several times, drew for a prompt are computed once.
    """
    known, rows = ReferenceLogprobs.of(agent.runtime), agent.micro_rows(batch)
    return known.logprobs(batch, agent.reference_slot, agent.reference_key, rows, _temperature(agent))


class Sampled(NamedTuple):
    """The log-probs of a batch, each ``[B, L]``, that advantages and objective compare the policy's with."""

    old: Tensor | None
    """Of the policy at rollout; None where nothing needs them."""
    reported: Tensor | None
    """As a foreign engine reported them; None where it is our own."""
    ref: Tensor | None
    """Of the reference; None without a KL."""
    kl: Tensor | None
    """Detached KL of each token, where it is needed before the update."""


def sampled_logprobs(agent: PolicyLearner, batch: RolloutBatch) -> Sampled:
    """Compute what a batch is compared with, having adapted the weight of the KL to it."""
    c = agent.config
    old = behaviour_logprobs(agent, batch) if is_off_policy(agent, batch) or c.kl_when_sampled else None
    reported = reported_logprobs(agent, batch)
    ref = reference_logprobs(agent, batch) if c.beta > 0 else None
    kl = None
    if c.kl_when_sampled and old is not None and ref is not None:
        kl = _sampled_kl(agent, old, ref, batch.action_mask)
    return Sampled(old, reported, ref, kl)


def behaviour_entropy(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the entropy ``[B, L]`` in nats of the distributions that the policy draws from, 0 off the action mask."""
    return agent.runtime.fixed_entropy(agent.slot, batch, _temperature(agent), agent.micro_rows(batch)).cpu()


def _temperature(agent: Learner) -> float:
    return float(getattr(agent.config, "temperature", 1.0))


def _sampled_kl(agent: PolicyLearner, old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """Return the detached KL ``[B, L]`` of what was sampled, having adapted its weight to it; on the CPU."""
    c, before, base, mask = agent.config, old.cpu(), ref.cpu(), mask.cpu()
    sums = masked_sum(before - base, mask, -1)
    if c.kl_target is not None and len(sums):
        samples = min(len(sums), c.kl_horizon)  # more than a horizon at once could turn the weight negative
        mean = float(sums.double().mean())
        agent.kl_scale = adaptive_kl_coefficient(
            agent.kl_scale, mean, c.kl_target, horizon=float(c.kl_horizon), samples=samples
        )
    return kl_estimate(before, base, c.kl_estimator, c.kl_clamp_value, mask=mask)
