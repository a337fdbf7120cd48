"""Documented import path; re-exports only."""

from agilerl.config.base_model import NetworkConfig
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.manifest import load_manifest
from agilerl.config.run import MutationConfig, RunConfig, SelectionConfig, TrainingConfig

__all__ = ["EnvironmentConfig", "MutationConfig", "NetworkConfig", "RunConfig", "SelectionConfig", "TrainingConfig",
           "load_manifest"]  # fmt: skip
