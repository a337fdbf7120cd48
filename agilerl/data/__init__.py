"""Typed containers between the stops of the data: completions, trajectories, batches."""

from agilerl.data.batch import RolloutBatch, collate
from agilerl.data.inputs import LossInputs
from agilerl.data.trajectories import Completion, EpisodeOutcome, Trajectory

__all__ = ["Completion", "EpisodeOutcome", "LossInputs", "RolloutBatch", "Trajectory", "collate"]
