"""Documented import path; re-exports only."""

from agilerl.algorithms.schedules import CosineLRScheduleConfig
from agilerl.vllm_config import VLLMConfig

__all__ = ["CosineLRScheduleConfig", "VLLMConfig"]
