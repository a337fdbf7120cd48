"""KL to the reference policy: estimators, and the places where it enters the objective."""

from typing import Literal, get_args

import torch
from torch import Tensor

from agilerl.functional.masks import fill_masked, masked_mean

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
    | k3 | ``exp(ref - pi) - (ref - pi) - 1`` | ``1 - exp(ref - pi)`` |
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
        quadratic = _k2(difference)
        kl = _k3(difference).detach() + (quadratic - quadratic.detach())
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    return torch.expm1(difference.clamp(max=_EXP_LIMIT)) - difference


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
    if not abs(error) < float("inf"):
        return beta
    return beta * (1.0 + min(max(error, -0.2), 0.2) * samples / horizon)
