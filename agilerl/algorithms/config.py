"""Hyperparameters that algorithms share, each declared once with its bounds and evolution range.

The ``Config`` in an algorithm's file combines these: what all have (:class:`LLMConfig`), what sampling needs
(:class:`RolloutLLMConfig`), a clipped policy gradient (:class:`SurrogateConfig`), one without a critic
(:class:`PolicyConfig`), and advantages that compare the completions of a prompt (:class:`GroupConfig`).
"""

from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.checks.arguments import Count, check_fields
from agilerl.checks.validation import Needs, is_set
from agilerl.errors import warn_once
from agilerl.functional import LOSS_NORM_ALIASES, AdvantageNorm, KLEstimator, LossNorm, PoolingLevel
from agilerl.hpo.parameters import Evolve
from agilerl.rollouts import SamplingSettings


class LLMConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that trains an adapter."""

    # Larger than rates of full fine-tuning, because adapters need larger steps.
    lr: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 1e-5
    """Learning rate of AdamW."""
    batch_size: Annotated[int, Field(ge=1), Evolve(8, 512)] = 16
    """Trajectories of one optimizer step."""
    mini_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Overrides ``batch_size`` as the number of trajectories of one optimizer step."""
    update_epochs: Annotated[int, Field(ge=1), Evolve(1, 4)] = 1
    """Passes over the same trajectories."""
    # For outliers: in the default run the median norm is 0.35, and fewer than 1 in 100 are above 1.
    max_grad_norm: Annotated[float | None, Field(gt=0), Evolve(0.05, 5.0)] = 1.0
    """Gradients are scaled down to this L2 norm over the whole adapter; None leaves them."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of AdamW's second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term that keeps AdamW's denominator from zero."""
    weight_decay: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.0
    """Decoupled weight decay of the adapter."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of a mixture's routers (arXiv 2101.03961), added to every other loss.
    Routers are frozen; what adapters learn spreads over the experts."""
    micro_batch_size_per_gpu: Annotated[int | None, Field(ge=1)] = None
    """Trajectories of one forward and backward pass; None takes as many as fill the device, on a CPU at most 2,048
    tokens; more where a shared prompt would be computed twice, if the machine's memory holds them."""
    max_model_len: Annotated[int | None, Field(ge=2)] = 1024
    """Most tokens of prompt and completion together; the model's own context length is a further limit."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of the adapter's start, the samples and the order of mini-batches."""


class RolloutLLMConfig(LLMConfig):
    """Hyperparameters of algorithms that learn from their own samples."""

    group_size: Annotated[int, Field(ge=1), Evolve(2, 32)] = 8
    """Completions sampled for each prompt."""
    temperature: Annotated[float, Field(gt=0), Evolve(0.5, 1.5, scale="linear")] = 1.0
    """Sampling temperature; all log-probs are those of ``logits / temperature``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the full-vocabulary log-probs of the loss are biased."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most likely tokens; 0 means all. Biases the log-probs as ``top_p`` does."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens below this share of the most likely token's probability. Biases the log-probs likewise."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of tokens that occurred before. Biases the log-probs likewise."""
    max_output_tokens: Annotated[int | None, Field(ge=1), Evolve(8, 8192, unless_named=False)] = None
    """Most tokens of a completion; None leaves what ``max_model_len`` leaves. A run that sets neither, nor a context
    length, has 128. As a gene, best ``monotone: up``."""
    min_output_tokens: Annotated[int | None, Field(ge=0)] = None
    """The end token cannot be drawn before this many tokens. Biases the log-probs likewise."""
    reward_weights: Annotated[dict[str, float], Evolve(0.0, 1.0, scale="linear")] = Field(default_factory=dict)
    """This agent's weights of parts of the reward, by name, in training, instead of those of the task's
    ``CombinedGrader``. The gene of one is ``reward_weights.<name>`` and needs a fitness grader."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        limit, least = self.max_output_tokens, self.min_output_tokens
        if limit is not None and least is not None and least > limit:
            raise ValueError(f"min_output_tokens={least} is above max_output_tokens={limit}; lower the first")
        return self

    @model_validator(mode="after")
    def _support_is_whole(self) -> Self:
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        narrowed = [f"{name}={getattr(self, name)}" for name, off in whole.items() if getattr(self, name) != off]
        if self.min_output_tokens:
            narrowed.append(f"min_output_tokens={self.min_output_tokens}")
        if narrowed:
            warn_once(
                f"{', '.join(narrowed)} changes what completions are drawn from, while the loss takes log-probs over "
                "the whole vocabulary: the update is biased; leave it out for an exact one"
            )
        return self

    def sampling(self, room: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings if the context has room for this many tokens."""
        limit = min(self.max_output_tokens or room, room)
        return SamplingSettings(
            max_new_tokens=limit,
            temperature=0.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=min(self.min_output_tokens or 0, limit),
        )


