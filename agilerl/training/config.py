"""Documented import path; re-exports only."""

from agilerl.config.base_model import NetworkConfig
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.manifest import config_of_run, load_manifest
from agilerl.config.run import RunConfig
from agilerl.config.search import MutationConfig, SelectionConfig
from agilerl.config.training import TrainingConfig

__all__ = ["EnvironmentConfig", "MutationConfig", "NetworkConfig", "RunConfig", "SelectionConfig", "TrainingConfig",
           "config_of_run", "load_manifest"]  # fmt: skip
