"""Documented import path; re-exports only."""

from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.config.vllm import VLLMConfig

__all__ = ["CosineLRScheduleConfig", "VLLMConfig"]
