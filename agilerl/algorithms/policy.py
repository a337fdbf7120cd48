"""What all policy-gradient algorithms share: their hyperparameters, and whose log-probs count as old."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from agilerl.algorithms.learner import Learner, PolicyLearner
from agilerl.algorithms.llm_config import LLMConfig
from agilerl.algorithms.reference import ReferenceLogprobs
from agilerl.algorithms.surrogate import SurrogateConfig
from agilerl.data import RolloutBatch
from agilerl.functional import LOSS_NORM_ALIASES, AdvantageNorm, LossNorm, PoolingLevel

__all__ = [
    "GroupConfig",
    "PolicyConfig",
    "behaviour_entropy",
    "behaviour_logprobs",
    "Sampled",
    "check_weight_bounds",
    "is_off_policy",
    "reference_logprobs",
    "reported_logprobs",
    "sampled_as_trained",
    "sampled_logprobs",
]


class PolicyConfig(LLMConfig):
    """Hyperparameters of a policy gradient without a critic; stands beside ``SurrogateConfig`` in its algorithms."""

    if TYPE_CHECKING:  # declared by RolloutLLMConfig and SurrogateConfig
        group_size: int
        max_output_tokens: int | None
        clip_coef: Any
        kl_placement: Any

        @property
        def clip_range(self) -> tuple[float, float]: ...  # noqa: D102

    algorithm: ClassVar[str]
    """Name of the algorithm: the value of the gene ``algorithm``."""
    loss_type: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Objective; ``gspo`` is ``grpo`` with the ratio pooled over the trajectory (arXiv 2507.18071)."""
    loss_norm: Annotated[LossNorm, BeforeValidator(lambda name: LOSS_NORM_ALIASES.get(str(name), name))] = (
        "seq-mean-token-mean"
    )
    """How token losses become one number: GRPO's paper, ``token-mean`` (DAPO), or ``fixed-length`` (Dr. GRPO)."""
    importance_sampling_level: PoolingLevel | None = None
    """Unit over which log-ratios are pooled before clipping; None: ``token``, or what the objective prescribes."""
    filter_zero_adv: bool = False
    """Leave out rows whose absolute advantage is at most ``adv_filter_eps``, normalisers included."""
    adv_filter_eps: Annotated[float, Field(ge=0)] = 0.0
    """Threshold of ``filter_zero_adv``."""
    overlong_cache_tokens: Annotated[int | None, Field(ge=1)] = None
    """Soft length punishment: within this many tokens of ``max_output_tokens`` the reward falls linearly, by 1 in all
    (DAPO, arXiv 2503.14476); None: no punishment."""
    mask_truncated: bool = False
    """Leave completions that hit a limit out of the loss, normalisers included; they still count in the baseline."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the batch's tokens, those of highest entropy when sampled, that keep their policy loss; 1: all of them
    (arXiv 2506.01939)."""

    @model_validator(mode="before")
    @classmethod
    def refuse_pinned(cls, values: Any) -> Any:
        """Raise for a hyperparameter of the family that this algorithm fixes."""
        for name in values if isinstance(values, dict) else ():
            if name in _FAMILY_FIELDS and name not in cls.model_fields:
                pinned = getattr(cls, name, None)
                found = f"{name}={values[name]!r}"
                raise ValueError(
                    f"{cls.algorithm} has no {name}, found {found}; leave it out, or use GRPO({found})"
                    if pinned is None
                    else f"{cls.algorithm} fixes {name}={pinned!r}, found {found}; leave it out, or use GRPO({found})"
                )
        return values

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.loss_type == "gspo" and self.importance_sampling_level not in (None, "trajectory"):
            raise ValueError(
                f"loss_type='gspo' pools the ratio over the trajectory, found importance_sampling_level="
                f"{self.importance_sampling_level!r}; leave it out, or use loss_type='grpo'"
            )
        limit, cache = self.max_output_tokens, self.overlong_cache_tokens
        if self.loss_norm == "fixed-length" and limit is None:
            raise ValueError("loss_norm='fixed-length' divides by max_output_tokens, which is None; set it")
        if cache is not None and (limit is None or cache > limit):
            raise ValueError(
                f"overlong_cache_tokens={cache} lies before max_output_tokens={limit}; set that to at least {cache}"
            )
        return self

    @property
    def weight_range(self) -> tuple[float, float]:
        """Lower and upper bound of CISPO's detached importance weight."""
        return self.clip_range

    @property
    def ratio_level(self) -> PoolingLevel:
        """Unit over which log-ratios are pooled."""
        return self.importance_sampling_level or ("trajectory" if self.loss_type == "gspo" else "token")

    @property
    def pooling(self) -> Literal["mean", "sum"]:
        """What pooling takes of a unit's log-ratios."""
        return "mean"

    @property
    def uses_turns(self) -> bool:
        """Whether something is computed turn by turn."""
        return self.ratio_level == "turn"

    @property
    def sampling_rounds(self) -> int:
        """Most rounds of sampling for one batch; more than one where groups without variance are replaced."""
        return 1


