"""MaxRL (arXiv 2602.02710): the likelihood of success, not its expectation; what rarely succeeds weighs more."""

from typing import ClassVar, Literal

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig


class MaxRLConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of MaxRL: GRPO's with the divisor of the advantages fixed."""

    algorithm: ClassVar[str] = "MaxRL"
    loss_type: ClassVar[Literal["grpo"]] = "grpo"  # type: ignore[misc]  # fixed: no hyperparameters here
    adv_norm: ClassVar[Literal["mean"]] = "mean"  # type: ignore[misc]
    # group_credit passes it on with every norm, although this one does not use it.
    adv_eps: ClassVar[float] = 1e-4  # type: ignore[misc]
