"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), and what its relatives share with it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.llm import LLMAlgorithm
from agilerl.algorithms.llm_config import RolloutLLMConfig
from agilerl.algorithms.losses import LossFunction, check_loss
from agilerl.algorithms.policy import (
    GroupConfig,
    PolicyConfig,
    behaviour_entropy,
    behaviour_logprobs,
    check_turn_rewards,
    check_weight_bounds,
    is_off_policy,
    per_turn_sums,
    record_policy,
    reference_logprobs,
    reported_logprobs,
)
from agilerl.algorithms.state import AgentState
from agilerl.algorithms.surrogate import AdaptiveKL, SurrogateConfig
from agilerl.algorithms.update import Experience
from agilerl.arguments import checked
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import (
    MetricReducer,
    aggregate,
    broadcast_rows,
    broadcast_turns,
    cispo,
    clipped_surrogate,
    fill_masked,
    group_advantages,
    importance_ratio,
    informative_groups,
    kl_estimate,
    kl_shaped_advantages,
    log_ratio,
    masked_whiten,
    mismatch_weights,
    nonzero_advantage_rows,
    normaliser,
    overlong_penalty,
    pool_log_ratio,
    top_entropy_mask,
    turn_advantages,
)
from agilerl.hpo.parameters import Evolve, check_present, with_changes
from agilerl.runtime import Runtime
from agilerl.validation import nearest, validated

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of GRPO."""

    algorithm: ClassVar[str] = "GRPO"
    clip_max: Annotated[float, Field(gt=0), Evolve(1.0, 10.0)] = 5.0
    """``loss_type="cispo"``: cap of the detached importance weight (arXiv 2506.13585) where no ``clip_coef`` is set."""
    clip_min: Annotated[float | None, Field(ge=0)] = None
    """``loss_type="cispo"``: floor of the weight."""

    @model_validator(mode="after")
    def _weight_bounds_agree(self) -> Self:
        check_weight_bounds(self, self.clip_min, self.clip_max)
        unused = [name for name in ("dual_clip", "delta") if getattr(self, name) is not None]
        if self.loss_type == "cispo" and unused:
            raise ValueError(
                f"{' and '.join(unused)} bound the clipped surrogate, which loss_type='cispo' has not; leave that out"
            )
        return self

    @property
    def weight_range(self) -> tuple[float, float]:
        """Lower and upper bound of CISPO's detached importance weight; ``clip_coef``, where it is set, gives both."""
        if self.loss_type == "cispo" and "clip_coef" in self.model_fields_set:
            return self.clip_range
        return self.clip_min or 0.0, self.clip_max


