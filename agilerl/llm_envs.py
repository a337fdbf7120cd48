"""Documented import path of the language-model environments."""

from agilerl.envs.examples import PreferenceGym, SFTGym
from agilerl.envs.gyms import ReasoningGym, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.tools import FormatRewardWrapper, SearchTool

__all__ = ["ConditionalTarget", "ConstantTarget", "FormatRewardWrapper", "GridNavigation", "MultiInputConditional",
           "PreferenceGym", "ReasoningGym", "SFTGym", "SearchTool", "SyncMultiTurnVecEnv",
           "TokenObservationWrapper"]  # fmt: skip
