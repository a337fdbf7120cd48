"""The policy loss: importance ratios, KL to the reference, objectives per token, and their sum over a window.

Signs are those of a loss: lower is better.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from agilerl.functional.masks import fill_masked, masked_mean, masked_sum, ordered_sum, spread

# -- importance ratios, pooled over tokens, turns and trajectories; engine-mismatch weights ---------------------------


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
    number = int(units.max()) + 1 if units.numel() else 1
    # (rows, tokens, units). Without any action all turns are -1: one unit, which is empty.
    member = mask.unsqueeze(-1) & (units.unsqueeze(-1) == torch.arange(max(number, 1), device=units.device))
    pooled = ordered_sum(fill_masked(fill_masked(log_ratios, mask).unsqueeze(-1), member), 1)
    if reduction == "mean":
        pooled = pooled / member.sum(1).clamp(min=1)
    # At most one unit holds a token, so this sum has one term that is not 0.
    return fill_masked(spread(pooled, 1, units.shape[1]), member).sum(-1)


def mismatch_weights(
    old_logp: Tensor,
    sampling_logp: Tensor,
    mask: Tensor,
    mode: MismatchMode = "token_truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """Return the weights ``[B, L]`` that correct for a sampler whose log-probs differ from the trainer's; detached.

    With ``w = exp(old - sampling)`` per token, or ``exp(sum_t (old - sampling))`` for the ``seq_`` modes:
    ``truncate``: ``w`` clamped to [floor, cap]; ``mask``: ``w``, but 0 outside of [floor, cap]; ``off``: 1. Positions
    where ``mask`` is False get 1. The weights multiply the policy term only, before the KL term is added. Raises
    ValueError for an unknown mode, or unless 0 <= floor < cap. Source: Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (2025); the mask of a band: IcePop, arXiv 2510.18855.
    """
    if mode not in get_args(MismatchMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(MismatchMode))}, found {mode!r}")
    if not 0 <= floor < cap:
        raise ValueError(f"expected 0 <= floor < cap, found floor={floor}, cap={cap}")
    if mode == "off":
        return torch.ones_like(old_logp, requires_grad=False)
    difference = log_ratio(old_logp.detach(), sampling_logp, mask)
    unit, treatment = mode.split("_")
    weights = importance_ratio(
        pool_log_ratio(difference, mask, "trajectory" if unit == "seq" else "token", reduction="sum")
    )
    if treatment == "truncate":
        weights = weights.clamp(floor, cap)
    else:
        weights = weights.masked_fill((weights < floor) | (weights > cap), 0.0)
    return fill_masked(weights, mask, 1.0)


def off_policy_tokens(
    logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] | None = None,
    threshold: float | None = None,
) -> Tensor:
    """Return the tokens ``[B, L]`` bool that are too far from the policy that sampled them to be trained on.

    With ``r = logp - behaviour_logp`` in nats: tokens whose ratio ``exp(r)`` is outside of ``bounds``, and those with
    a negative advantage in rows whose mean ``-r`` exceeds ``threshold``. None leaves a rule out; False off the mask.
    Source: IcePop, arXiv 2510.18855 (bounds); DeepSeek-V3.2, arXiv 2512.02556, equation 9 (threshold).
    """
    ratios = log_ratio(logp.detach(), behaviour_logp, mask)
    stale = torch.zeros_like(mask)
    if bounds is not None:
        low, high = bounds
        weights = importance_ratio(ratios)
        stale = (weights < low) | (weights > high)
    if threshold is not None:
        drift = -masked_mean(ratios, mask, -1).unsqueeze(-1)
        stale = stale | ((drift > threshold) & (advantages < 0))
    return stale & mask


# -- KL to the reference: estimators, and where it enters the objective -----------------------------------------------


KLEstimator = Literal["k1", "k2", "k3", "k3+"]

_EXP_LIMIT = 60.0  # exp of more overflows fp32 once a loss multiplies it


def kl_estimate(
    logp: Tensor,
    ref_logp: Tensor,
    estimator: KLEstimator = "k3",
    clamp: float | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the per-token estimate ``[B, L]`` of KL(pi || ref) on tokens that pi has sampled.

    | estimator | value | gradient |
    |---|---|---|
    | k1 | ``pi - ref`` | 1: zero in expectation, so useless as a loss |
    | k2 | ``(pi - ref)^2 / 2`` | ``pi - ref`` |
    | k3 | ``exp(ref - pi) - (ref - pi) - 1`` | ``1 - exp(ref - pi)``; beyond ``ref - pi = 60``: 0 |
    | k3+ | as k3 | as k2, unbiased on policy |

    Log-probs are in nats; the reference carries no gradient. ``clamp`` bounds the estimate to +-clamp (no gradient
    beyond). Positions where ``mask`` is False give 0. Raises ValueError for an unknown estimator.
    Source: Schulman, "Approximating KL Divergence" (2020); k3+: Liu et al., arXiv 2510.01555.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"the KL estimator must be one of {', '.join(get_args(KLEstimator))}, found {estimator!r}")
    # ref - pi. Reversed, k3 has a gradient of exp(5) - 1 = 147 where pi - ref is 5 instead of 1 - exp(-5) = 0.993.
    difference = fill_masked(ref_logp.detach(), mask) - fill_masked(logp, mask)
    if estimator == "k1":
        kl = -difference
    elif estimator == "k2":
        kl = _k2(difference)
    elif estimator == "k3":
        kl = _k3(difference)
    else:
        # The bracket is 0 and has k2's gradient.
        quadratic = _k2(difference)
        kl = _k3(difference).detach() + (quadratic - quadratic.detach())
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    # Both terms of one cut difference: with the exponential alone cut, the gradient beyond the limit would be that of
    # the linear term, which points away from the reference.
    difference = difference.clamp(max=_EXP_LIMIT)
    # expm1, because exp(d) - 1 loses the digits of a small d, and k3 is about d^2 / 2 there.
    return torch.expm1(difference) - difference


def kl_shaped_advantages(advantages: Tensor, kl: Tensor, mask: Tensor, beta: float | Tensor) -> Tensor:
    """Return ``A_t + beta (mean_t kl - kl_t)`` ``[B, L]``, detached, 0 where ``mask`` is False.

    The mean is over the valid tokens of the row, so a row's total advantage does not change: tokens that move further
    from the reference than the row's average are credited less.
    """
    kl = fill_masked(kl.detach(), mask)
    centred = masked_mean(kl, mask, -1).unsqueeze(-1) - kl
    return fill_masked(fill_masked(advantages.detach(), mask) + beta * centred, mask)


def adaptive_kl_coefficient(beta: float, kl: float, target: float, *, horizon: float, samples: int) -> float:
    """Return the next ``beta``: ``beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)``.

    ``kl`` is the mean per-sequence KL of the last window in nats, ``horizon`` a number of samples. A KL that is not
    finite leaves beta as it is. Raises ValueError unless target and horizon are positive.
    Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"the KL target and horizon must be greater than 0, found {target} and {horizon}")
    error = kl / target - 1.0
    # Not >=, which would let NaN through.
    if not abs(error) < float("inf"):
        return beta
    return beta * (1.0 + min(max(error, -0.2), 0.2) * samples / horizon)


