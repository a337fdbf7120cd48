"""Documented import path; re-exports only."""

from agilerl.algorithms.schedules import CosineLRScheduleConfig

__all__ = ["CosineLRScheduleConfig"]
