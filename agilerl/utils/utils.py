"""Documented import path; re-exports only."""

from agilerl.algorithms.codec import save_llm_checkpoint

__all__ = ["save_llm_checkpoint"]
