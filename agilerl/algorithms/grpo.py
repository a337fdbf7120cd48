"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and its variants."""

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.llm import LLMAlgorithm
from agilerl.algorithms.llm_config import RolloutLLMConfig
from agilerl.algorithms.policy import behaviour_logprobs, is_off_policy, record_policy, reference_logprobs
from agilerl.algorithms.update import Experience
from agilerl.data import LossInputs, RolloutBatch
from agilerl.functional import (
    LOSS_NORM_ALIASES,
    AdvantageNorm,
    KLEstimator,
    LossNorm,
    MetricReducer,
    PoolingLevel,
    aggregate,
    broadcast_rows,
    cispo,
    clipped_surrogate,
    fill_masked,
    group_advantages,
    importance_ratio,
    kl_estimate,
    kl_shaped_advantages,
    log_ratio,
    masked_whiten,
    mismatch_weights,
    nonzero_advantage_rows,
    normaliser,
    pool_log_ratio,
    turn_advantages,
)
from agilerl.hpo.parameters import Evolve

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(RolloutLLMConfig):
    """Hyperparameters of GRPO."""

    beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.001
    """Weight of the KL term; 0 skips the reference forward."""
    clip_coef: Annotated[float | tuple[float, float], Evolve(0.05, 0.5)] = 0.2
    """Bounds of the importance ratio: c means [1 - c, 1 + c], a pair gives both bounds of the ratio."""
    dual_clip: Annotated[float | None, Field(gt=1)] = None
    """Cap of the loss for negative advantages, as a multiple of them (arXiv 1912.09729)."""
    delta: Annotated[float | None, Field(gt=1)] = None
    """Upper bound of the unclipped ratio too (two-sided clipping, arXiv 2505.07291)."""
    clip_max: Annotated[float, Field(gt=0), Evolve(1.0, 10.0)] = 5.0
    """CISPO: cap of the detached importance weight (arXiv 2506.13585)."""
    clip_min: Annotated[float | None, Field(ge=0)] = None
    """CISPO: floor of the weight."""
    loss_type: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Objective; ``gspo`` is ``grpo`` with the ratio pooled over the trajectory (arXiv 2507.18071)."""
    loss_norm: Annotated[LossNorm, BeforeValidator(lambda name: LOSS_NORM_ALIASES.get(name, name))] = (
        "seq-mean-token-mean"
    )
    """How token losses become one number: GRPO's paper, ``token-mean`` (DAPO), or ``fixed-length`` (Dr. GRPO)."""
    adv_norm: AdvantageNorm = "mean_std"
    """What the group's mean-centred rewards are divided by."""
    adv_eps: Annotated[float, Field(gt=0)] = 1e-4
    """Added to the standard deviation."""
    adv_clip_range: Annotated[float | None, Field(gt=0)] = None
    """Advantages are clamped to plus and minus this."""
    whiten_advantages: bool = False
    """Give the advantages of all action tokens mean 0 and variance 1."""
    filter_zero_adv: bool = False
    """Leave out rows whose absolute advantage is at most ``adv_filter_eps``, normalisers included."""
    adv_filter_eps: Annotated[float, Field(ge=0)] = 0.0
    """Threshold of ``filter_zero_adv``."""
    importance_sampling_level: PoolingLevel | None = None
    """Unit over which log-ratios are averaged before clipping; None follows ``loss_type``."""
    advantage_granularity: Literal["auto", "trajectory", "turn"] = "auto"
    """Unit that is compared within a group; ``auto`` is ``turn`` where the ratio is pooled over turns."""
    turn_advantage_trajectory_fallback: bool = True
    """Turns that fewer than two members of the group played take the trajectory's advantage instead of 0."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of KL(policy || reference) (J. Schulman, "Approximating KL divergence"); k3+ has k2's gradient."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """Where ``beta`` times the KL goes."""
    use_kl_advantage_shaping: bool = False
    """Add beta (mean_t kl - kl_t) to the advantages, in place of the KL term of the loss."""
    use_separate_reference_adapter: bool = True
    """Let ``set_reference_policy`` move the reference to the current adapter; else it stays the base model."""
    vllm_importance_sampling_correction: bool = True
    """Weight tokens by exp(old - sampled) where a foreign engine sampled them."""
    vllm_importance_sampling_cap: Annotated[float, Field(gt=0)] = 2.0
    """Cap of that weight."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "seq_truncate", "seq_mask"] = (
        "token_truncate"
    )
    """What happens to weights above the cap, and whether a weight is a token's or a sequence's."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        low, high = self.clip_range
        if not 0 <= low < 1 < high:
            raise ValueError(
                f"clip_coef={self.clip_coef} gives the ratio bounds [{low:g}, {high:g}]; expected a number in (0, 1] or a "
                "pair (min, max) of ratios around 1"
            )
        if self.loss_type == "gspo" and self.importance_sampling_level not in (None, "trajectory"):
            raise ValueError(
                f"loss_type='gspo' pools the ratio over the trajectory, found importance_sampling_level="
                f"{self.importance_sampling_level!r}; leave it out, or use loss_type='grpo'"
            )
        if self.loss_norm == "fixed-length" and self.max_output_tokens is None:
            raise ValueError("loss_norm='fixed-length' divides by max_output_tokens, which is None; set it")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        c = self.clip_coef
        return c if isinstance(c, tuple) else (1 - c, 1 + c)

    @property
    def ratio_level(self) -> PoolingLevel:
        """Unit over which log-ratios are pooled."""
        return self.importance_sampling_level or ("trajectory" if self.loss_type == "gspo" else "token")

    @property
    def advantage_level(self) -> Literal["trajectory", "turn"]:
        """Unit that gets one advantage."""
        if self.advantage_granularity != "auto":
            return self.advantage_granularity
        return "turn" if self.ratio_level == "turn" else "trajectory"


class GRPO(LLMAlgorithm):
    """Policy gradient whose baseline is the mean reward of the other completions of the same prompt."""

    Config: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    config: GRPOConfig

    @classmethod
    def dr_grpo(cls, **arguments: Any) -> Self:
        """Dr. GRPO (arXiv 2503.20783): no division by the spread, every token weighs the same in every sequence."""
        return cls(**{"adv_norm": "mean_only", "loss_norm": "fixed-length", "beta": 0.0, **arguments})

    @classmethod
    def dapo(cls, **arguments: Any) -> Self:
        """DAPO's loss (arXiv 2503.14476): clip-higher, token mean over the window, no KL."""
        return cls(**{"clip_coef": (0.8, 1.28), "loss_norm": "token-mean", "beta": 0.0, **arguments})

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return advantages and the log-probs that the objective compares with."""
        c = self.config
        batch = batch.select(~batch.rewards.isnan().all(dim=1))  # a row without a grade teaches nothing
        sampled_kl = c.beta > 0 and (c.kl_placement != "loss" or c.use_kl_advantage_shaping)
        old: Tensor | None = None
        reported: Tensor | None = None
        if is_off_policy(self, len(batch)) or sampled_kl or not self.runtime.engine.exact:
            old, reported = behaviour_logprobs(self, batch)
        ref = reference_logprobs(self, batch) if c.beta > 0 else None
        kl = kl_estimate(old, ref, c.kl_estimator) if sampled_kl and old is not None and ref is not None else None
        advantages = self.credit(batch, kl)
        if c.filter_zero_adv:
            kept = nonzero_advantage_rows(advantages, batch.action_mask, c.adv_filter_eps)
            batch, advantages = batch.select(kept), advantages[kept]
            old, ref, reported = (x if x is None else x[kept] for x in (old, ref, reported))
        idle = ~nonzero_advantage_rows(advantages, batch.action_mask) if c.beta == 0 else None
        old = old if is_off_policy(self, len(batch)) else None
        return Experience(batch, advantages, old, ref, reported, idle=idle)

    def credit(self, batch: RolloutBatch, kl: Tensor | None = None) -> Tensor:
        """Return advantages ``[B, L]``, 0 off the action mask; ``kl`` ``[B, L]`` is the detached KL of each token."""
        c, mask = self.config, batch.action_mask
        rewards = batch.rewards
        if kl is not None and c.kl_placement == "reward":
            turns = [torch.where(batch.turn_ids == k, kl, 0.0).sum(dim=1) for k in range(rewards.shape[1])]
            rewards = rewards - c.beta * torch.stack(turns, dim=1)
        if c.advantage_level == "turn":
            advantages = turn_advantages(
                rewards,
                batch.groups,
                batch.turn_ids,
                norm=c.adv_norm,
                adv_eps=c.adv_eps,
                trajectory_fallback=c.turn_advantage_trajectory_fallback,
            )
        else:
            by_row = group_advantages(rewards.nansum(dim=1), batch.groups, norm=c.adv_norm, adv_eps=c.adv_eps)
            advantages = broadcast_rows(by_row, mask)
        if kl is not None and c.kl_placement == "advantage":
            advantages = fill_masked(advantages - c.beta * kl, mask)
        if kl is not None and c.use_kl_advantage_shaping:
            advantages = kl_shaped_advantages(advantages, kl, mask, c.beta)
        if c.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        return advantages if c.adv_clip_range is None else advantages.clamp(-c.adv_clip_range, c.adv_clip_range)

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Clipped (or CISPO's) surrogate per token, plus beta times the KL, aggregated by ``loss_norm``."""
        c, mask = self.config, inputs.mask
        ratios = log_ratio(inputs.logp, inputs.old_logp, mask)
        ratio = importance_ratio(pool_log_ratio(ratios, mask, c.ratio_level, turn_ids=inputs.turn_ids))
        low, high = c.clip_range
        if c.loss_type == "cispo":
            loss = cispo(ratio, inputs.advantages, inputs.logp, clip_max=c.clip_max, clip_min=c.clip_min)
            low, high = c.clip_min or 0.0, c.clip_max
        else:
            loss = clipped_surrogate(ratio, inputs.advantages, 1 - low, high - 1, dual_clip=c.dual_clip, delta=c.delta)
        if inputs.sampling_logp is not None and c.vllm_importance_sampling_correction:
            loss = loss * mismatch_weights(
                inputs.old_logp,
                inputs.sampling_logp,
                mask,
                c.vllm_importance_sampling_mode,
                cap=c.vllm_importance_sampling_cap,
            )
        metrics.add("policy_loss", loss, mask)
        if inputs.ref_logp is not None:
            kl = kl_estimate(inputs.logp, inputs.ref_logp, c.kl_estimator)
            metrics.add("kl", kl, mask)
            if c.kl_placement == "loss" and not c.use_kl_advantage_shaping:
                loss = loss + c.beta * kl
        record_policy(inputs, ratio, low, high, metrics)
        total = aggregate(loss, mask, c.loss_norm, inputs.denominator)
        metrics.add("loss", total, reduction="sum")
        return total

    def window_denominator(self, mask: Tensor) -> float:
        """Return what ``loss_norm`` divides by."""
        return float(normaliser(mask, self.config.loss_norm, max_length=self.config.max_output_tokens))
