"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), and what its relatives share with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import Algorithm, AlgorithmConfig
from agilerl.algorithms.cispo import CISPOConfig
from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig, check_weight_bounds
from agilerl.algorithms.credit import group_credit, shaped_advantages, shaped_rewards
from agilerl.algorithms.custom_loss import LossFunction, check_loss
from agilerl.algorithms.dppo import DPPOConfig, dppo_parts
from agilerl.algorithms.forward import fixed_entropy
from agilerl.algorithms.gspo import GSPOConfig
from agilerl.algorithms.keywords import (
    CISPOKeywords,
    DPPOKeywords,
    GRPOKeywords,
    GSPOKeywords,
    MaxRLKeywords,
    REINFORCEKeywords,
    RLOOKeywords,
)
from agilerl.algorithms.learner import Experience, PolicyLearner, is_off_policy, sampled_logprobs, temperature_of
from agilerl.algorithms.maxrl import MaxRLConfig
from agilerl.algorithms.objective import PolicyParts, Surrogate, policy_objective
from agilerl.algorithms.reinforce import REINFORCEConfig, reinforce_credit
from agilerl.algorithms.rloo import RLOOConfig
from agilerl.algorithms.state import AgentState
from agilerl.checks.arguments import checked, nearest
from agilerl.checks.validation import Needs, is_set, set_values, validated
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer, fill_masked, nonzero_advantage_rows, normaliser, top_entropy_mask
from agilerl.hpo.parameters import Evolve, check_present, with_changes
from agilerl.runtime import Runtime


class GRPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of GRPO."""

    algorithm: ClassVar[str] = "GRPO"
    clip_max: Annotated[float, Field(gt=0), Evolve(1.0, 10.0), Needs("loss_type", ("cispo",))] = 5.0
    """``loss_type="cispo"``: cap of the detached importance weight (arXiv 2506.13585) if ``clip_coef`` is not set."""
    clip_min: Annotated[float | None, Field(ge=0), Needs("loss_type", ("cispo",))] = None
    """``loss_type="cispo"``: floor of the weight."""

    @model_validator(mode="after")
    def _weight_bounds_agree(self) -> Self:
        check_weight_bounds(self, self.clip_min, self.clip_max)
        unused = [name for name in ("dual_clip", "delta") if getattr(self, name) is not None]
        if self.loss_type == "cispo" and unused:
            raise ValueError(
                f"loss_type='cispo' does not use {' and '.join(unused)}; remove {'it' if len(unused) == 1 else 'them'}"
            )
        return self

    @property
    def weight_range(self) -> tuple[float, float]:
        """Lower and upper bound of CISPO's detached importance weight; ``clip_coef``, if it is set, gives both."""
        if self.loss_type == "cispo" and is_set(self, "clip_coef"):
            return self.clip_range
        return self.clip_min or 0.0, self.clip_max