class GroupConfig(LLMConfig):
    """Hyperparameters of advantages that compare the completions of one prompt with each other."""

    if TYPE_CHECKING:  # declared by RolloutLLMConfig and PolicyConfig
        algorithm: ClassVar[str]
        group_size: int

        @property
        def ratio_level(self) -> PoolingLevel: ...  # noqa: D102

    adv_norm: AdvantageNorm = "mean_std"
    """What the group's mean-centred rewards are divided by."""
    adv_eps: Annotated[float, Field(gt=0)] = 1e-4
    """Added to the standard deviation."""
    whiten_advantages: bool = False
    """Give the advantages of all action tokens mean 0 and variance 1. Those of prompts whose completions all earned the
    same stay 0 and do not count."""
    advantage_granularity: Literal["auto", "trajectory", "turn"] = "auto"
    """Unit that is compared within a group; ``auto`` is ``turn`` where the ratio is pooled over turns."""
    turn_advantage_trajectory_fallback: bool = True
    """Turns that fewer than two members of the group played take the trajectory's advantage instead of 0."""
    dynamic_sampling: bool = False
    """Replace groups whose completions all earned the same, which teach nothing, by groups of further prompts (DAPO,
    arXiv 2503.14476)."""
    max_sampling_rounds: Annotated[int, Field(ge=2)] = 4
    """Rounds of ``dynamic_sampling`` at most, the first included; what is missing then stays out of the batch."""

    @model_validator(mode="after")
    def _has_a_group(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves nothing to compare a completion with, and {self.algorithm}'s "
                "advantages are relative to the group; use at least 2, or REINFORCE, which needs no group"
            )
        return self

    @property
    def advantage_level(self) -> Literal["trajectory", "turn"]:
        """Unit that gets one advantage."""
        if self.advantage_granularity != "auto":
            return self.advantage_granularity
        return "turn" if self.ratio_level == "turn" else "trajectory"

    @property
    def uses_turns(self) -> bool:
        """Whether something is computed turn by turn."""
        return "turn" in (self.ratio_level, self.advantage_level)

    @property
    def sampling_rounds(self) -> int:
        """Most rounds of sampling for one batch; more than one where groups without variance are replaced."""
        return self.max_sampling_rounds if self.dynamic_sampling else 1


_FAMILY_FIELDS = frozenset(PolicyConfig.model_fields | GroupConfig.model_fields | SurrogateConfig.model_fields)
"""Hyperparameters of which a member of the family may have fixed or dropped some."""


def check_weight_bounds(c: PolicyConfig, low: float | None, high: float) -> None:
    """Raise ValueError where the bounds of CISPO's weight are given twice, or the wrong way round."""
    given = c.model_fields_set
    if c.loss_type == "cispo" and "clip_coef" in given and c.clip_coef is not None and given & {"clip_min", "clip_max"}:
        names = " and ".join(sorted(given & {"clip_min", "clip_max"}))
        raise ValueError(
            f"clip_coef={c.clip_coef} gives both bounds of the weight, found {names} as well; name one or the other"
        )
    if low is not None and low >= high:
        raise ValueError(f"clip_min={low} is not below clip_max={high}; lower it, or leave it out")


def is_off_policy(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the ratio leaves 1: the batch takes more than one optimizer step, or has been learned from."""
    several = agent.config.update_epochs > 1 or len(batch) > agent.window_rows
    return several or (agent.learns_again and sampled_as_trained(agent, batch))


def sampled_as_trained(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the log-probs that came with a batch are what the trainer's own forward would have said."""
    runtime = agent.runtime
    return batch.sampling_logps is not None and runtime.engine.exact and runtime.base.decodes_exactly


def behaviour_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return old log-probs ``[B, L]``: those of the policy at rollout.

    Our own engine's log-probs are the policy's, so they serve as old ones without a second forward, unless it rounds in
    another way than the trainer does. Then, and where there are none, they are those of the policy before the update.
    """
    if batch.sampling_logps is not None and sampled_as_trained(agent, batch):
        return batch.sampling_logps
    return agent.runtime.fixed_logprobs(agent.slot, batch, _temperature(agent), agent.micro_rows(batch))


def reported_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor | None:
    """Return the log-probs ``[B, L]`` that a foreign engine reported of its samples; None where it is our own."""
    return None if agent.runtime.engine.exact else batch.sampling_logps


def reference_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the reference's log-probs ``[B, L]`` on the CPU: its slot's, or those of the base with adapters off.

    Completions that several agents, or one agent several times, drew for a prompt are computed once.
    """
    known, rows = ReferenceLogprobs.of(agent.runtime), agent.micro_rows(batch)
    return known.logprobs(batch, agent.reference_slot, agent.reference_key, rows, _temperature(agent))


class Sampled(NamedTuple):
    """The log-probs of a batch, each ``[B, L]``, that advantages and objective compare the policy's with."""

    old: Tensor | None
    """Of the policy at rollout; None where nothing needs them."""
    reported: Tensor | None
    """As a foreign engine reported them; None where it is our own."""
    ref: Tensor | None
    """Of the reference; None without a KL."""
    kl: Tensor | None
    """Detached KL of each token, where it is needed before the update."""


def sampled_logprobs(agent: PolicyLearner, batch: RolloutBatch) -> Sampled:
    """Compute what a batch is compared with, having adapted the weight of the KL to it."""
    c = agent.config
    old = behaviour_logprobs(agent, batch) if is_off_policy(agent, batch) or c.kl_when_sampled else None
    reported = reported_logprobs(agent, batch)
    ref = reference_logprobs(agent, batch) if c.beta > 0 else None
    kl = None
    if c.kl_when_sampled and old is not None and ref is not None:
        kl = agent.sampled_kl(old, ref, batch.action_mask)
    return Sampled(old, reported, ref, kl)


def behaviour_entropy(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the entropy ``[B, L]`` in nats of the distributions that the policy draws from, 0 off the action mask."""
    return agent.runtime.fixed_entropy(agent.slot, batch, _temperature(agent), agent.micro_rows(batch)).cpu()


def _temperature(agent: Learner) -> float:
    return float(getattr(agent.config, "temperature", 1.0))
