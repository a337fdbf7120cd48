"""What clipped policy gradients share, with a critic or without: bounds of the ratio, the KL and its weight."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.llm_config import LLMConfig
from agilerl.functional import KLEstimator, adaptive_kl_coefficient, kl_estimate, masked_sum
from agilerl.hpo.parameters import Evolve

__all__ = ["AdaptiveKL", "SurrogateConfig"]


class SurrogateConfig(LLMConfig):
    """Hyperparameters of a clipped policy gradient; stands beside ``RolloutLLMConfig`` in its algorithms."""

    beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.001
    """Weight of the KL term; 0 skips the reference forward."""
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

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
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
                f"delta={self.delta} bounds the ratio where the upper clip bound {high:g} (clip_coef={self.clip_coef}) "
                "does not, so it lies above that; raise it, or lower clip_coef"
            )
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(
                f"delta={self.delta} and dual_clip={self.dual_clip} both cap the loss of negative advantages; drop one"
            )
        return self

    @model_validator(mode="after")
    def _kl_settings_agree(self) -> Self:
        if self.kl_target is not None and self.beta == 0:
            raise ValueError(
                f"kl_target={self.kl_target} adapts the weight of the KL, but beta=0 leaves none; set beta"
            )
        if self.use_kl_advantage_shaping and self.beta == 0:
            raise ValueError("use_kl_advantage_shaping weighs the KL by beta, but beta=0 leaves none; set beta")
        if self.use_kl_advantage_shaping and self.kl_placement != "loss":
            raise ValueError(
                "use_kl_advantage_shaping takes the place of the KL in the loss, found "
                f"kl_placement={self.kl_placement!r}; drop one of them"
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        c = self.clip_coef
        return c if isinstance(c, tuple) else (1 - c, 1 + c)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss, where there is one."""
        return self.kl_placement == "loss" and not self.use_kl_advantage_shaping

    @property
    def kl_when_sampled(self) -> bool:
        """Whether the KL of a batch is needed before its update."""
        return self.beta > 0 and (not self.kl_in_loss or self.kl_target is not None)


class AdaptiveKL:
    """The weight of an agent's KL: ``beta``, or what ``kl_target`` has made of it."""

    if TYPE_CHECKING:
        config: SurrogateConfig

    kl_scale: float = 1.0
    """Factor on ``beta`` that ``kl_target`` has found so far."""

    @property
    def kl_coef(self) -> float:
        """Weight of the KL: ``beta``, adapted to ``kl_target`` where there is one."""
        return self.config.beta * self.kl_scale

    def sampled_kl(self, old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        """Return the detached KL ``[B, L]`` of what was sampled, having adapted its weight to it; on the CPU."""
        c, before, base, mask = self.config, old.cpu(), ref.cpu(), mask.cpu()
        self._adapt(masked_sum(before - base, mask, -1))
        return kl_estimate(before, base, c.kl_estimator, c.kl_clamp_value, mask=mask)

    def _adapt(self, kl: Tensor) -> None:
        """Move the weight by what the KL ``[B]`` of this batch's completions says, before it is used."""
        c = self.config
        if c.kl_target is None or not len(kl):
            return
        samples = min(len(kl), c.kl_horizon)  # more than a horizon at once could turn the weight negative
        mean = float(kl.double().mean())
        self.kl_scale = adaptive_kl_coefficient(
            self.kl_scale, mean, c.kl_target, horizon=float(c.kl_horizon), samples=samples
        )
