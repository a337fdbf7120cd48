"""The objective of all policy gradients: a surrogate for each token, the KL, the entropy, and one number of them.

    loss_t = surrogate(ratio_t, A_t) * mismatch_t + kl_weight * KL_t - entropy_coef * H_t
    loss   = sum over rows of aggregate(loss_t) / denominator

What the terms are is in :class:`PolicyParts`, the mathematics of each in ``agilerl.functional``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from agilerl.algorithms.config import SurrogateConfig
from agilerl.algorithms.metrics import record_policy
from agilerl.data import LossInputs
from agilerl.errors import ConfigError
from agilerl.functional import (
    Divergence,
    KLEstimator,
    LossNorm,
    MetricReducer,
    MismatchMode,
    PoolingLevel,
    aggregate,
    cispo,
    clip_regions,
    clipped_surrogate,
    divergence_region,
    dppo,
    importance_ratio,
    kl_estimate,
    log_ratio,
    mismatch_weights,
    off_policy_tokens,
    pool_log_ratio,
    reinforce,
)

Surrogate = Literal["clipped", "cispo", "dppo", "reinforce"]


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """The parts of a policy objective; each is a name, or a user's function in its place."""

    ratio: PoolingLevel | Callable[[LossInputs], Tensor]
    """Unit over which log-ratios are pooled."""
    surrogate: Surrogate | Callable[[Tensor, Tensor, Tensor], Tensor]
    aggregation: LossNorm | Callable[[Tensor, Tensor, float], Tensor]
    """How token losses become one number."""
    bounds: tuple[float, float] = (0.8, 1.2)
    """Lower and upper bound of the ratio (clipped), or of the detached weight (cispo)."""
    divergence: Divergence = "tv"
    """How dppo measures how far a token's probability has moved, and the limit."""
    divergence_limit: float = 0.2
    weight_max: float = 20.0
    """Cap of dppo's detached weight."""
    pooling: Literal["mean", "sum"] = "mean"
    """How a unit's log-ratios are pooled."""
    dual_clip: float | None = None
    delta: float | None = None
    kl: KLEstimator | Callable[[Tensor, Tensor], Tensor] | None = None
    """Estimator of the KL; None: none, not even as a metric."""
    kl_weight: float | None = None
    """Weight of the KL in the loss; None: it is measured only."""
    kl_clamp: float | None = None
    """Cap of a token's KL, in nats; None: no cap."""
    kl_corrected: bool = False
    """Whether the KL in the loss is weighted by the importance ratio; a user's estimate never is."""
    entropy_coef: float = 0.0
    mismatch: MismatchMode | None = None
    """How tokens sampled by another engine are weighted; None: not at all."""
    mismatch_cap: float = 2.0
    mismatch_floor: float = 0.0
    token_band: tuple[float, float] | None = None
    """Bounds of the ratio to the policy that sampled, outside of which a token is not trained on."""
    sequence_drift: float | None = None
    """Mean log-ratio, in nats, from which on a row's tokens with negative advantages are not trained on."""

    @classmethod
    def of(cls, config: SurrogateConfig, kl_coef: float, **parts: Any) -> Self:
        """Return the parts of a configuration; ``parts`` are those that it does not set, or that take precedence."""
        c = config
        usual = {
            "dual_clip": c.dual_clip,
            "delta": c.delta,
            # Without a beta there are no log-probs of the reference, and this is not used.
            "kl": c.kl_estimator,
            "kl_weight": kl_coef if c.kl_in_loss else None,
            "kl_clamp": c.kl_clamp_value,
            "kl_corrected": c.use_bias_correction_kl,
            "entropy_coef": c.entropy_coef,
            "mismatch": c.vllm_importance_sampling_mode if c.vllm_importance_sampling_correction else None,
            "mismatch_cap": c.vllm_importance_sampling_cap,
            "mismatch_floor": c.vllm_importance_sampling_clip_min or 0.0,
            "token_band": c.off_policy_token_mask_bounds,
            "sequence_drift": c.off_policy_sequence_mask_threshold,
        }
        return cls(**{**usual, **parts})


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy objective computed of each token, ``[b, L]``."""

    loss: Tensor
    """All terms together."""
    policy: Tensor
    """The surrogate alone, mismatch weights included."""
    ratio: Tensor
    regions: tuple[Tensor, Tensor] | None
    """Tokens that the lower and the upper bound stopped; None for a surrogate without bounds."""
    kl: Tensor | None
    off_policy: Tensor | None
    """Tokens that are too far from the policy that sampled them; None where nothing asks for it."""


def policy_terms(inputs: LossInputs, parts: PolicyParts) -> PolicyTerms:
    """Return the terms of the loss, token by token; raises ConfigError if a user's part returns another shape."""
    mask, advantages = inputs.mask, inputs.advantages
    ratio = _ratio(inputs, parts)
    low, high = parts.bounds
    regions: tuple[Tensor, Tensor] | None = None
    if parts.surrogate == "clipped":
        # The bounds are ratios, clipped_surrogate takes distances from 1.
        loss = clipped_surrogate(ratio, advantages, 1 - low, high - 1, dual_clip=parts.dual_clip, delta=parts.delta)
    elif parts.surrogate == "cispo":
        loss = cispo(ratio, advantages, inputs.logp, clip_max=high, clip_min=low)
    elif parts.surrogate == "dppo":
        trust = parts.divergence_limit, parts.divergence
        loss = dppo(inputs.logp, inputs.old_logp, advantages, *trust, weight_max=parts.weight_max)
        regions = divergence_region(inputs.logp, inputs.old_logp, advantages, *trust)
    elif parts.surrogate == "reinforce":
        loss = reinforce(inputs.logp, advantages)
    else:
        loss = _of_user(parts.surrogate(ratio, advantages, inputs.logp), mask, "surrogate")
    if parts.surrogate in ("clipped", "cispo"):
        regions = clip_regions(ratio.detach(), advantages, 1 - low, high - 1)
    off_policy = None
    # Before KL and entropy join: what follows weighs the policy term alone.
    if parts.token_band is not None or parts.sequence_drift is not None:
        behaviour = inputs.old_logp if inputs.sampling_logp is None else inputs.sampling_logp
        off_policy = off_policy_tokens(
            inputs.logp, behaviour, advantages, mask, bounds=parts.token_band, threshold=parts.sequence_drift
        )
        loss = loss.masked_fill(off_policy, 0.0)
    if inputs.sampling_logp is not None and parts.mismatch is not None:
        limits = parts.mismatch_cap, parts.mismatch_floor
        loss = loss * mismatch_weights(inputs.old_logp, inputs.sampling_logp, mask, parts.mismatch, *limits)
    policy, kl = loss, None
    if parts.kl is not None and inputs.ref_logp is not None:
        kl = _kl(inputs.logp, inputs.ref_logp, mask, parts.kl)
        if parts.kl_weight is not None:
            loss = loss + parts.kl_weight * _kl_term(kl, ratio, parts)
    if parts.entropy_coef > 0 and inputs.entropy is not None:
        loss = loss - parts.entropy_coef * inputs.entropy
    return PolicyTerms(loss, policy, ratio, regions, kl, off_policy)


