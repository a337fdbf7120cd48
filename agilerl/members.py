"""The members of a population: whether they and their task fit together, and how each of them is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.from_data import DataAlgorithm
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import DataTask
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import Vitals, collapsed, quarantined
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Gene, Value
from agilerl.hpo.selection import Plan

__all__ = ["Checkup", "Evolution", "Known", "check_source", "own_weights", "sick_members"]


class Known(Protocol):
    """What everybody may know of an agent, wherever it lives."""

    @property
    def index(self) -> int:
        """Its number in the run."""
        ...

    @property
    def parent(self) -> int | None:
        """Whom it was cloned from."""
        ...

    @property
    def mut(self) -> str:
        """What its last mutation did."""
        ...

    @property
    def tokens(self) -> Mapping[str, int]:
        """What it has spent."""
        ...

    @property
    def genes(self) -> Mapping[str, Gene]:
        """Genes in force."""
        ...

    @property
    def hyperparameters(self) -> Mapping[str, Value]:
        """Value of each gene."""
        ...


@dataclass
class Evolution:
    """What one generation change did."""

    plan: Plan
    mutations: list[Mutation]
    """One for each agent of the new population."""
    inherited: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Gene values each child was born with, before its own mutation."""
    sick: dict[int, str] = field(default_factory=dict)
    """Agents that could be neither elite nor parent, and why."""


@dataclass(frozen=True)
class Checkup:
    """How an agent is."""

    sick: str
    """Why it may be no parent; empty where it is sound."""
    vitals: Vitals
    """What its samples were like since the last selection."""
    weights: Mapping[str, float]
    """Its own weights for parts of the reward: rewards under others are no measure for it."""

    @classmethod
    def of(cls, agent: LLMAlgorithm) -> "Checkup":
        """Examine an agent."""
        return cls(agent.sick, agent.present_vitals(), own_weights(agent))


def sick_members(
    checkups: Mapping[int, Checkup], fitness: Mapping[int, Fitness], *, collapse_guard: bool
) -> dict[int, str]:
    """Return who is neither elite nor parent at a selection by this fitness, whatever it says, and why."""
    sick = {index: checkup.sick for index, checkup in checkups.items() if checkup.sick}
    elite = ranking(quarantined(fitness, sick))[0]
    if not collapse_guard or elite in sick:
        return sick
    weights = checkups[elite].weights
    vitals = {
        index: checkup.vitals if checkup.weights == weights else replace(checkup.vitals, reward=(), reward_before=())
        for index, checkup in checkups.items()
        if index not in sick
    }
    return sick | collapsed(vitals, elite)


def check_source(agents: Sequence[LLMAlgorithm], task: Task | EpisodeTask) -> None:
    """Raise ConfigError unless the agents learn from one kind of source, and the task is one."""
    wanted = {agent.env_type if isinstance(agent, DataAlgorithm) else "reasoning" for agent in agents}
    if len(wanted) > 1:
        raise ConfigError(f"all agents of a population learn from the same source, found {', '.join(sorted(wanted))}")
    (kind,) = wanted
    if kind != "reasoning" and (not isinstance(task, DataTask) or task.kind != kind):
        name = {"sft": "SFTTask", "preference": "PreferenceTask"}[kind]
        raise ConfigError(
            f"{agents[0].algorithm.name} learns from data, found the task {task.name!r} ({type(task).__name__}); wrap "
            f"it: {name}(task)"
        )


def own_weights(agent: LLMAlgorithm) -> Mapping[str, float]:
    """Return the weights that an agent has for parts of the reward; none where it learns from data."""
    weights: Mapping[str, float] = getattr(agent.config, "reward_weights", {})
    return weights
