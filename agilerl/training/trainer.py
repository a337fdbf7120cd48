"""Documented import path; re-exports only."""

from agilerl.compat.trainer import LocalTrainer

__all__ = ["LocalTrainer"]
