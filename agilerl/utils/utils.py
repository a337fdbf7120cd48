"""Documented import path; re-exports only."""

from agilerl.algorithms.codec import save_llm_checkpoint
from agilerl.compat.helpers import (
    aggregate_metrics_across_gpus,
    create_population,
    run_selection_and_mutation,
    tournament_selection_and_mutation,
)

__all__ = ["aggregate_metrics_across_gpus", "create_population", "run_selection_and_mutation", "save_llm_checkpoint",
           "tournament_selection_and_mutation"]  # fmt: skip
