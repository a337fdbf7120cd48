"""Objectives: a loss per token (or per pooled unit), before aggregation. Signs are those of a loss: lower is better."""

from typing import Literal

import torch
from torch import Tensor

from agilerl.functional.masks import fill_masked, masked_mean

Divergence = Literal["tv", "kl"]


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    *,
    dual_clip: float | None = None,
    delta: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``-min(rho A, clip(rho, 1 - low, 1 + high) A)``, the loss of PPO, GRPO and (ratio pooled) GSPO and RLOO.

    Tensors are ``[B, L]`` or broadcast to it; ``low`` and ``high`` are numbers or ``[B, 1]``, one pair per row.
    ``delta`` (> 1 + high) also caps rho in the unclipped term: two-sided clipping, arXiv 2505.07291. ``dual_clip`` c
    (> 1) bounds the loss of a negative advantage by ``-c A``: arXiv 1912.09729. Positions where ``mask`` is False
    give 0. Sources: PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; clip-higher (DAPO), arXiv 2503.14476.
    """
    ratio, advantages = fill_masked(ratio, mask, 1.0), fill_masked(advantages.detach(), mask)
    bounded = _clip(ratio, 1.0 - low, 1.0 + high)
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * advantages, bounded * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo(
    ratio: Tensor,
    advantages: Tensor,
    logp: Tensor,
    clip_max: float | Tensor = 5.0,
    clip_min: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``-sg(clamp(rho, clip_min, clip_max)) A log pi``: REINFORCE with a clipped, detached importance weight.

    Bounds are absolute values of rho, numbers or ``[B, 1]``. No token loses its gradient. Source: MiniMax-M1, arXiv
    2506.13585.
    """
    weight = fill_masked(ratio.detach(), mask, 1.0)
    weight = _clip(weight, 0.0 if clip_min is None else clip_min, clip_max)
    return reinforce(logp, weight * fill_masked(advantages.detach(), mask), mask=mask)


def reinforce(logp: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return ``-A log pi`` ``[B, L]``, 0 where ``mask`` is False. Source: Williams (1992)."""
    return -fill_masked(advantages.detach(), mask) * fill_masked(logp, mask)


def clip_regions(ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return two bool ``[B, L]``: units whose gradient the lower and the upper clip bound removed."""
    return (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)


def dppo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    limit: float | Tensor = 0.2,
    divergence: Divergence = "tv",
    *,
    weight_max: float = 20.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``-M sg(min(rho, weight_max)) A log pi`` ``[B, L]``, M the complement of :func:`divergence_region`.

    The trust region bounds the change of the distribution, not the ratio of one token: a rare token may multiply its
    probability, a frequent one may not move far. Source: DPPO, arXiv 2602.04879 (its binary estimates).
    """
    logp, old = fill_masked(logp, mask), fill_masked(old_logp.detach(), mask)
    advantages = fill_masked(advantages.detach(), mask)
    weight = (logp.detach() - old).exp().clamp(max=weight_max)
    below, above = divergence_region(logp, old, advantages, limit, divergence)
    return reinforce(logp, torch.where(below | above, 0.0, weight) * advantages)


@torch.no_grad()
def divergence_region(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, limit: float | Tensor, divergence: Divergence = "tv"
) -> tuple[Tensor, Tensor]:
    """Return two bool ``[B, L]``: tokens whose probability DPPO stops from falling, and from rising, any further.

    A token is stopped if its update would lead further away from the old policy (up with A > 0, down with A < 0) and
    the two are further apart than ``limit``, measured on the two outcomes "this token" and "any other": total
    variation ``|p - p_old|``, or ``KL(old || new)`` in nats. Source: arXiv 2602.04879.
    """
    p, old = logp.exp(), old_logp.exp()
    if divergence == "tv":
        distance = (p - old).abs()
    else:
        # log1p keeps the rest of a distribution that is nearly certain of its token.
        rest_old, rest = torch.log1p(-old.clamp(max=_ALMOST_ONE)), torch.log1p(-p.clamp(max=_ALMOST_ONE))
        distance = old * (old_logp - logp) + (1 - old) * (rest_old - rest)
    far = distance > limit
    return far & (p < old) & (advantages < 0), far & (p > old) & (advantages > 0)


_ALMOST_ONE = 1 - 2**-24
"""The largest float32 below 1: the logarithm of what is left must stay finite."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.2, *, mask: Tensor | None = None
) -> Tensor:
    """Return ``0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`` per position.

    ``clip`` None: the plain squared error. Only ``values`` carries gradient. Source: PPO's reference implementation,
    baselines (Dhariwal et al., 2017).
    """
    values = fill_masked(values, mask)
    old, target = fill_masked(old_values.detach(), mask), fill_masked(returns.detach(), mask)
    error = (values - target).square()
    if clip is not None:
        error = torch.maximum(error, (_clip(values, old - clip, old + clip) - target).square())
    return 0.5 * error


def value_clip_region(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return a bool ``[B, L]``: positions where the clipped error is the larger one."""
    bounded = _clip(values, old_values - clip, old_values + clip)
    return (bounded - returns).square() > (values - returns).square()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return ``1 - Var(R - V) / Var(R)`` over all valid positions of a window; 0 where the returns do not vary."""
    total, left = (_variance(x, mask) for x in (returns.detach(), returns.detach() - values.detach()))
    return torch.where(total > 0, 1.0 - left / total.clamp(min=torch.finfo(total.dtype).tiny), torch.zeros_like(total))


def sft(logp: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the token cross-entropy ``-log pi`` ``[B, L]``, 0 where ``mask`` is False."""
    return -fill_masked(logp, mask)


def dft(logp: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return ``-sg(p) log p``: cross-entropy without its 1/p gradient weight. Source: DFT, arXiv 2508.05629."""
    logp = fill_masked(logp, mask)
    return -logp.detach().exp() * logp


def _clip(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    bounds = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in (low, high))
    return torch.clamp(x, *bounds)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    x = fill_masked(x, mask).double()
    return masked_mean((x - masked_mean(x, mask)).square(), mask)
