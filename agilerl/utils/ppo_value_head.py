"""Documented import path; re-exports only."""

from agilerl.training.documented import AutoModelForCausalLMWithValueHead

__all__ = ["AutoModelForCausalLMWithValueHead"]
