"""Documented import path of the language-model environments."""

from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.reasoning import ReasoningGym

__all__ = ["ConditionalTarget", "ConstantTarget", "GridNavigation", "MultiInputConditional", "ReasoningGym"]