# -- objectives: a loss per token (or pooled unit) --------------------------------------------------------------------


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
    # Only A < 0 notices: for A > 0 the bounded term is the smaller one long before delta.
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * advantages, bounded * advantages)
    if dual_clip is not None:
        # For A < 0 the loss grows with rho: without a cap one token that became likely again can rule the step.
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
        # old log(old / p) + (1 - old) log((1 - old) / (1 - p))
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
    # torch.clamp takes two numbers or two tensors, not one of each.
    bounds = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in (low, high))
    return torch.clamp(x, *bounds)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    # In fp64 equal returns have a variance of 0; in fp32 it would be the rounding of their mean.
    x = fill_masked(x, mask).double()
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


# -- from a loss per token to one number, with a denominator that is fixed for the window -----------------------------


LossNorm = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"]

LOSS_NORM_ALIASES: Mapping[str, LossNorm] = {
    "micro_batch": "seq-mean-token-mean",
    "accumulation_window": "token-mean",
}
"""The name that AgileRL documents for an aggregation mode."""


def aggregate(loss: Tensor, mask: Tensor, mode: LossNorm, denominator: float | Tensor) -> Tensor:
    """Return ``sum_i row_i / denominator``: the part of the window's loss that these rows contribute.

    | mode | row_i | denominator (``normaliser``) | source |
    |---|---|---|---|
    | seq-mean-token-mean | mean over valid tokens | sequences | GRPO, arXiv 2402.03300 |
    | token-mean | sum over valid tokens | valid tokens | DAPO, arXiv 2503.14476 |
    | seq-mean-token-sum | sum over valid tokens | sequences | RLOO, arXiv 2402.14740 |
    | fixed-length | sum over valid tokens | sequences * max_length | Dr.GRPO, arXiv 2503.20783 |

    ``loss`` and ``mask`` are ``[B, L]``. The denominator counts the whole window, so the parts of any split into
    micro-batches add up to the same loss and gradient. It is a number, or ``[B]`` if the rows belong to agents with
    different windows. A denominator of 0 (a window without valid tokens) gives 0.
    """
    rows = aggregate_rows(loss, mask, mode)
    # A number becomes a tensor of the same type: both divide with the same arithmetic.
    limit = denominator.detach().to(rows) if isinstance(denominator, Tensor) else rows.new_tensor(denominator)
    return (rows / limit.masked_fill(limit == 0, 1.0)).sum()


