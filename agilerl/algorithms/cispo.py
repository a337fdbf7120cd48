"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, not the update, so no token is left out."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig, check_weight_bounds
from agilerl.functional import LOSS_NORM_ALIASES, LossNorm
from agilerl.hpo.parameters import Evolve


class CISPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of CISPO: GRPO's with the objective fixed."""

    algorithm: ClassVar[str] = "CISPO"
    loss_type: ClassVar[Literal["cispo"]] = "cispo"  # type: ignore[misc]  # fixed: no hyperparameter here
    dual_clip: ClassVar[None] = None  # type: ignore[misc]  # bounds of the clipped surrogate, which is not used
    delta: ClassVar[None] = None  # type: ignore[misc]
    loss_norm: Annotated[LossNorm, BeforeValidator(lambda name: LOSS_NORM_ALIASES.get(str(name), name))] = "token-mean"
    clip_max: Annotated[float, Field(gt=0), Evolve(1.0, 10.0)] = 5.0
    """Cap of the detached importance weight."""
    clip_min: Annotated[float | None, Field(ge=0)] = None
    """Floor of the weight; None: no floor."""
    clip_coef: Annotated[float | tuple[float, float] | None, Evolve(0.05, 0.5)] = None  # type: ignore[assignment]
    """Both bounds of the weight at once, instead of ``clip_max`` and ``clip_min``: c means [1 - c, 1 + c]."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        check_weight_bounds(self, self.clip_min, self.clip_max)
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the detached importance weight."""
        return (self.clip_min or 0.0, self.clip_max) if self.clip_coef is None else super().clip_range
