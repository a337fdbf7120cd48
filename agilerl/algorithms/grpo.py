"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), and what its relatives share with it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig, check_weight_bounds
from agilerl.algorithms.credit import group_credit, shaped_advantages, shaped_rewards
from agilerl.algorithms.custom_loss import LossFunction, check_loss
from agilerl.algorithms.learner import Experience
from agilerl.algorithms.logprobs import behaviour_entropy, is_off_policy, sampled_logprobs
from agilerl.algorithms.objective import PolicyParts, Surrogate, policy_objective
from agilerl.algorithms.state import AgentState
from agilerl.arguments import checked
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer, fill_masked, nonzero_advantage_rows, normaliser, top_entropy_mask
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


class GRPO(LLMAlgorithm):
    """Policy gradient whose baseline is the mean reward of the other completions of the same prompt.

    Its relatives (GSPO, CISPO, RLOO, MaxRL, DPPO, REINFORCE) are subclasses with another ``Config``, ``credit`` or
    ``policy_parts``, so agents of all of them learn in one batch, and one can turn into another: the gene
    ``algorithm``.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    config: GRPOConfig
    kl_scale: float = 1.0
    """Factor on ``beta`` that ``kl_target`` has found so far."""

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
        batch = batch.select(batch.graded)  # a row without a grade teaches nothing
        old, reported, ref, kl = sampled_logprobs(self, batch)
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
        advantages, telling = group_credit(self.config, batch, self.shaped_rewards(batch, kl))
        return self.shaped_advantages(
            advantages, batch.action_mask, kl, whiten=telling if self.config.whiten_advantages else None
        )

    @property
    def kl_coef(self) -> float:
        """Weight of the KL: ``beta``, adapted to ``kl_target`` where there is one."""
        return self.config.beta * self.kl_scale

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Clipped (or CISPO's) surrogate per token, plus KL, minus entropy, aggregated by ``loss_norm``."""
        return policy_objective(inputs, self.policy_parts(), metrics)

    def policy_parts(self) -> PolicyParts:
        """Return what the objective is made of; a relative with another objective overrides it."""
        c = self.config
        surrogate: Surrogate = "cispo" if c.loss_type == "cispo" else "clipped"
        return PolicyParts.of(
            c,
            self.kl_coef,
            ratio=c.ratio_level,
            pooling=c.pooling,
            surrogate=surrogate,
            bounds=c.weight_range if surrogate == "cispo" else c.clip_range,
            aggregation=c.loss_norm,
        )

    def window_denominator(self, mask: Tensor) -> float:
        """Return what ``loss_norm`` divides by."""
        return float(normaliser(mask, self.config.loss_norm, max_length=self.config.max_output_tokens))

    # -- parts of the credit --------------------------------------------------------------------------------------

    def shaped_rewards(self, batch: RolloutBatch, kl: Tensor | None) -> Tensor:
        """Return the turn rewards ``[B, K]`` less the punishment of length and, if placed here, less the KL."""
        return shaped_rewards(self.config, batch, kl, self.kl_coef)

    def shaped_advantages(
        self, advantages: Tensor, mask: Tensor, kl: Tensor | None, *, whiten: Tensor | None = None
    ) -> Tensor:
        """Return advantages ``[B, L]`` with the KL where it is placed here, whitened and clamped as asked for."""
        return shaped_advantages(self.config, advantages, mask, kl, self.kl_coef, whiten=whiten)

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
