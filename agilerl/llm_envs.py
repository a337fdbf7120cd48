"""Documented import path of the language-model environments."""

from agilerl.envs.preference import PreferenceGym
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.reasoning import ReasoningGym
from agilerl.envs.sft import SFTGym
from agilerl.envs.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.tools import FormatRewardWrapper, SearchTool

__all__ = ["ConditionalTarget", "ConstantTarget", "FormatRewardWrapper", "GridNavigation", "MultiInputConditional",
           "PreferenceGym", "ReasoningGym", "SFTGym", "SearchTool", "SyncMultiTurnVecEnv",
           "TokenObservationWrapper"]  # fmt: skip
