"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), and what its relatives share with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import Algorithm, AlgorithmConfig, Hyperparameter
from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig, check_weight_bounds
from agilerl.algorithms.credit import group_credit, shaped_advantages, shaped_rewards
from agilerl.algorithms.custom_loss import LossFunction, check_loss
from agilerl.algorithms.keywords import GRPOKeywords
from agilerl.algorithms.learner import Experience, PolicyLearner, is_off_policy, sampled_logprobs, temperature_of
from agilerl.algorithms.objective import PolicyParts, Surrogate, policy_objective
from agilerl.algorithms.state import AgentState
from agilerl.checks.arguments import checked, nearest
from agilerl.checks.validation import Needs, validated
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
        if self.loss_type == "cispo" and "clip_coef" in self.model_fields_set:
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
    _relatives: ClassVar[dict[str, "type[GRPO]"]] = {}
    """The family by name; each member adds itself when its class is defined."""
    config: GRPOConfig

    if TYPE_CHECKING:  # at run time the keywords are what ``GRPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[GRPOKeywords]) -> None: ...

    # -- presets --------------------------------------------------------------------------------------------------

    @classmethod
    def dr_grpo(cls, **arguments: Unpack[GRPOKeywords]) -> Self:
        """Dr. GRPO (arXiv 2503.20783): no division by the spread, every token weighs the same in every sequence."""
        return cls._preset("dr_grpo", {"adv_norm": "mean_only", "loss_norm": "fixed-length"}, arguments)

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
        return cls._preset("dapo", values, arguments)

    @classmethod
    def _preset(cls, name: str, values: Mapping[str, Any], arguments: Any) -> Self:
        if cls.Config is not GRPOConfig:
            raise ConfigError(f"{name}() is a preset of GRPO, found {cls.__name__}; use GRPO.{name}(...)")
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
        entropy = self.runtime.fixed_entropy(self.slot, batch, temperature_of(self), self.micro_batch).cpu()
        valid = entropy[batch.action_mask].double()
        if not len(valid):
            return advantages
        threshold = torch.quantile(valid, 1 - self.config.top_entropy_quantile)
        top = top_entropy_mask(entropy.double(), batch.action_mask, threshold)
        return fill_masked(advantages, top)

    # -- one family -----------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GRPO in cls.__bases__:
            GRPO._relatives[cls.__name__] = cls
        for name, attribute in cls.__dict__.items():
            # An agent that takes another algorithm gets that algorithm's hyperparameters as attributes too.
            if isinstance(attribute, Hyperparameter) and name not in GRPO.__dict__:
                setattr(GRPO, name, attribute)

    @classmethod
    def family(cls) -> dict[str, "type[GRPO]"]:
        """Return GRPO and its relatives by name: what the gene ``algorithm`` chooses among."""
        return {"GRPO": GRPO, **GRPO._relatives}

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
        family = self.family()
        if name not in family:
            raise ConfigError(f"{self.algorithm.name} cannot become {name!r}; {nearest(str(name), family)}")
        for cls in (type(self), family[name]):
            _check_movable(cls)
        algorithm = family[name].algorithm
        # What was set moves along; everything else takes the defaults of the other algorithm.
        kept = with_changes(self.config.model_dump(exclude_unset=True), values)
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


def _check_movable(cls: type[GRPO]) -> None:
    """Raise ConfigError if an agent's class overrides how its algorithm learns: the gene would not carry that over."""
    methods = {"credit", "objective", "prepare", "window_denominator"}
    custom = sorted(methods & {name for c in cls.__mro__[: cls.__mro__.index(GRPO)] for name in vars(c)})
    if custom:
        raise ConfigError(
            f"{cls.__name__} overrides {custom[0]}(), which a change of the algorithm does not carry; give its credit "
            "or parts to algorithm = PolicyAlgorithm(name, Config, credit=..., parts=...) instead"
        )
