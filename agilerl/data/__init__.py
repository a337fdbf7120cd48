"""Typed containers for the data on its way from rollout to loss: completions, trajectories, batches."""

from agilerl.data.batch import LossInputs, RolloutBatch, collate
from agilerl.data.cutting import MicroBatch, cut
from agilerl.data.trajectories import Completion, EpisodeOutcome, Trajectory

__all__ = ["Completion", "EpisodeOutcome", "LossInputs", "MicroBatch", "RolloutBatch", "Trajectory", "collate", "cut"]
