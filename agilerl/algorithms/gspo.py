"""Group Sequence Policy Optimization (arXiv 2507.18071): GRPO with the importance ratio of whole completions."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.algorithms.grpo import GRPO, PolicyAlgorithm
from agilerl.algorithms.keywords import GSPOKeywords
from agilerl.hpo.parameters import Evolve


class GSPOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of GSPO: GRPO's with the objective fixed."""

    algorithm: ClassVar[str] = "GSPO"
    loss_type: ClassVar[Literal["gspo"]] = "gspo"  # type: ignore[misc]  # fixed: no hyperparameter here
    clip_coef: Annotated[float | tuple[float, float], Evolve(1e-4, 0.5)] = (1 - 3e-4, 1 + 4e-4)
    """Bounds of the ratio: c means [1 - c, 1 + c], a pair gives both. They are narrow, as in the paper: a
    completion's mean log-ratio moves less than a token's."""


class GSPO(GRPO):
    """GRPO with the ratio ``exp(mean_t (pi - old))`` of the trajectory: all tokens of a completion clip together.

    Advantages and objective are GRPO's, with ``loss_type="gspo"``.
    """

    algorithm = PolicyAlgorithm("GSPO", GSPOConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``GSPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[GSPOKeywords]) -> None: ...
