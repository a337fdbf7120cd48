"""Typed containers between the stops of the data: completions, trajectories, batches."""

from agilerl.data.batch import RolloutBatch, collate
from agilerl.data.inputs import LossInputs
from agilerl.data.trajectories import Completion, Trajectory

__all__ = ["Completion", "LossInputs", "RolloutBatch", "Trajectory", "collate"]
