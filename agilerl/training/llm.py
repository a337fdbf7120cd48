"""Documented import path; re-exports only."""

from agilerl.training.loops import (
    finetune_llm_multiturn,
    finetune_llm_preference,
    finetune_llm_reasoning,
    finetune_llm_sft,
)

__all__ = ["finetune_llm_multiturn", "finetune_llm_preference", "finetune_llm_reasoning", "finetune_llm_sft"]
