"""Documented import path; re-exports only."""

from agilerl.training.local_trainer import LocalTrainer

__all__ = ["LocalTrainer"]
