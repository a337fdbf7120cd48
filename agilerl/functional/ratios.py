"""Importance ratios: pooling of log-ratios over tokens, turns and trajectories, and engine-mismatch weights."""

from typing import Literal

import torch
from torch import Tensor

from agilerl.functional.masks import fill_masked, ordered_sum, spread

PoolingLevel = Literal["token", "turn", "trajectory"]
MismatchMode = Literal["off", "token_truncate", "token_mask", "seq_truncate", "seq_mask"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond this are cut before exp, because infinity has NaN gradients. A ratio of e^20 is beyond every clip
bound, but for a negative advantage the plain surrogate does not clip from above (``dual_clip`` and ``delta`` do): there
the cut alone makes the gradient 0."""


def log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Return ``logp - old_logp`` ``[B, L]``, 0 where ``mask`` is False; the old log-probs carry no gradient."""
    return fill_masked(logp, mask) - fill_masked(old_logp.detach(), mask)


def importance_ratio(log_ratios: Tensor) -> Tensor:
    """Return ``rho = exp(log_ratio)``, with log-ratios cut to +-20 so that value and gradient stay finite."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def pool_log_ratio(
    log_ratios: Tensor,
    mask: Tensor,
    level: PoolingLevel,
    *,
    turn_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Pool log-ratios ``[B, L]`` over their unit and give the pooled value to each token of it; 0 elsewhere.

    ``token``: no pooling. ``trajectory`` with ``mean``: ``(1/|o|) sum_t lr_t``, the GSPO ratio (Zheng et al., arXiv
    2507.18071); with ``sum``: the ratio of the sequence probabilities (RLOO). ``turn``: the same over the tokens that
    share a value of ``turn_ids`` ``[B, L]`` (-1: not an action). Differentiable: each token of a unit receives the
    gradient of all of them. Raises ValueError for an unknown level or for turn pooling without ``turn_ids``.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', found {reduction!r}")
    if level == "token":
        return fill_masked(log_ratios, mask)
    if level == "trajectory":
        units = torch.zeros_like(mask, dtype=torch.int64)
    elif level == "turn":
        if turn_ids is None:
            raise ValueError(
                "turn-level pooling needs turn_ids [B, L]; pass them, or pool at token or trajectory level"
            )
        units = turn_ids
    else:
        raise ValueError(f"level must be 'token', 'turn' or 'trajectory', found {level!r}")
    return _pool_units(log_ratios, mask, units, reduction)


def _pool_units(log_ratios: Tensor, mask: Tensor, units: Tensor, reduction: str) -> Tensor:
    number = int(units.max()) + 1 if units.numel() else 1
    member = mask.unsqueeze(-1) & (units.unsqueeze(-1) == torch.arange(max(number, 1), device=units.device))
    pooled = ordered_sum(fill_masked(fill_masked(log_ratios, mask).unsqueeze(-1), member), 1)
    if reduction == "mean":
        pooled = pooled / member.sum(1).clamp(min=1)
    # At most one unit holds a token, so this sum has one term that is not 0.
    return fill_masked(spread(pooled, 1, units.shape[1]), member).sum(-1)


def mismatch_weights(
    old_logp: Tensor, sampling_logp: Tensor, mask: Tensor, mode: MismatchMode = "token_truncate", cap: float = 2.0
) -> Tensor:
    """Return the weights ``[B, L]`` that correct for a sampler whose log-probs differ from the trainer's; detached.

    With ``w = exp(old - sampling)`` per token, or ``exp(sum_t (old - sampling))`` for the ``seq_`` modes:
    ``truncate``: ``min(w, cap)``; ``mask``: ``w``, but 0 where ``w > cap``; ``off``: 1. Positions where ``mask`` is
    False get 1. The weights multiply the policy term only, before the KL term is added. Raises ValueError for an
    unknown mode or a cap that is not positive. Source: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025).
    """
    if mode not in ("off", "token_truncate", "token_mask", "seq_truncate", "seq_mask"):
        raise ValueError(
            f"mode must be 'off', 'token_truncate', 'token_mask', 'seq_truncate' or 'seq_mask', found {mode!r}"
        )
    if cap <= 0:
        raise ValueError(f"cap must be greater than 0, found {cap}")
    if mode == "off":
        return torch.ones_like(old_logp, requires_grad=False)
    difference = log_ratio(old_logp.detach(), sampling_logp, mask)
    unit, treatment = mode.split("_")
    weights = importance_ratio(
        pool_log_ratio(difference, mask, "trajectory" if unit == "seq" else "token", reduction="sum")
    )
    weights = weights.clamp(max=cap) if treatment == "truncate" else weights.masked_fill(weights > cap, 0.0)
    return fill_masked(weights, mask, 1.0)
