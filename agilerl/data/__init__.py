"""Typed containers for the data on its way from rollout to loss: completions, trajectories, batches."""

from agilerl.data.batch import (
    Completion,
    EpisodeOutcome,
    LossInputs,
    MicroBatch,
    RolloutBatch,
    Trajectory,
    collate,
    cut,
    cut_for_training,
)

__all__ = [
    "Completion",
    "EpisodeOutcome",
    "LossInputs",
    "MicroBatch",
    "RolloutBatch",
    "Trajectory",
    "collate",
    "cut",
    "cut_for_training",
]
