"""Group Sequence Policy Optimization (arXiv 2507.18071): GRPO with the importance ratio of whole completions."""

from typing import Annotated, ClassVar, Literal

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.hpo.parameters import Evolve


class GSPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of GSPO: GRPO's with the objective fixed."""

    algorithm: ClassVar[str] = "GSPO"
    loss_type: ClassVar[Literal["gspo"]] = "gspo"  # type: ignore[misc]  # fixed: no hyperparameter here
    clip_coef: Annotated[float | tuple[float, float], Evolve(1e-4, 0.5)] = (1 - 3e-4, 1 + 4e-4)
    """Bounds of the ratio: c means [1 - c, 1 + c], a pair gives both. They are narrow, as in the paper: a
    completion's mean log-ratio moves less than a token's."""
