"""Documented import path of the language-model environments."""

from agilerl.envs.gyms import PreferenceGym, ReasoningGym, SFTGym
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.tools import FormatRewardWrapper, SearchTool

__all__ = ["ConditionalTarget", "ConstantTarget", "FormatRewardWrapper", "GridNavigation", "MultiInputConditional",
           "PreferenceGym", "ReasoningGym", "SFTGym", "SearchTool", "SyncMultiTurnVecEnv",
           "TokenObservationWrapper"]  # fmt: skip
