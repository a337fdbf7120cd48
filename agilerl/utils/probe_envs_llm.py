"""Documented import path; re-exports only."""

from agilerl.envs.probes import ConditionalTargetEnv, ConstantTargetEnv, GridNavigationEnv, MultiInputConditionalEnv

__all__ = ["ConditionalTargetEnv", "ConstantTargetEnv", "GridNavigationEnv", "MultiInputConditionalEnv"]
