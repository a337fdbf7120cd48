"""Documented import path; re-exports only."""

from agilerl.algorithms.state import save_llm_checkpoint

__all__ = ["save_llm_checkpoint"]
