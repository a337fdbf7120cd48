"""Documented import path of the language-model environments."""

from agilerl.envs.preference import PreferenceGym
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.reasoning import ReasoningGym
from agilerl.envs.sft import SFTGym

__all__ = [
    "ConditionalTarget",
    "ConstantTarget",
    "GridNavigation",
    "MultiInputConditional",
    "PreferenceGym",
    "ReasoningGym",
    "SFTGym",
]
