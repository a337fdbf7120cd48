"""Documented import path; re-exports only."""

from agilerl.functional import masked_whiten
from agilerl.training.documented import (
    aggregate_metrics_across_gpus,
    compare_responses,
    create_llm_accelerator,
    sample_eval_prompts,
)

__all__ = ["aggregate_metrics_across_gpus", "compare_responses", "create_llm_accelerator", "masked_whiten",
           "sample_eval_prompts"]  # fmt: skip