class ReferenceConfig(AlgorithmConfig):
    """Hyperparameters of algorithms that compare the policy with a reference."""

    use_separate_reference_adapter: bool = True
    """Let ``set_reference_policy`` move the reference to the current adapter; else it stays the base model."""
    ref_sync_steps: Annotated[int | None, Field(ge=1)] = None
    """After so many updates (calls of ``learn``, one an iteration) the reference moves towards the policy (TR-DPO,
    arXiv 2404.09656); None: never."""
    ref_sync_alpha: Annotated[float, Field(gt=0, le=1), Needs("ref_sync_steps")] = 0.6
    """The policy's share of the new reference, ``alpha policy + (1 - alpha) reference``; with 1 it is the policy."""

    @model_validator(mode="after")
    def _reference_can_move(self) -> Self:
        if self.ref_sync_steps is not None and not self.use_separate_reference_adapter:
            raise ValueError(
                f"ref_sync_steps={self.ref_sync_steps} moves the reference, but use_separate_reference_adapter=False "
                "keeps it the base model; drop one of them"
            )
        return self


class SurrogateConfig(ReferenceConfig, LLMConfig):
    """Hyperparameters of a clipped policy gradient; used together with ``RolloutLLMConfig``."""

    beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.0
    """Weight of the KL; 0 skips the reference forward, and the rows that teach nothing."""
    clip_coef: Annotated[float | tuple[float, float], Evolve(0.05, 0.5)] = 0.2
    """Bounds of the importance ratio: c means [1 - c, 1 + c], a pair gives both bounds of the ratio."""
    dual_clip: Annotated[float | None, Field(gt=1)] = None
    """Cap of the loss for negative advantages, as a multiple of them (arXiv 1912.09729)."""
    delta: Annotated[float | None, Field(gt=1)] = None
    """Upper bound of the unclipped ratio too (two-sided clipping, arXiv 2505.07291)."""
    adv_clip_range: Annotated[float | None, Field(gt=0)] = None
    """Advantages are clamped to plus and minus this."""
    entropy_coef: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.0
    """Weight of the entropy bonus: this times the policy's entropy in nats is subtracted from each token's loss."""
    kl_estimator: Annotated[KLEstimator, Needs("beta")] = "k3"
    """Estimator of KL(policy || reference) (J. Schulman, "Approximating KL divergence"); k3+ has k2's gradient."""
    kl_placement: Annotated[Literal["loss", "reward", "advantage"], Needs("beta")] = "loss"
    """Where ``beta`` times the KL goes."""
    use_kl_advantage_shaping: bool = False
    """Add beta (mean_t kl - kl_t) to the advantages, instead of the KL term of the loss."""
    kl_clamp_value: Annotated[float | None, Field(gt=0), Needs("beta")] = None
    """Cap of a token's KL, in nats; None: no cap."""
    use_bias_correction_kl: Annotated[bool, Needs("beta")] = True
    """Weight the KL in the loss by the importance ratio, which makes its gradient unbiased (arXiv 2512.02556)."""
    kl_target: Annotated[float | None, Field(gt=0)] = None
    """Adapt the weight of the KL until the mean KL of a completion is this, in nats (arXiv 1909.08593), starting
    from ``beta``."""
    kl_horizon: Annotated[int, Field(ge=1), Needs("kl_target")] = 10_000
    """Completions over which ``kl_target`` changes the weight by up to 20 %."""
    vllm_importance_sampling_correction: bool = True
    """Weight tokens by exp(old - sampled) if another engine sampled them (vLLM)."""
    vllm_importance_sampling_cap: Annotated[
        float, Field(gt=0), Needs("network.use_vllm"), Needs("vllm_importance_sampling_correction")
    ] = 2.0
    """Cap of that weight."""
    vllm_importance_sampling_clip_min: Annotated[
        float | None, Field(gt=0), Needs("network.use_vllm"), Needs("vllm_importance_sampling_correction")
    ] = None
    """Lower bound of that weight."""
    vllm_importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "seq_truncate", "seq_mask"],
        Needs("network.use_vllm"),
        Needs("vllm_importance_sampling_correction"),
    ] = "token_truncate"
    """What happens to weights beyond the bounds, and whether each token or each sequence has one."""
    off_policy_token_mask_bounds: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=1)]] | None = (
        None
    )
    """Train only on tokens whose ratio to the policy that sampled them is within (IcePop, arXiv 2510.18855)."""
    off_policy_sequence_mask_threshold: Annotated[float | None, Field(ge=0)] = None
    """Completions with a larger mean log(sampled / current), in nats, do not train tokens with negative advantages
    (arXiv 2512.02556, equation 9)."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        # CISPO has its bounds elsewhere, DPPO has none.
        if self.clip_coef is None:
            return self
        low, high = self.clip_range
        if not 0 <= low < 1 < high:
            raise ValueError(
                f"clip_coef={self.clip_coef} gives the ratio bounds [{low:g}, {high:g}]; expected a number in "
                "(0, 1] or a pair (min, max) of ratios around 1"
            )
        if self.delta is not None and self.delta <= high:
            raise ValueError(
                f"delta={self.delta} must be above the upper clip bound {high:g} (clip_coef={self.clip_coef}), because "
                "it bounds what clipping does not; raise it, or lower clip_coef"
            )
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(f"delta={self.delta} and dual_clip={self.dual_clip} both cap a loss; drop one")
        return self

    @model_validator(mode="after")
    def _weights_have_a_range(self) -> Self:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_cap
        if low is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low:g} must be below vllm_importance_sampling_cap={high:g}; "
                "lower it"
            )
        return self

    @model_validator(mode="after")
    def _kl_settings_agree(self) -> Self:
        if self.kl_target is not None and self.beta == 0:
            raise ValueError(f"kl_target={self.kl_target} adapts the KL's weight, but beta=0 leaves none; set beta")
        if self.ref_sync_steps is not None and self.beta == 0:
            raise ValueError(f"ref_sync_steps={self.ref_sync_steps} moves the reference, unused with beta=0; set beta")
        if self.use_kl_advantage_shaping and self.beta == 0:
            raise ValueError("use_kl_advantage_shaping weighs the KL by beta, but beta=0 leaves none; set beta")
        if self.use_kl_advantage_shaping and self.kl_placement != "loss":
            raise ValueError(f"use_kl_advantage_shaping contradicts kl_placement={self.kl_placement!r}; drop one")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        c = self.clip_coef
        return c if isinstance(c, tuple) else (1 - c, 1 + c)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL, if there is one, is a term of the loss."""
        return self.kl_placement == "loss" and not self.use_kl_advantage_shaping

    @property
    def kl_when_sampled(self) -> bool:
        """Whether the KL of a batch is needed before its update."""
        return self.beta > 0 and (not self.kl_in_loss or self.kl_target is not None)