def policy_objective(
    inputs: LossInputs, parts: PolicyParts, metrics: MetricReducer, extra: Tensor | None = None
) -> Tensor:
    """Return the scalar loss of a micro-batch, divided by ``inputs.denominator``, and add its metrics.

    ``extra`` ``[b, L]`` is a further term of the tokens' loss, such as a critic's error.
    """
    terms = policy_terms(inputs, parts)
    metrics.add("policy_loss", terms.policy, inputs.mask)
    if terms.kl is not None:
        metrics.add("kl", terms.kl, inputs.mask)
    if terms.off_policy is not None:
        metrics.add("off_policy_tokens", terms.off_policy, inputs.mask)
    record_policy(inputs, terms.ratio, terms.regions, metrics)
    total = aggregated(terms.loss if extra is None else terms.loss + extra, inputs, parts)
    metrics.add("loss", total, reduction="sum")
    return total


def aggregated(loss: Tensor, inputs: LossInputs, parts: PolicyParts) -> Tensor:
    """Return the scalar that the parts make of token losses ``[b, L]``."""
    how = parts.aggregation
    if isinstance(how, str):
        return aggregate(loss, inputs.mask, how, inputs.denominator)
    return how(loss, inputs.mask, inputs.denominator)


def _ratio(inputs: LossInputs, parts: PolicyParts) -> Tensor:
    if not isinstance(parts.ratio, str):
        return _of_user(parts.ratio(inputs), inputs.mask, "ratio")
    ratios = log_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    pooled = pool_log_ratio(ratios, inputs.mask, parts.ratio, turn_ids=inputs.turn_ids, reduction=parts.pooling)
    return importance_ratio(pooled)


def _kl(logp: Tensor, ref_logp: Tensor, mask: Tensor, how: KLEstimator | Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return kl_estimate(logp, ref_logp, how) if isinstance(how, str) else _of_user(how(logp, ref_logp), mask, "kl")


def _kl_term(kl: Tensor, ratio: Tensor, parts: PolicyParts) -> Tensor:
    """Return the KL ``[b, L]`` as the loss has it, capped and corrected; the metric is of the KL itself."""
    limit = parts.kl_clamp
    # Capped on both sides, because k1 may be negative.
    term = kl if limit is None else kl.clamp(-limit, limit)
    if not parts.kl_corrected or parts.kl not in get_args(KLEstimator):
        return term
    # k1 and k3 estimate the KL's value; the ratio's gradient is what theirs lacks: that of k3 times the ratio is that
    # of k2, weighted. The gradients of k2 and k3+ are complete and only have to be weighted.
    return term * (ratio if parts.kl in ("k1", "k3") else ratio.detach())


def _of_user(values: Tensor, mask: Tensor, part: str) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != mask.shape:
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ConfigError(f"PolicyLoss({part}=...) must return a tensor of shape {tuple(mask.shape)}, found {given}")
    # Off the mask a user's part may be anything, NaN included.
    return torch.where(mask, values, 0.0)
