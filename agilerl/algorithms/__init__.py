"""Algorithms: one a file, all on the shared base."""

from agilerl.algorithms.base import EvolvableAlgorithm
from agilerl.algorithms.grpo import GRPO, GRPOConfig
from agilerl.algorithms.llm import LLMAlgorithm
from agilerl.algorithms.schedules import CosineLRScheduleConfig

__all__ = ["ALGORITHMS", "GRPO", "CosineLRScheduleConfig", "EvolvableAlgorithm", "GRPOConfig", "LLMAlgorithm"]

ALGORITHMS: dict[str, type[LLMAlgorithm]] = {"GRPO": GRPO}
"""Algorithms by the name that a manifest uses; to add one, pass your class where a name is expected."""
