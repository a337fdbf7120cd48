"""agilerl: evolutionary hyperparameter search in reinforcement learning of language models."""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Imported for its effect: it puts other packages' names into agilerl.hooks.
from agilerl import compat as compat

# mixed_installation() asks the imported package for this name, which another project's does not have.
from agilerl.errors import DISTRIBUTION as DISTRIBUTION
from agilerl.errors import mixed_installation

if TYPE_CHECKING:
    from agilerl.algorithms import (
        CISPO,
        DPO,
        DPPO,
        GRPO,
        GSPO,
        KTO,
        LLMPPO,
        LLMREINFORCE,
        PPO,
        REINFORCE,
        RLOO,
        SFT,
        MaxRL,
        PolicyLoss,
    )
    from agilerl.envs.episode_task import EpisodeTask
    from agilerl.envs.examples import PreferenceTask, SFTTask, UnpairedTask
    from agilerl.envs.procedural import ReasoningGymTask
    from agilerl.hpo.mutation import Mutations
    from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
    from agilerl.hpo.tournament import TournamentSelection
    from agilerl.population import Population
    from agilerl.run import Run, train
    from agilerl.runtime import Runtime
    from agilerl.training.saved import load
    from agilerl.training.trainer import LocalTrainer

    HAS_ARENA_DEPENDENCIES: bool
    HAS_DEEPSPEED: bool
    HAS_LIGER_KERNEL: bool
    HAS_LLM_DEPENDENCIES: bool
    HAS_VLLM: bool

__version__ = "0.1.0"

if _mixed := mixed_installation():
    warnings.warn(_mixed, stacklevel=2)

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "EpisodeTask",
    "GRPO",
    "GSPO",
    "HAS_ARENA_DEPENDENCIES",
    "HAS_DEEPSPEED",
    "HAS_LIGER_KERNEL",
    "HAS_LLM_DEPENDENCIES",
    "HAS_VLLM",
    "HyperparameterConfig",
    "KTO",
    "LLMPPO",
    "LLMREINFORCE",
    "LocalTrainer",
    "MaxRL",
    "Mutations",
    "PPO",
    "PolicyLoss",
    "Population",
    "PreferenceTask",
    "REINFORCE",
    "RLOO",
    "RLParameter",
    "ReasoningGymTask",
    "Run",
    "Runtime",
    "SFT",
    "SFTTask",
    "TournamentSelection",
    "train",
    "UnpairedTask",
    "load",
]

_HOMES = {
    "EpisodeTask": "agilerl.envs.episode_task",
    "HyperparameterConfig": "agilerl.hpo.parameters",
    "LocalTrainer": "agilerl.training.trainer",
    "Mutations": "agilerl.hpo.mutation",
    "Population": "agilerl.population",
    "PreferenceTask": "agilerl.envs.examples",
    "RLParameter": "agilerl.hpo.parameters",
    "ReasoningGymTask": "agilerl.envs.procedural",
    "Run": "agilerl.run",
    "Runtime": "agilerl.runtime",
    "SFTTask": "agilerl.envs.examples",
    "TournamentSelection": "agilerl.hpo.tournament",
    "train": "agilerl.run",
    "UnpairedTask": "agilerl.envs.examples",
    "load": "agilerl.training.saved",
}
"""Where the public names are that are not in ``agilerl.algorithms``."""

_FLAGS = {
    "HAS_ARENA_DEPENDENCIES": "agilerl.arena",
    "HAS_DEEPSPEED": "deepspeed",
    "HAS_LIGER_KERNEL": "liger_kernel",
    "HAS_LLM_DEPENDENCIES": "transformers",
    "HAS_VLLM": "vllm",
}
"""Documented flags, with the package that each says to be installed; AgileRL's Arena is not part of this one."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import agilerl`` is fast."""
    if name in _FLAGS:
        # Only looked for: importing some of these takes seconds.
        return find_spec(_FLAGS[name]) is not None
    if name not in __all__:
        raise AttributeError(f"module 'agilerl' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "agilerl.algorithms")), name)


def __dir__() -> list[str]:
    """List the public names, including those not imported yet."""
    return [*__all__, "__version__"]
