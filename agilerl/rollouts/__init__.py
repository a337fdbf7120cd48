"""Rollouts: prompts and slots in, completions out."""

from agilerl.rollouts.engine import GenerationRequest, RolloutEngine, SamplingSettings

__all__ = ["GenerationRequest", "RolloutEngine", "SamplingSettings"]
