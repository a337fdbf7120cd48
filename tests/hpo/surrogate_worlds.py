"""Worlds of numbers in which a search is judged in milliseconds: agents have a skill, and a learning rate earns it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Member, Mutations
from agilerl.hpo.parameters import Gene
from agilerl.hpo.selection import SelectionStrategy
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.streams import stream

PROMPTS = 32
BEST_LR = 1e-5
LR = Gene("lr", "float", min=1e-7, max=1e-3)
DOCUMENTED_LR = Gene("lr", "float", min=1e-7, max=1e-3, factors=(0.8, 1.2))
"""The original's kernel: times 0.8 or 1.2."""


@dataclass(frozen=True)
class World:
    """``train`` maps (skill, learning rate) to the skill after one interval, ``exam`` to what the exam sees of it."""

    train: Callable[[float, float], float]
    exam: Callable[[float, float], float] = lambda skill, lr: skill
    noise: float = 0.02
    """Standard error of the exam's mean."""
    default_lr: float = 1e-6


def _gain(lr: float) -> float:
    return 0.12 * math.exp(-0.5 * (math.log10(lr / BEST_LR) / 0.5) ** 2)


def _learn(skill: float, lr: float) -> float:
    """Close a share of the distance to 1 that depends on the learning rate; one far too high unlearns."""
    return skill + _gain(lr) * (1 - skill) if lr < 3e-4 else 0.8 * skill


def hunt(noise: float, default_lr: float = 1e-6) -> World:
    """The default is a decade below the best learning rate."""
    return World(_learn, noise=noise, default_lr=default_lr)


def greedy_trap(noise: float = 0.02) -> World:
    """A low learning rate looks better at once (less update noise in the exam), and stops the learning.

    The exam pays up to 0.3 for a learning rate two decades below the best one: more than an interval can earn.
    """
    bonus = lambda lr: 0.15 * min(max(-math.log10(lr / BEST_LR), -2.0), 2.0)  # noqa: E731
    return World(_learn, lambda skill, lr: skill + bonus(lr), noise, default_lr=BEST_LR)


@dataclass
class Outcome:
    """What a search did in a world."""

    shipped: float = math.nan
    """True skill of the last elite."""
    best_lr: float = math.nan
    """Learning rate of the last elite."""


def search(
    world: World,
    strategy: SelectionStrategy,
    mutations: Mutations | None,
    seed: int,
    *,
    size: int = 8,
    generations: int = 16,
    init: str = "spread",
    gene: Gene = LR,
    mutate_all: bool = False,
) -> Outcome:
    """Run the whole loop (spread, train, exam, plan, clone, mutate) on plain numbers.

    ``mutate_all``: everyone but the elite is open to mutation, as in the original, instead of the plan's mutants.
    """
    genes = {"lr": gene}
    founders = initial_hyperparameters(genes, {"lr": world.default_lr}, size, seed, init)
    agents: dict[int, tuple[float, float]] = {i: (0.0, float(v["lr"])) for i, v in enumerate(founders)}
    following, outcome = size, Outcome()
    for generation in range(generations):
        agents = {i: (world.train(skill, lr), lr) for i, (skill, lr) in agents.items()}
        fitness = _exams(world, agents, seed, generation)
        plan = strategy.plan(fitness, generation, seed, following)
        outcome.shipped, outcome.best_lr = agents[plan.elite]
        born = {b.child: _clone(agents, b.parent, b.hyperparameters_from) for b in plan.births}
        agents = {i: born[i] if i in born else agents[i] for i in plan.slots}
        following += len(plan.births)
        if mutations is not None:
            members = [Member(i, {"lr": lr}, genes) for i, (_, lr) in agents.items()]
            nominated = None if mutate_all else plan.mutants
            for mutation in mutations.plan(members, plan.elite, generation, seed, nominated):
                for change in mutation.changes:
                    agents[mutation.agent] = (agents[mutation.agent][0], float(change.new))
    return outcome


def _exams(world: World, agents: dict[int, tuple[float, float]], seed: int, generation: int) -> dict[int, Fitness]:
    noise = stream(seed, "exam", generation).standard_normal((len(agents), PROMPTS)) * world.noise * math.sqrt(PROMPTS)
    return {i: Fitness.from_scores(world.exam(*agents[i]) + row) for i, row in zip(agents, noise, strict=True)}


def _clone(agents: Mapping[int, tuple[float, float]], parent: int, donor: int | None) -> tuple[float, float]:
    return agents[parent][0], agents[parent if donor is None else donor][1]


def mean_shipped(outcomes: list[Outcome]) -> float:
    return float(np.mean([outcome.shipped for outcome in outcomes]))
