"""DPPO (arXiv 2602.04879): a trust region around the policy instead of bounds of each token's ratio."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.algorithms.objective import PolicyParts
from agilerl.functional import Divergence
from agilerl.hpo.parameters import Evolve


class DPPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of DPPO: GRPO's without the bounds of the ratio."""

    algorithm: ClassVar[str] = "DPPO"
    loss_type: ClassVar[Literal["grpo"]] = "grpo"  # type: ignore[misc]  # fixed: no hyperparameters here
    importance_sampling_level: ClassVar[Literal["token"]] = "token"  # type: ignore[misc]
    clip_coef: ClassVar[None] = None  # type: ignore[misc, assignment]  # of the clipped surrogate, which is not used
    dual_clip: ClassVar[None] = None  # type: ignore[misc]
    delta: ClassVar[None] = None  # type: ignore[misc]
    divergence: Divergence = "tv"
    """Distance of the policy from the one that sampled, for a token against all others: total variation, or KL."""
    divergence_limit: Annotated[float, Field(gt=0), Evolve(0.01, 0.5)] = 0.2
    """A token further away than this stops moving away: a probability (``tv``), or nats (``kl``)."""
    weight_max: Annotated[float, Field(ge=1)] = 20.0
    """Cap of the detached importance weight."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Bounds for a custom loss that asks for some; DPPO itself has none."""
        return 0.8, 1.2


def dppo_parts(c: DPPOConfig, kl_coef: float) -> PolicyParts:
    """Return the objective's parts: tokens that moved too far do not count, and no bound stops a ratio."""
    bounds = {"divergence": c.divergence, "divergence_limit": c.divergence_limit, "weight_max": c.weight_max}
    return PolicyParts.of(c, kl_coef, ratio="token", surrogate="dppo", aggregation=c.loss_norm, **bounds)
