"""Documented import path of the language-model environments."""

from agilerl.compat.gyms import PreferenceGym, ReasoningGym, SFTGym, UnpairedGym
from agilerl.compat.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.tools import FormatRewardWrapper, SearchTool

__all__ = ["FormatRewardWrapper", "PreferenceGym", "ReasoningGym", "SFTGym", "SearchTool", "SyncMultiTurnVecEnv",
           "TokenObservationWrapper", "UnpairedGym"]  # fmt: skip