def aggregate_rows(loss: Tensor, mask: Tensor, mode: LossNorm) -> Tensor:
    """Return each row's term ``[B]`` before the denominator; 0 for a row without a valid token."""
    _check_mode(mode)
    return masked_mean(loss, mask, -1) if mode == "seq-mean-token-mean" else masked_sum(loss, mask, -1)


def normaliser(mask: Tensor, mode: LossNorm, *, max_length: int | None = None) -> float:
    """Return the denominator that belongs to ``mode`` and to the mask ``[B, L]`` of a whole optimizer window.

    It is additive: the sum over micro-batches or ranks is the value of all their rows together. Rows without a valid
    token count as sequences. ``fixed-length`` needs ``max_length``, the longest completion that can be sampled, in
    tokens; without it ValueError is raised.
    """
    _check_mode(mode)
    if mode == "token-mean":
        return float(mask.sum())
    if mode != "fixed-length":
        return float(mask.shape[0])
    if max_length is None or max_length < 1:
        raise ValueError(f"fixed-length aggregation needs max_length of at least 1 token, found {max_length}")
    return float(mask.shape[0] * max_length)


def _check_mode(mode: str) -> None:
    if mode not in get_args(LossNorm):
        raise ValueError(f"loss_norm must be one of {', '.join(get_args(LossNorm))}, found {mode!r}")


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def router_balance_loss(logits: Sequence[Tensor], rows: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss ``[b]`` of each row: ``E sum_e f_e P_e``, E experts, no gradient through f.

    f_e is the mean number of times that a token of the row chooses expert e (``top_k`` in all), P_e its mean
    probability; means are over the row's tokens in all layers. It is ``top_k`` where all experts are used alike.
    ``logits``: each layer's ``[n, E]`` of n tokens; ``rows`` ``[b, n]``: 1 where a token is in a row, else 0. Source:
    arXiv 2101.03961, eq. 4 to 6, in the form for several experts a token of the transformers library.
    """
    # A token counts once in each layer.
    tokens = rows.sum(dim=1, keepdim=True) * len(logits)
    chosen, probability = rows.new_zeros(()), rows.new_zeros(())
    for layer in logits:
        # p and top are [n, E], top being 1 at the chosen experts; rows @ them are [b, E].
        p = layer.to(rows.dtype).softmax(dim=-1)
        top = torch.zeros_like(p).scatter_(1, p.detach().topk(top_k, dim=-1).indices, 1.0)
        chosen, probability = chosen + rows @ top, probability + rows @ p
    return logits[0].shape[-1] * (chosen / tokens * (probability / tokens)).sum(dim=-1)