def grpo_credit(c: GRPOConfig, batch: RolloutBatch, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return advantages relative to the group ``[B, L]``, 0 off the action mask."""
    advantages, telling = group_credit(c, batch, shaped_rewards(c, batch, kl, kl_coef))
    whiten = telling if c.whiten_advantages else None
    return shaped_advantages(c, advantages, batch.action_mask, kl, kl_coef, whiten=whiten)


def grpo_parts(c: GRPOConfig, kl_coef: float) -> PolicyParts:
    """Return what the objective is made of: the clipped surrogate, or CISPO's, by ``loss_type``."""
    surrogate: Surrogate = "cispo" if c.loss_type == "cispo" else "clipped"
    return PolicyParts.of(
        c,
        kl_coef,
        ratio=c.ratio_level,
        pooling=c.pooling,
        surrogate=surrogate,
        bounds=c.weight_range if surrogate == "cispo" else c.clip_range,
        aggregation=c.loss_norm,
    )


@dataclass(frozen=True)
class PolicyAlgorithm(Algorithm):
    """A member of GRPO's family: its hyperparameters, and the two functions in which members differ.

    Both take the agent's config, of this algorithm's ``Config``, and the current weight of the KL.
    """

    credit: Callable[[Any, RolloutBatch, Tensor | None, float], Tensor] = grpo_credit
    """``(config, batch, kl, kl_coef)`` -> advantages ``[B, L]``; ``kl`` ``[B, L]`` is the detached KL of each token."""
    parts: Callable[[Any, float], PolicyParts] = grpo_parts
    """``(config, kl_coef)`` -> what the objective is made of."""


class GRPO(PolicyLearner, LLMAlgorithm):
    """Policy gradient whose baseline is the mean reward of the other completions of the same prompt.

    Its relatives (GSPO, CISPO, RLOO, MaxRL, DPPO, REINFORCE) are agents of the same kind that start with another
    algorithm: other hyperparameters, credit or parts of the objective. So agents of all of them learn in one batch, and
    the gene ``algorithm`` gives an agent the algorithm of a relative. Which one it has is ``agent.algorithm.name``; its
    class remains the one it was built with.
    """

    algorithm: PolicyAlgorithm = PolicyAlgorithm("GRPO", GRPOConfig)
    attributes_of = (GRPOConfig, GSPOConfig, CISPOConfig, DPPOConfig, REINFORCEConfig)
    config: GRPOConfig

    if TYPE_CHECKING:  # at run time the keywords are what ``GRPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[GRPOKeywords]) -> None: ...

    # -- presets --------------------------------------------------------------------------------------------------

    @classmethod
    def dr_grpo(cls, **arguments: Unpack[GRPOKeywords]) -> Self:
        """Dr. GRPO (arXiv 2503.20783): no division by the spread, every token weighs the same in every sequence."""
        return cls._preset("dr_grpo", GRPOConfig, {"adv_norm": "mean_only", "loss_norm": "fixed-length"}, arguments)

    @classmethod
    def dapo(cls, **arguments: Unpack[GRPOKeywords]) -> Self:
        """DAPO (arXiv 2503.14476): clip-higher, token mean, no KL, dynamic sampling, overlong punishment.

        The punishment begins a fifth before ``max_output_tokens`` (the paper: 4,096 of 20,480 tokens) unless
        ``overlong_cache_tokens`` says otherwise; None leaves it out.
        """
        limit = arguments.get("max_output_tokens", getattr(arguments.get("config"), "max_output_tokens", None))
        if limit is None and "overlong_cache_tokens" not in arguments:
            raise ConfigError("GRPO.dapo needs max_output_tokens, found None; set it, or overlong_cache_tokens=None")
        values = {"clip_coef": (0.8, 1.28), "loss_norm": "token-mean", "dynamic_sampling": True}
        if "overlong_cache_tokens" not in arguments:
            values["overlong_cache_tokens"] = max(1, int(limit or 1) // 5)
        return cls._preset("dapo", GRPOConfig, values, arguments)

    @classmethod
    def _preset(
        cls, name: str, config: type[PolicyConfig], values: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Self:
        if not issubclass(cls.Config, config):
            owner = config.algorithm
            raise ConfigError(f"{name}() is a preset of {owner}, found {cls.__name__}; use {owner}.{name}(...)")
        return cls(**{**values, **arguments})

    # -- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return advantages and the log-probs that the objective compares with."""
        c = self.config
        batch = batch.select(batch.graded)  # a row without a grade teaches nothing
        # Before the credit, of which the KL may be a part.
        old, reported, ref, kl = sampled_logprobs(self, batch)
        advantages = self.credit(batch, kl)
        # After the credit: a row that is left out still counts in the baseline of its group.
        kept = torch.ones(len(batch), dtype=torch.bool)
        if c.filter_zero_adv:
            kept &= nonzero_advantage_rows(advantages, batch.action_mask, c.adv_filter_eps)
        if c.mask_truncated and batch.truncated is not None:
            kept &= ~batch.truncated
        if not kept.all():
            batch = batch.select(kept)  # which may cut the padding
            width = batch.action_mask.shape[1]
            advantages = advantages[kept, :width]
            old, ref, reported = (x if x is None else x[kept, :width] for x in (old, ref, reported))
        if c.top_entropy_quantile < 1 and len(batch):
            advantages = self._on_top_entropy(batch, advantages)
        # A KL or an entropy bonus has a gradient where the advantage is 0, too.
        still = c.beta == 0 and c.entropy_coef == 0
        idle = ~nonzero_advantage_rows(advantages, batch.action_mask) if still else None
        # It may have been computed for the KL alone, or the rows that are left may fit one optimizer step.
        old = old if is_off_policy(self, batch) else None
        metrics = {} if c.kl_target is None else {"kl_coef": self.kl_coef}
        return Experience(batch, advantages, old, ref, reported, idle=idle, metrics=metrics)

    def credit(self, batch: RolloutBatch, kl: Tensor | None = None) -> Tensor:
        """Return advantages ``[B, L]``, 0 off the action mask; ``kl`` ``[B, L]`` is the detached KL of each token."""
        return self.algorithm.credit(self.config, batch, kl, self.kl_coef)

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Clipped (or CISPO's) surrogate per token, plus KL, minus entropy, aggregated by ``loss_norm``."""
        return policy_objective(inputs, self.algorithm.parts(self.config, self.kl_coef), metrics)

    def window_denominator(self, mask: Tensor) -> float:
        """Return what ``loss_norm`` divides by."""
        return float(normaliser(mask, self.config.loss_norm, max_length=self.config.max_output_tokens))

    def _on_top_entropy(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        """Keep advantages on the tokens of highest entropy only; elsewhere the policy term and its gradient vanish."""
        entropy = fixed_entropy(self.runtime, self.slot, batch, temperature_of(self), self.micro_batch).cpu()
        valid = entropy[batch.action_mask].double()
        if not len(valid):
            return advantages
        threshold = torch.quantile(valid, 1 - self.config.top_entropy_quantile)
        top = top_entropy_mask(entropy.double(), batch.action_mask, threshold)
        return fill_masked(advantages, top)

    # -- one family -----------------------------------------------------------------------------------------------

    @checked
    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Change some hyperparameters together; ``algorithm`` names the relative whose algorithm this agent takes.

        It keeps everything else: slot, weights, moments, counters, and the hyperparameters that were set.
        Nothing changes when one of the values, or their combination, is invalid.
        """
        name = values.get("algorithm", self.algorithm.name)
        if name == self.algorithm.name:
            super().set_hyperparameters({key: value for key, value in values.items() if key != "algorithm"})
            return
        if name not in FAMILY or type(self) not in FAMILY.values():
            raise ConfigError(f"{self.algorithm.name} cannot become {name!r}; {nearest(str(name), FAMILY)}")
        algorithm = FAMILY[name].algorithm
        # What was set moves along; everything else takes the defaults of the other algorithm.
        kept = with_changes(set_values(self.config), values)
        del kept["algorithm"]
        before = self.algorithm, self.config
        self.algorithm, self.config = algorithm, validated(algorithm.Config, kept)  # type: ignore[assignment]
        try:
            check_present(self.genes, self.hyperparameters)
            if self.loss is not None:
                check_loss(self.loss, self)
        except ConfigError:
            self.algorithm, self.config = before
            raise

    @classmethod
    @checked
    def from_state(cls, state: AgentState, runtime: Runtime, loss: LossFunction | None = None) -> Self:
        """Build the agent of a state, with the algorithm that the state names, whichever class this is called on."""
        member = FAMILY.get(state.algorithm, cls)
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


class GSPO(GRPO):
    """GRPO with the ratio ``exp(mean_t (pi - old))`` of the trajectory: all tokens of a completion clip together.

    Advantages and objective are GRPO's, with ``loss_type="gspo"``.
    """

    algorithm = PolicyAlgorithm("GSPO", GSPOConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``GSPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[GSPOKeywords]) -> None: ...


class CISPO(GRPO):
    """Policy gradient ``-sg(clamp(rho, clip_min, clip_max)) A log pi`` on GRPO's advantages.

    Advantages and objective are GRPO's, with ``loss_type="cispo"``.
    """

    algorithm = PolicyAlgorithm("CISPO", CISPOConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``CISPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[CISPOKeywords]) -> None: ...


class RLOO(GRPO):
    """Clipped surrogate with the ratio ``exp(sum_t (pi - old))`` of the completion and the advantage
    ``r - mean of the others' r``, with ``beta`` times the k1 estimate of the KL subtracted from ``r``.

    Advantages (``adv_norm="rloo"``) and objective are GRPO's.
    """

    algorithm = PolicyAlgorithm("RLOO", RLOOConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``RLOOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[RLOOKeywords]) -> None: ...


class MaxRL(GRPO):
    """GRPO with the advantage ``(r - mean_g) / mean_g``, the group's mean instead of its standard deviation.

    With rewards of 0 and 1 and G samples this is the gradient of log p truncated at its G-th order: the rarer the
    success, the larger the step. A group whose mean is not above 0 teaches nothing, so rewards should not be negative.
    """

    algorithm = PolicyAlgorithm("MaxRL", MaxRLConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``MaxRLConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[MaxRLKeywords]) -> None: ...


class DPPO(GRPO):
    """Policy gradient ``-M sg(min(rho, weight_max)) A log pi`` on GRPO's advantages; M leaves out what went too far.

    A rare token may multiply its probability, a frequent one may not move far; ratio bounds do the opposite.
    """

    algorithm = PolicyAlgorithm("DPPO", DPPOConfig, parts=dppo_parts)

    if TYPE_CHECKING:  # at run time the keywords are what ``DPPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[DPPOKeywords]) -> None: ...


class REINFORCE(GRPO):
    """Clipped policy gradient on returns that are normalised over the whole batch; no group and no critic is needed.

    The objective is GRPO's; what differs is the credit.
    """

    algorithm = PolicyAlgorithm("REINFORCE", REINFORCEConfig, credit=reinforce_credit)

    if TYPE_CHECKING:  # at run time the keywords are what ``REINFORCEConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[REINFORCEKeywords]) -> None: ...

    @classmethod
    def plus_plus(cls, **arguments: Unpack[REINFORCEKeywords]) -> Self:
        """REINFORCE++: one reward a completion less the KL (k1) token by token, whitened returns."""
        values = {"advantage_estimator": "reinforce++", "kl_placement": "reward", "kl_estimator": "k1"}
        return cls._preset("plus_plus", REINFORCEConfig, values, arguments)

    @classmethod
    def plus_plus_baseline(cls, **arguments: Unpack[REINFORCEKeywords]) -> Self:
        """REINFORCE++ with the mean of the prompt's completions as the baseline, and the KL (k2) in the loss."""
        values = {"advantage_estimator": "reinforce++-baseline", "kl_placement": "loss", "kl_estimator": "k2"}
        return cls._preset("plus_plus_baseline", REINFORCEConfig, values, arguments)


FAMILY: dict[str, type[GRPO]] = {cls.__name__: cls for cls in (GRPO, GSPO, CISPO, RLOO, MaxRL, DPPO, REINFORCE)}
"""What the gene ``algorithm`` chooses among, by name."""
