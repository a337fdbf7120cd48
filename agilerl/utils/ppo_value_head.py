"""Documented import path; re-exports only."""

from agilerl.compat.helpers import AutoModelForCausalLMWithValueHead

__all__ = ["AutoModelForCausalLMWithValueHead"]