class GRPO(AdaptiveKL, LLMAlgorithm):
    """Policy gradient whose baseline is the mean reward of the other completions of the same prompt.

    Its relatives (GSPO, CISPO, RLOO, REINFORCE) are subclasses with another ``Config`` or another ``credit``, so agents
    of all of them learn in one batch, and one can turn into another: the gene ``algorithm``.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    config: GRPOConfig

    # -- presets --------------------------------------------------------------------------------------------------

    @classmethod
    def dr_grpo(cls, **arguments: Any) -> Self:
        """Dr. GRPO (arXiv 2503.20783): no division by the spread, every token weighs the same in every sequence."""
        return cls._preset("dr_grpo", {"adv_norm": "mean_only", "loss_norm": "fixed-length", "beta": 0.0}, arguments)

    @classmethod
    def dapo(cls, **arguments: Any) -> Self:
        """DAPO (arXiv 2503.14476): clip-higher, token mean, no KL, dynamic sampling, overlong punishment.

        The punishment sets in a fifth before ``max_output_tokens`` (the paper: 4,096 of 20,480 tokens) unless
        ``overlong_cache_tokens`` says otherwise; None leaves it out.
        """
        config = arguments.get("config")
        limit = arguments.get("max_output_tokens", getattr(config, "max_output_tokens", None))
        if limit is None and "overlong_cache_tokens" not in arguments:
            raise ConfigError(
                "GRPO.dapo punishes completions that come near max_output_tokens, found None; set it, or give "
                "overlong_cache_tokens=None to do without"
            )
        values = {"clip_coef": (0.8, 1.28), "loss_norm": "token-mean", "beta": 0.0, "dynamic_sampling": True}
        if "overlong_cache_tokens" not in arguments:
            values["overlong_cache_tokens"] = max(1, int(limit or 1) // 5)
        return cls._preset("dapo", values, arguments)

    @classmethod
    def _preset(cls, name: str, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> Self:
        if cls.Config is not GRPOConfig:
            raise ConfigError(f"{name}() is a preset of GRPO, found {cls.__name__}; use GRPO.{name}(...)")
        return cls(**{**values, **arguments})

    # -- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return advantages and the log-probs that the objective compares with."""
        c = self.config
        graded = batch.rewards.isfinite().any(dim=1) & ~batch.rewards.isinf().any(dim=1)
        batch = batch.select(graded)  # a row without a grade teaches nothing
        old = None
        if is_off_policy(self, batch) or c.kl_when_sampled:
            old = behaviour_logprobs(self, batch)
        reported = reported_logprobs(self, batch)
        ref = reference_logprobs(self, batch) if c.beta > 0 else None
        kl = None
        if c.kl_when_sampled and old is not None and ref is not None:
            kl = self.sampled_kl(old, ref, batch.action_mask)
        advantages = self.credit(batch, kl)
        kept = self._kept_rows(batch, advantages)
        if not kept.all():
            batch = batch.select(kept)  # which may cut the padding
            width = batch.action_mask.shape[1]
            advantages = advantages[kept, :width]
            old, ref, reported = (x if x is None else x[kept, :width] for x in (old, ref, reported))
        if c.top_entropy_quantile < 1 and len(batch):
            advantages = self._on_top_entropy(batch, advantages)
        still = c.beta == 0 and c.entropy_coef == 0
        idle = ~nonzero_advantage_rows(advantages, batch.action_mask) if still else None
        old = old if is_off_policy(self, batch) else None
        metrics = {} if c.kl_target is None else {"kl_coef": self.kl_coef}
        return Experience(batch, advantages, old, ref, reported, idle=idle, metrics=metrics)

    def credit(self, batch: RolloutBatch, kl: Tensor | None = None) -> Tensor:
        """Return advantages ``[B, L]``, 0 off the action mask; ``kl`` ``[B, L]`` is the detached KL of each token."""
        c, mask = self.config, batch.action_mask
        heads, places = batch.heads()
        rewards = self._episode_rewards(batch, kl, heads, places)
        groups = batch.groups[heads]
        if c.advantage_level == "turn":
            check_turn_rewards(batch)
            by_turn = turn_advantages(
                rewards,
                groups,
                torch.arange(rewards.shape[1], device=rewards.device).expand(rewards.shape),
                norm=c.adv_norm,
                adv_eps=c.adv_eps,
                trajectory_fallback=c.turn_advantage_trajectory_fallback,
            )
            advantages = broadcast_turns(by_turn[places], batch.turn_ids)
            telling = broadcast_turns(informative_groups(by_turn, groups)[places], batch.turn_ids)
        else:
            by_episode = group_advantages(rewards.nansum(dim=1), groups, norm=c.adv_norm, adv_eps=c.adv_eps)
            advantages = broadcast_rows(by_episode[places], mask)
            telling = broadcast_rows(informative_groups(by_episode[:, None], groups)[places, 0], mask)
        return self.shaped_advantages(advantages, mask, kl, whiten=telling if c.whiten_advantages else None)

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Clipped (or CISPO's) surrogate per token, plus KL, minus entropy, aggregated by ``loss_norm``."""
        c, mask = self.config, inputs.mask
        ratios = log_ratio(inputs.logp, inputs.old_logp, mask)
        pooled = pool_log_ratio(ratios, mask, c.ratio_level, turn_ids=inputs.turn_ids, reduction=c.pooling)
        ratio = importance_ratio(pooled)
        if c.loss_type == "cispo":
            low, high = c.weight_range
            loss = cispo(ratio, inputs.advantages, inputs.logp, clip_max=high, clip_min=low)
        else:
            low, high = c.clip_range
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
            if c.kl_in_loss:
                limit = c.kl_clamp_value
                loss = loss + self.kl_coef * (kl if limit is None else kl.clamp(-limit, limit))
        if c.entropy_coef > 0 and inputs.entropy is not None:
            loss = loss - c.entropy_coef * inputs.entropy
        record_policy(inputs, ratio, low, high, metrics)
        total = aggregate(loss, mask, c.loss_norm, inputs.denominator)
        metrics.add("loss", total, reduction="sum")
        return total

    def window_denominator(self, mask: Tensor) -> float:
        """Return what ``loss_norm`` divides by."""
        return float(normaliser(mask, self.config.loss_norm, max_length=self.config.max_output_tokens))

    # -- parts of the credit --------------------------------------------------------------------------------------

    def shaped_rewards(self, batch: RolloutBatch, kl: Tensor | None) -> Tensor:
        """Return the turn rewards ``[B, K]`` less the punishment of length and, if placed here, less the KL."""
        c, rewards, turns = self.config, batch.rewards, batch.rewards.shape[1]
        if c.overlong_cache_tokens is not None and c.max_output_tokens is not None:
            played = int(batch.turn_ids.max()) + 1 if len(batch) else 1
            lengths = per_turn_sums(batch.action_mask.float(), batch.turn_ids, played)
            punishment = overlong_penalty(lengths, c.max_output_tokens, c.overlong_cache_tokens)
            for k in range(played):
                column = min(k, turns - 1)
                rewards = rewards.index_add(1, torch.tensor([column]), punishment[:, k : k + 1])
        if kl is not None and c.kl_placement == "reward":
            rewards = rewards - self.kl_coef * per_turn_sums(kl, batch.turn_ids, turns)
        return rewards

    def _episode_rewards(self, batch: RolloutBatch, kl: Tensor | None, heads: Tensor, places: Tensor) -> Tensor:
        """Return the shaped turn rewards of each episode ``[E, K]``: what its rows add or take off, put together."""
        shaped = self.shaped_rewards(batch, kl)
        if batch.episodes is None:
            return shaped
        change = (shaped - batch.rewards).nan_to_num(nan=0.0)
        return batch.rewards[heads] + torch.zeros_like(batch.rewards[heads]).index_add(0, places, change)

    def shaped_advantages(
        self, advantages: Tensor, mask: Tensor, kl: Tensor | None, *, whiten: Tensor | None = None
    ) -> Tensor:
        """Return advantages ``[B, L]`` with the KL where it is placed here, whitened and clamped as asked for.

        ``whiten`` ``[B, L]`` marks the tokens that are whitened; None: none.
        """
        c = self.config
        if kl is not None and c.kl_placement == "advantage":
            advantages = fill_masked(advantages - self.kl_coef * kl, mask)
        if kl is not None and c.use_kl_advantage_shaping:
            advantages = kl_shaped_advantages(advantages, kl, mask, self.kl_coef)
        if whiten is not None:
            # The mean of the others is no reason to move a group whose completions all earned the same.
            advantages = masked_whiten(advantages, mask, over=whiten)
        return advantages if c.adv_clip_range is None else advantages.clamp(-c.adv_clip_range, c.adv_clip_range)

    def _kept_rows(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        c = self.config
        kept = torch.ones(len(batch), dtype=torch.bool)
        if c.filter_zero_adv:
            kept &= nonzero_advantage_rows(advantages, batch.action_mask, c.adv_filter_eps)
        if c.mask_truncated and batch.truncated is not None:
            kept &= ~batch.truncated
        return kept

    def _on_top_entropy(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        """Leave advantages on the tokens of highest entropy only: elsewhere the policy term and its gradient vanish."""
        entropy = behaviour_entropy(self, batch)
        valid = entropy[batch.action_mask].double()
        if not len(valid):
            return advantages
        threshold = torch.quantile(valid, 1 - self.config.top_entropy_quantile)
        top = top_entropy_mask(entropy.double(), batch.action_mask, threshold)
        return fill_masked(advantages, top)

    # -- one family -----------------------------------------------------------------------------------------------

    @classmethod
    def family(cls) -> dict[str, "type[GRPO]"]:
        """Return GRPO and its relatives by name: what the gene ``algorithm`` chooses among."""
        members: list[type[GRPO]] = [GRPO, *GRPO.__subclasses__()]
        return {member.__name__: member for member in members}

    @checked
    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Change some hyperparameters together; ``algorithm`` names the relative that this agent becomes.

        It keeps everything that it is and has: slot, weights, moments, counters, and the hyperparameters that were set.
        Nothing changes when one of the values, or their combination, is invalid.
        """
        name = values.get("algorithm", self.config.algorithm)
        if name == self.config.algorithm:
            super().set_hyperparameters({key: value for key, value in values.items() if key != "algorithm"})
            return
        family = self.family()
        if name not in family:
            raise ConfigError(f"{type(self).__name__} cannot become {name!r}; {nearest(str(name), family)}")
        kept = with_changes(self.config.model_dump(exclude_unset=True), values)
        del kept["algorithm"]
        # All members have the same attributes, so an agent changes its class and every reference to it stays valid.
        before = self.config, type(self)
        self.config, self.__class__ = validated(family[name].Config, kept), family[name]  # type: ignore[assignment]
        try:
            check_present(self.genes, self.hyperparameters)
            if self.loss is not None:
                check_loss(self.loss, self)
        except ConfigError:
            self.config, self.__class__ = before
            raise

    @classmethod
    @checked
    def from_state(cls, state: AgentState, runtime: Runtime, loss: LossFunction | None = None) -> Self:
        """Build the agent of a state: of the relative that the state names, whichever class is asked."""
        member = cls.family().get(state.algorithm, cls)
        if member is cls:
            return super().from_state(state, runtime, loss)
        return member.from_state(state, runtime, loss)  # type: ignore[return-value]

    @classmethod
    def _merge(cls, config: AlgorithmConfig | None, keywords: Mapping[str, Any]) -> AlgorithmConfig:
        try:
            cls.Config.refuse_pinned(dict(keywords))  # type: ignore[attr-defined]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return super()._merge(config, keywords)
