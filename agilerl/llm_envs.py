"""Documented import path of the language-model environments."""

from agilerl.compat.gyms import DatasetEnv, PreferenceGym, ReasoningGym, SFTGym, UnpairedGym
from agilerl.compat.tokenized import RolloutEnv, RolloutHarness, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.tools import FormatRewardWrapper, SearchTool

__all__ = ["DatasetEnv", "FormatRewardWrapper", "PreferenceGym", "ReasoningGym", "RolloutEnv", "RolloutHarness",
           "SFTGym", "SearchTool", "SyncMultiTurnVecEnv", "TokenObservationWrapper", "UnpairedGym"]  # fmt: skip