class PolicyConfig(LLMConfig):
    """Hyperparameters of a policy gradient without a critic; used together with ``SurrogateConfig``."""

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
    adv_filter_eps: Annotated[float, Field(ge=0), Needs("filter_zero_adv")] = 0.0
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
        # Before the fields are checked, which would only call such a name unknown.
        for name in values if isinstance(values, dict) else ():
            if name in _FAMILY_FIELDS and name not in cls.model_fields:
                pinned = getattr(cls, name, None)
                given = f"{name}={values[name]!r}"
                does = f"does not use {name}" if pinned is None else f"fixes {name}={pinned!r}"
                raise ValueError(f"{cls.algorithm} {does}, found {given}; leave it out, or use GRPO({given})")
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
            raise ValueError(f"overlong_cache_tokens={cache} needs max_output_tokens as large, found {limit}")
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
        """How a unit's log-ratios are pooled."""
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
    # With 1e-8 a group whose rewards differ by rounding alone would get advantages of full size.
    adv_eps: Annotated[float, Field(gt=0), Needs("adv_norm", ("mean_std", "batch_std"))] = 1e-4
    """Added to the standard deviation."""
    whiten_advantages: bool = False
    """Give the advantages of all action tokens mean 0 and variance 1. Those of prompts whose completions all earned the
    same stay 0 and do not count."""
    advantage_granularity: Literal["auto", "trajectory", "turn"] = "auto"
    """Unit that is compared within a group; ``auto`` is ``turn`` if the ratio is pooled over turns."""
    turn_advantage_trajectory_fallback: bool = True
    """Turns that fewer than two members of the group played take the trajectory's advantage instead of 0."""
    dynamic_sampling: bool = False
    """Replace groups whose completions all earned the same, which teach nothing, by groups of further prompts (DAPO,
    arXiv 2503.14476)."""
    max_sampling_rounds: Annotated[int, Field(ge=2), Needs("dynamic_sampling")] = 4
    """Most rounds of ``dynamic_sampling``, the first included; groups still missing then stay out of the batch."""

    @model_validator(mode="after")
    def _has_a_group(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves no other completion to compare with, but {self.algorithm}'s "
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
"""Hyperparameters, some of which a member of the family may fix or drop."""


def check_weight_bounds(c: PolicyConfig, low: float | None, high: float) -> None:
    """Raise ValueError if the bounds of CISPO's weight are given twice, or the wrong way round."""
    given = [name for name in ("clip_max", "clip_min") if is_set(c, name)]
    if c.loss_type == "cispo" and is_set(c, "clip_coef") and c.clip_coef is not None and given:
        names = " and ".join(given)
        raise ValueError(f"clip_coef={c.clip_coef} gives both bounds of the weight, found {names} too; drop one")
    if low is not None and low >= high:
        raise ValueError(f"clip_min={low} is not below clip_max={high}; lower it, or leave it out")


# -- schedules: a factor on the current learning rate, so that a mutated rate keeps its position ----------------------


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up, then a cosine down to zero."""

    num_epochs: Count
    """Calls of ``learn`` after which the factor reaches zero."""
    warmup_proportion: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of them spent warming up, in [0, 1)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, update: int) -> float:
        """Return the factor of an update (from 0): (u + 1) / (W + 1) for W updates of warm-up, then (1 + cos) / 2."""
        warmup = self.num_epochs * self.warmup_proportion
        if update < warmup:
            # Neither 0 in the first update nor 1 before the warm-up is over.
            return (update + 1) / (warmup + 1)
        progress = min((update - warmup) / (self.num_epochs - warmup), 1.0)
        return 0.5 * (1 + cos(pi * progress))
