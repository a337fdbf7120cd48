"""Documented import path; re-exports only."""

from agilerl.hpo.parameters import HyperparameterConfig, RLParameter

__all__ = ["HyperparameterConfig", "RLParameter"]
