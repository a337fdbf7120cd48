"""What all policy-gradient algorithms share: their hyperparameters, whose log-probs count as old, and the metrics."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from agilerl.algorithms.llm_config import LLMConfig
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import (
    LOSS_NORM_ALIASES,
    AdvantageNorm,
    KLEstimator,
    LossNorm,
    MetricReducer,
    PoolingLevel,
    Reduction,
    clip_regions,
    masked_sum,
    zero_variance_groups,
)
from agilerl.hpo.parameters import Evolve
from agilerl.runtime import AgentRows

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = [
    "GroupConfig",
    "PolicyConfig",
    "behaviour_entropy",
    "behaviour_logprobs",
    "check_turn_rewards",
    "is_off_policy",
    "per_turn_sums",
    "record_batch",
    "record_idle",
    "record_policy",
    "record_tokens",
    "reference_logprobs",
]


class PolicyConfig(LLMConfig):
    """Hyperparameters of a policy gradient without a critic; stands beside ``RolloutLLMConfig`` in its algorithms."""

    if TYPE_CHECKING:  # declared by RolloutLLMConfig
        group_size: int
        max_output_tokens: int | None

    algorithm: ClassVar[str]
    """Name of the algorithm: the value of the gene ``algorithm``."""
    loss_type: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Objective; ``gspo`` is ``grpo`` with the ratio pooled over the trajectory (arXiv 2507.18071)."""
    beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.001
    """Weight of the KL term; 0 skips the reference forward."""
    clip_coef: Annotated[float | tuple[float, float], Evolve(0.05, 0.5)] = 0.2
    """Bounds of the importance ratio: c means [1 - c, 1 + c], a pair gives both bounds of the ratio."""
    dual_clip: Annotated[float | None, Field(gt=1)] = None
    """Cap of the loss for negative advantages, as a multiple of them (arXiv 1912.09729)."""
    delta: Annotated[float | None, Field(gt=1)] = None
    """Upper bound of the unclipped ratio too (two-sided clipping, arXiv 2505.07291)."""
    loss_norm: Annotated[LossNorm, BeforeValidator(lambda name: LOSS_NORM_ALIASES.get(name, name))] = (
        "seq-mean-token-mean"
    )
    """How token losses become one number: GRPO's paper, ``token-mean`` (DAPO), or ``fixed-length`` (Dr. GRPO)."""
    importance_sampling_level: PoolingLevel | None = None
    """Unit over which log-ratios are pooled before clipping; None: ``token``, or what the objective prescribes."""
    adv_clip_range: Annotated[float | None, Field(gt=0)] = None
    """Advantages are clamped to plus and minus this."""
    filter_zero_adv: bool = False
    """Leave out rows whose absolute advantage is at most ``adv_filter_eps``, normalisers included."""
    adv_filter_eps: Annotated[float, Field(ge=0)] = 0.0
    """Threshold of ``filter_zero_adv``."""
    overlong_cache_tokens: Annotated[int | None, Field(ge=1)] = None
    """Soft length punishment: within this many tokens of ``max_output_tokens`` the reward falls linearly, by 1 in all
    (DAPO, arXiv 2503.14476); None: no punishment."""
    mask_truncated: bool = False
    """Leave completions that hit a limit out of the loss, normalisers included; they still count in the baseline."""
    entropy_coef: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.0
    """Weight of the entropy bonus: this times the policy's entropy in nats is subtracted from each token's loss."""
    top_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the batch's tokens, those of highest entropy when sampled, that keep their policy loss; 1: all of them
    (arXiv 2506.01939)."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of KL(policy || reference) (J. Schulman, "Approximating KL divergence"); k3+ has k2's gradient."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """Where ``beta`` times the KL goes."""
    use_kl_advantage_shaping: bool = False
    """Add beta (mean_t kl - kl_t) to the advantages, in place of the KL term of the loss."""
    kl_clamp_value: Annotated[float | None, Field(gt=0)] = None
    """The KL of a token counts for at most this, in nats; None: whatever it is."""
    kl_target: Annotated[float | None, Field(gt=0)] = None
    """Adapt the weight of the KL until the mean KL of a completion is this, in nats (arXiv 1909.08593); ``beta`` is
    where it starts. None: the weight stays ``beta``."""
    kl_horizon: Annotated[int, Field(ge=1)] = 10_000
    """Completions over which ``kl_target`` changes the weight by up to 20 %."""
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

    @model_validator(mode="before")
    @classmethod
    def refuse_pinned(cls, values: Any) -> Any:
        """Raise for a hyperparameter of the family that this algorithm fixes."""
        for name in values if isinstance(values, dict) else ():
            if name in PolicyConfig.model_fields | GroupConfig.model_fields and name not in cls.model_fields:
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
        if self.clip_coef is not None:
            low, high = self.clip_range
            if not 0 <= low < 1 < high:
                raise ValueError(
                    f"clip_coef={self.clip_coef} gives the ratio bounds [{low:g}, {high:g}]; expected a number in "
                    "(0, 1] or a pair (min, max) of ratios around 1"
                )
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
        if self.kl_target is not None and self.beta == 0:
            raise ValueError(
                f"kl_target={self.kl_target} adapts the weight of the KL, but beta=0 leaves none; set beta"
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        c = self.clip_coef
        return c if isinstance(c, tuple) else (1 - c, 1 + c)

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
    """Give the advantages of all action tokens mean 0 and variance 1."""
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


def is_off_policy(agent: "LLMAlgorithm", rows: int) -> bool:
    """Return whether a batch of this many rows takes more than one optimizer step, so that rho leaves 1."""
    return agent.config.update_epochs > 1 or rows > agent.window_rows


def behaviour_logprobs(agent: "LLMAlgorithm", batch: RolloutBatch) -> tuple[Tensor, Tensor | None]:
    """Return old log-probs ``[B, L]`` and, where a foreign engine sampled, those that it reported.

    Our own engine's log-probs are the policy's, so they serve as old ones without a second forward.
    """
    sampled = batch.sampling_logps
    if sampled is not None and agent.runtime.engine.exact:
        return sampled, None
    return _fixed(agent, agent.slot, batch), sampled


def reference_logprobs(agent: "LLMAlgorithm", batch: RolloutBatch) -> Tensor:
    """Return the reference policy's log-probs ``[B, L]``: its slot, or the base model with adapters off."""
    return _fixed(agent, agent.reference_slot, batch)


@torch.no_grad()
def behaviour_entropy(agent: "LLMAlgorithm", batch: RolloutBatch) -> Tensor:
    """Return the entropy ``[B, L]`` in nats of the distributions that the policy draws from, 0 off the action mask."""
    result = torch.zeros(batch.action_mask.shape, dtype=torch.float32)
    rows = agent.micro_rows(batch)
    for start in range(0, len(batch), rows):
        part = AgentRows(agent.slot, batch.select(slice(start, start + rows)), _temperature(agent))
        (output,) = agent.runtime.forward([part], entropy=True)
        assert output.entropy is not None
        result[start : start + rows, : output.entropy.shape[1]] = output.entropy.cpu()
    return result


def per_turn_sums(values: Tensor, turn_ids: Tensor, turns: int) -> Tensor:
    """Return the sums ``[B, turns]`` of token values ``[B, L]`` over each turn; turns beyond the last join it."""
    last = turn_ids.clamp(max=turns - 1)
    return torch.stack([masked_sum(values, last == k, -1) for k in range(turns)], dim=1)


def check_turn_rewards(batch: RolloutBatch) -> None:
    """Raise ConfigError unless every turn of the batch has a column of rewards."""
    turns, played = batch.rewards.shape[1], int(batch.turn_ids.max()) + 1 if len(batch) else 0
    if played > turns:
        raise ConfigError(
            f"credit by turn needs a reward for each turn, found {played} turns and rewards for {turns}; give rewards "
            "[rows, turns], or advantage_granularity='trajectory'"
        )


def _temperature(agent: "LLMAlgorithm") -> float:
    return float(getattr(agent.config, "temperature", 1.0))


def _fixed(agent: "LLMAlgorithm", slot: int | None, batch: RolloutBatch) -> Tensor:
    return agent.runtime.fixed_logprobs(slot, batch, _temperature(agent), agent.micro_rows(batch))


def record_batch(batch: RolloutBatch, metrics: MetricReducer) -> None:
    """Add what rewards and lengths say before any update; a row without a grade has no reward, not one of 0."""
    graded = batch.rewards.isfinite().any(dim=1) & ~batch.rewards.isinf().any(dim=1)
    returns = batch.returns[graded]
    lengths = batch.action_mask.sum(dim=1)
    metrics.add("reward", returns)
    metrics.add("reward_std", returns, reduction="std")
    metrics.add("frac_reward_zero_std", zero_variance_groups(returns, batch.groups[graded]))
    metrics.add("completions/mean_length", lengths)
    metrics.add("completions/min_length", lengths, reduction="min")
    metrics.add("completions/max_length", lengths, reduction="max")
    if batch.truncated is not None:
        metrics.add("completions/clipped_ratio", batch.truncated)


_ADVANTAGES: dict[str, Reduction] = {"advantages/mean": "mean", "advantages/std": "std", "advantages/abs_mean": "mean"}


def record_idle(tokens: int, metrics: MetricReducer) -> None:
    """Count action tokens that were not computed because their advantages, and so all of these metrics, are 0."""
    if tokens:
        zeros = torch.zeros(tokens)
        for name in ("policy_loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            metrics.add(name, zeros)
        for name, reduction in _ADVANTAGES.items():
            metrics.add(name, zeros, reduction=reduction)


@torch.no_grad()
def record_policy(inputs: LossInputs, ratio: Tensor, low: float, high: float, metrics: MetricReducer) -> None:
    """Add the metrics of a policy update; ``low`` and ``high`` bound the ratio."""
    below, above = clip_regions(ratio, inputs.advantages, 1 - low, high - 1)
    metrics.add("clip_ratio/low_mean", below, inputs.mask)
    metrics.add("clip_ratio/high_mean", above, inputs.mask)
    metrics.add("clip_ratio/region_mean", below | above, inputs.mask)
    record_tokens(inputs, ratio, metrics)


@torch.no_grad()
def record_tokens(inputs: LossInputs, ratio: Tensor, metrics: MetricReducer) -> None:
    """Add the metrics of a policy update that no clip bound enters."""
    mask, advantages = inputs.mask, inputs.advantages
    for reduction in ("mean", "min", "max"):
        metrics.add(f"is_ratio/{reduction}", ratio, mask, reduction=reduction)
    for name, reduction in _ADVANTAGES.items():
        metrics.add(name, advantages.abs() if name.endswith("abs_mean") else advantages, mask, reduction=reduction)
    if inputs.entropy is not None:
        metrics.add("entropy", inputs.entropy, mask)
    if inputs.sampling_logp is not None:
        gap = (inputs.old_logp - inputs.sampling_logp).abs()
        metrics.add("sampling/sampling_logp_difference/mean", gap, mask)
        metrics.add("sampling/sampling_logp_difference/max", gap, mask, reduction="max")
