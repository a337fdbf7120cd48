"""What a loss function sees: one agent's micro-batch, aligned token by token."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["LossInputs"]


@dataclass(frozen=True)
class LossInputs:
    """Tensors of b rows and L token positions; only ``logp``, ``entropy`` and ``values`` carry gradient."""

    logp: Tensor
    """[b, L] log-probs of the current policy, 0 where ``mask`` is False."""
    mask: Tensor
    """[b, L] bool, True on action tokens."""
    old_logp: Tensor
    """[b, L] log-probs of the policy that sampled; ``logp`` itself, detached, when the update is on-policy."""
    advantages: Tensor
    """[b, L] advantage of each token, detached."""
    denominator: float
    """What the summed loss is divided by: fixed for the whole optimizer window, all its micro-batches together."""
    ref_logp: Tensor | None = None
    """[b, L] log-probs of the reference policy; None when nothing needs them."""
    sampling_logp: Tensor | None = None
    """[b, L] log-probs that a foreign sampler reported; None when the sampler is our own."""
    entropy: Tensor | None = None
    """[b, L] entropy of the policy's next-token distribution, in nats."""
    turn_ids: Tensor | None = None
    """[b, L] turn of each action token, -1 elsewhere."""
    values: Tensor | None = None
    """[b, L] the critic's values, with gradient; None without a critic."""
    old_values: Tensor | None = None
    """[b, L] the critic's values before the update."""
    returns: Tensor | None = None
    """[b, L] what the critic should predict."""
