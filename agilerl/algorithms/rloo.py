"""REINFORCE Leave-One-Out (arXiv 2402.14740): a completion is one action, the others of its prompt are its baseline."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from agilerl.algorithms.config import GroupConfig, PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.checks.validation import Needs
from agilerl.functional import KLEstimator, PoolingLevel


class RLOOConfig(GroupConfig, PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of RLOO."""

    algorithm: ClassVar[str] = "RLOO"
    loss_type: ClassVar[Literal["grpo"]] = "grpo"  # type: ignore[misc]  # fixed: no hyperparameters here
    adv_norm: ClassVar[Literal["rloo"]] = "rloo"  # type: ignore[misc]
    # group_credit passes it on with every norm, although this one does not use it.
    adv_eps: ClassVar[float] = 1e-4  # type: ignore[misc]
    kl_estimator: Annotated[KLEstimator, Needs("beta")] = "k1"
    """Estimator of KL(policy || reference); k1's sum over a completion is its log-ratio, as in the paper."""
    kl_placement: Annotated[Literal["loss", "reward", "advantage"], Needs("beta")] = "reward"
    """Where ``beta`` times the KL goes."""

    @model_validator(mode="after")
    def _acts_once(self) -> Self:
        if self.importance_sampling_level not in (None, "trajectory"):
            raise ValueError(
                "RLOO takes a completion as one action, so its ratio is that of the trajectory; found "
                f"importance_sampling_level={self.importance_sampling_level!r}; leave it out, or use GRPO"
            )
        return self

    @property
    def ratio_level(self) -> PoolingLevel:
        """Unit over which log-ratios are pooled."""
        return "trajectory"

    @property
    def pooling(self) -> Literal["sum"]:
        """How a unit's log-ratios are pooled: summed, so that the ratio is that of the completions' probabilities."""
        return "sum"
