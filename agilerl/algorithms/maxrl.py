"""MaxRL (arXiv 2602.02710): the likelihood of success, not its expectation; what rarely succeeds weighs more."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.algorithms.grpo import GRPO, PolicyAlgorithm
from agilerl.algorithms.keywords import MaxRLKeywords


class MaxRLConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of MaxRL: GRPO's with the divisor of the advantages fixed."""

    algorithm: ClassVar[str] = "MaxRL"
    loss_type: ClassVar[Literal["grpo"]] = "grpo"  # type: ignore[misc]  # fixed: no hyperparameters here
    adv_norm: ClassVar[Literal["mean"]] = "mean"  # type: ignore[misc]
    # group_credit passes it on with every norm, although this one does not use it.
    adv_eps: ClassVar[float] = 1e-4  # type: ignore[misc]


class MaxRL(GRPO):
    """GRPO with the advantage ``(r - mean_g) / mean_g``, the group's mean instead of its standard deviation.

    With rewards of 0 and 1 and G samples this is the gradient of log p truncated at its G-th order: the rarer the
    success, the larger the step. A group whose mean is not above 0 teaches nothing, so rewards should not be negative.
    """

    algorithm = PolicyAlgorithm("MaxRL", MaxRLConfig)

    if TYPE_CHECKING:  # at run time the keywords are what ``MaxRLConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[MaxRLKeywords]) -> None: ...
