"""Documented import path; re-exports only."""

from agilerl.compat.helpers import (
    aggregate_metrics_across_gpus,
    compare_responses,
    create_llm_accelerator,
    sample_eval_prompts,
)

__all__ = ["aggregate_metrics_across_gpus", "compare_responses", "create_llm_accelerator",
           "sample_eval_prompts"]  # fmt: skip
