"""agilerl: evolutionary hyperparameter search in reinforcement learning of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agilerl.algorithms import GRPO
    from agilerl.envs.procedural import ReasoningGymTask
    from agilerl.hpo.mutation import Mutations
    from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
    from agilerl.hpo.tournament import TournamentSelection
    from agilerl.population import Population
    from agilerl.runtime import Runtime

__version__ = "0.1.0"

__all__ = [
    "GRPO",
    "HyperparameterConfig",
    "Mutations",
    "Population",
    "RLParameter",
    "ReasoningGymTask",
    "Runtime",
    "TournamentSelection",
]

_HOMES = {
    "GRPO": "agilerl.algorithms",
    "HyperparameterConfig": "agilerl.hpo.parameters",
    "Mutations": "agilerl.hpo.mutation",
    "Population": "agilerl.population",
    "RLParameter": "agilerl.hpo.parameters",
    "ReasoningGymTask": "agilerl.envs.procedural",
    "Runtime": "agilerl.runtime",
    "TournamentSelection": "agilerl.hpo.tournament",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import agilerl`` itself is light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'agilerl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
