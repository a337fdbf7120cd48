"""Worlds of numbers in which a whole search takes milliseconds, and the table of all strategies in them.

Run: python -m benchmarking.surrogates [--seeds 60] [--arms ...] [--worlds ...]

An agent has progress, which its hyperparameters earn, and a skill that follows from it: the chance that it solves a
prompt. The strategies, the mutations, the start and the schedule are the real ones of ``agilerl.hpo``; only training
and exams are replaced by numbers. Every search has the same budget of tokens, exams included.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtri

from agilerl.hpo.fitness import Fitness, probability_better, ranking
from agilerl.hpo.knockout import KnockoutSelection, Pace, PulseSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.mutation import Member, Mutation, Mutations
from agilerl.hpo.parameters import Gene, Value
from agilerl.hpo.selection import (
    Best,
    NoSelection,
    SelectionStrategy,
    Standing,
    TruncationSelection,
    apply_plan,
    with_factors,
)
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.hpo.strategies import LRSchedule
from agilerl.hpo.tournament import TournamentSelection
from agilerl.streams import stream

PROMPTS = 128
EXAM = 0.003
"""Cost of an agent's exam, as a share of the budget."""
STEPS = 4
"""Updates of a generation."""
ALIKE = 0.6
"""Correlation of two agents of equal skill on one prompt: what pairing gains."""
CANDIDATE = 0.8
"""As ``agilerl.training.loop.CANDIDATE``, which needs torch."""
RIGHT = 1e-3
HARD = (1e-6, 1e-1)
"""The range that a learning rate may ever reach."""


@dataclass
class Agent:
    """What selection and mutation know about an agent, and what only the world knows."""

    index: int
    hyperparameters: dict[str, Value]
    genes: Mapping[str, Gene]
    progress: float = 0.0
    damage: float = 0.0
    rank: int = 0
    mut: str = "none"
    fitness: list[float] = field(default_factory=list)

    def apply_mutation(self, mutation: Mutation) -> None:
        """Change the values as planned."""
        self.mut = mutation.kind
        self.hyperparameters |= {change.gene: change.new for change in mutation.changes}

    def clone(self, index: int) -> "Agent":
        """Return an independent copy."""
        return replace(self, index=index, hyperparameters=dict(self.hyperparameters), fitness=[])


@dataclass(frozen=True)
class World:
    """How fast an agent learns, and what it can do with what it has learned."""

    speed: Callable[[float, Agent], float]
    """Progress in the time of a whole budget at (learning rate, agent)."""
    solved: Callable[[float], float] = lambda progress: 1 - math.exp(-progress)
    """Skill at a progress, before noise and damage."""
    shake: float = 0.0
    """Skill lost while the learning rate is RIGHT; grows with its square root, returns when it falls."""
    cliff: float = 1e-2
    """Learning rate above which an agent breaks."""
    genes: tuple[str, ...] = ()
    """Genes besides the learning rate, each with 1 as the user's value."""

    def train(self, agent: Agent, factor: float, time: float) -> None:
        """Train for a share of the budget's time."""
        lr = float(agent.hyperparameters["lr"]) * factor
        if lr > self.cliff:
            agent.damage += 40 * time * math.log10(10 * lr / self.cliff)
        agent.progress += time * self.speed(lr, agent) * math.exp(-agent.damage)

    def skill(self, agent: Agent, factor: float) -> float:
        """Return the chance to solve a prompt; NaN for an agent that is beyond repair."""
        if agent.damage > 8:
            return math.nan
        lr = float(agent.hyperparameters["lr"]) * factor
        whole = 0.05 + 0.9 * self.solved(agent.progress) - self.shake * math.sqrt(lr / RIGHT)
        return min(max(whole * math.exp(-agent.damage), 0.01), 0.99)


def bump(x: float, width: float) -> float:
    """Return exp(-x^2 / 2 width^2)."""
    return math.exp(-0.5 * (x / width) ** 2)


def near(lr: float, best: float, width: float = 0.4) -> float:
    """Return how good a learning rate is, by decades from the best one; twice as forgiving below it as above."""
    decades = math.log10(max(lr, 1e-12) / best)
    return bump(decades, width if decades > 0 else 2 * width)


def _interacting(lr: float, agent: Agent) -> float:
    a, b, c = (math.log10(float(agent.hyperparameters[name])) for name in ("a", "b", "c"))
    return 5 * near(lr, RIGHT * 10 ** (0.7 * a), 0.35) * bump(a - 0.25, 0.4) * bump(b + 0.2, 0.5) * bump(c - 0.1, 0.8)


WORLDS = {
    "easy": World(lambda lr, agent: 8 * near(lr, RIGHT)),
    "slow": World(lambda lr, agent: 2 * near(lr, RIGHT)),
    "cliff": World(lambda lr, agent: 4 * (lr / RIGHT) ** 0.5, cliff=2.5e-3),
    "anneal": World(lambda lr, agent: 5 * near(lr, 1.5 * RIGHT, 0.5), shake=0.12),
    "interacting": World(_interacting, genes=("a", "b", "c")),
    "breakout": World(
        lambda lr, agent: 4 * near(lr, RIGHT), lambda progress: 1 / (1 + math.exp(-(progress - 1.2) / 0.15))
    ),
    "moving optimum": World(
        lambda lr, agent: 6 * near(lr, 2 * RIGHT * 10 ** (-1.2 * min(agent.progress / 2.5, 1)), 0.3)
    ),
    "no signal": World(lambda lr, agent: 0.0, lambda progress: 0.5),
}
STRATA = {"right": 1.0, "4 times too high": 4.0, "10 times too low": 0.1}


CONSTANT = LRSchedule()
DECAY = LRSchedule(name="linear", decay=0.4)


@dataclass(frozen=True)
class Arm:
    """A way to spend a budget."""

    strategy: Callable[[int], SelectionStrategy]
    size: int = 4
    schedule: LRSchedule = CONSTANT
    candidates: int = 1
    """Best exams that sit a second panel at the end."""
    mutations: Mutations = field(default_factory=lambda: Mutations(0, 0, 0, 0, 0, 1))
    same: bool = False
    """Start everyone alike."""
    gene: Gene | None = None
    up: float = 3.0
    """How far above the user's learning rate a founder may start."""
    down: float = 10.0
    """How far below."""
    generation: float = 1 / 32
    """Share of the budget that an agent trains for between selections."""


MOVES = Mutations(0.2, 0, 0, 0, 0, 0.8)
DEFAULT = Arm(KnockoutSelection, schedule=DECAY, candidates=3)
ARMS = {
    "default": DEFAULT,
    "knockout without pulses": replace(
        DEFAULT, strategy=lambda size: KnockoutSelection(size, pulses=PulseSelection(factors=()))
    ),
    "pulses": replace(DEFAULT, size=1),
    "tournament": Arm(lambda size: TournamentSelection(2, True, size), mutations=MOVES),
    "truncation": Arm(lambda size: TruncationSelection(), mutations=MOVES),
    "multi-frequency": Arm(lambda size: MultiFrequencySelection(size), mutations=MOVES),
    "random": Arm(lambda size: NoSelection()),
    "formula": Arm(lambda size: NoSelection(), size=1),
    "formula + decay": Arm(lambda size: NoSelection(), size=1, schedule=DECAY),
}
SINGLE = ("formula", "formula + decay")


@dataclass
class Outcome:
    """What a search did."""

    shipped: float
    """True skill of the agent that the search hands over, 0 if it is beyond repair."""
    lr: float
    births: int = 0
    generations: int = 0
    alone_from: float = math.nan
    """Share of the budget that was spent when one agent was left."""
    elites: list[float] = field(default_factory=list)
    """True skill of the best of each exam."""


@dataclass(frozen=True)
class Kept:
    """An agent as it was at an exam."""

    agent: Agent
    fitness: Fitness
    factor: float


def search(world: World, arm: Arm, seed: int, stratum: str = "right") -> Outcome:
    """Spend one budget in a world."""
    prior = RIGHT * STRATA[stratum] * 10 ** float(stream(seed, "surrogate world").normal(0, 0.15))
    prompts, agents, strategy = _prompts(seed), _founders(world, arm, prior, seed), arm.strategy(arm.size)
    spent, generation, next_index = 0.0, 0, arm.size
    kept: list[Kept] = []
    best: Kept | None = None
    last: Kept | None = None
    outcome = Outcome(0.0, prior)
    while spent < 1 - 1e-9:
        unit = arm.generation * Pace(60, arm.generation / 60, EXAM).founders_steps(len(agents)) / 60
        share = min(1.0, (1 - spent) / (len(agents) * (unit + EXAM)))
        factor = 1.0
        for _ in range(STEPS):
            factor = arm.schedule.factor(min(spent, 1.0))
            for agent in agents:
                world.train(agent, factor, share * unit / STEPS)
            spent += len(agents) * share * unit / STEPS
        spent = 1.0 if share < 1 else spent + len(agents) * EXAM
        examined = {
            agent.index: Kept(
                agent.clone(agent.index),
                _exam(world.skill(agent, factor), prompts[0], stream(seed, "exam", generation, agent.index)),
                factor,
            )
            for agent in agents
        }
        kept = _best([*kept, *examined.values()], arm.candidates)
        last = next(iter(_best(list(examined.values()), 1)), None)
        fitness = {index: one.fitness for index, one in examined.items()}
        leader = examined[ranking(fitness)[0]]
        # At equal means the later one, which has trained for longer.
        if leader.fitness.is_finite and (best is None or leader.fitness.mean >= best.fitness.mean):
            best = leader
        standing = Standing(min(spent, 1.0), best and Best(best.agent.index, best.fitness))
        plan = strategy.plan(fitness, generation, seed, next_index, standing)
        elite, agents = apply_plan(plan, agents, best and best.agent.clone)
        outcome.elites.append(world.skill(elite, factor))
        members = [Member.of(agent) for agent in agents]
        planned = arm.mutations.plan(members, plan.elite, generation, seed, plan.mutants)
        for agent, mutation in zip(agents, with_factors(plan, members, planned)):
            agent.apply_mutation(mutation)
        outcome.births += len(plan.births)
        if len(agents) == 1 and math.isnan(outcome.alone_from):
            outcome.alone_from = spent
        next_index += len(plan.births)
        generation += 1
    outcome.generations = generation
    if kept:
        chosen = _shipped(world, arm, kept, last, prompts[1], seed)
        outcome.shipped, outcome.lr = (
            world.skill(chosen.agent, chosen.factor),
            float(chosen.agent.hyperparameters["lr"]),
        )
    return outcome


def _founders(world: World, arm: Arm, prior: float, seed: int) -> list[Agent]:
    genes = {"lr": Gene("lr", "float", min=HARD[0], max=HARD[1])}
    start = {"lr": Gene("lr", "float", min=prior / arm.down, max=prior * arm.up)}
    for name in world.genes:
        genes[name] = start[name] = Gene(name, "float", min=1 / 3, max=3.0)
    values: dict[str, Value] = {"lr": prior, **dict.fromkeys(world.genes, 1.0)}
    spread = initial_hyperparameters(start, values, arm.size, seed, "same" if arm.same else "spread")
    return [Agent(index, each, genes) for index, each in enumerate(spread)]


def _prompts(seed: int) -> np.ndarray:
    """Return how hard the questions of both panels are."""
    rng = stream(seed, "surrogate world")
    rng.normal(0, 0.15)  # the prior's
    return rng.standard_normal((2, PROMPTS))


def _exam(skill: float, prompts: np.ndarray, rng: np.random.Generator) -> Fitness:
    if math.isnan(skill):
        return Fitness(math.nan, n=PROMPTS)
    own = rng.standard_normal(PROMPTS)
    scores = (math.sqrt(ALIKE) * prompts + math.sqrt(1 - ALIKE) * own < float(ndtri(skill))).astype(float)
    # As Fitness.from_scores does, which checks each of a list's numbers and takes most of a search's time.
    error = float(scores.std(ddof=1)) / math.sqrt(PROMPTS)
    return Fitness(float(scores.mean()), error, PROMPTS, tuple(scores.tolist()))


def _best(kept: list[Kept], most: int) -> list[Kept]:
    """Return the best exams, at equal means the later ones."""
    finite = [one for one in kept if one.fitness.is_finite]
    ordered = sorted(enumerate(finite), key=lambda pair: (-pair[1].fitness.mean, -pair[0]))
    return [one for _, one in ordered[:most]]


def _shipped(world: World, arm: Arm, kept: list[Kept], last: Kept | None, prompts: np.ndarray, seed: int) -> Kept:
    """Return the best exam's agent; with candidates the last one, unless a second panel shows another to be better."""
    if arm.candidates == 1 or last is None:
        return kept[0]
    panel = [
        _exam(world.skill(one.agent, one.factor), prompts, stream(seed, "second", place))
        for place, one in enumerate([last, *kept])
    ]
    best = max(range(1, len(panel)), key=lambda place: panel[place].value)
    return kept[best - 1] if probability_better(panel[best], panel[0]) >= CANDIDATE else last


def table(seeds: int, arms: list[str], worlds: list[str]) -> str:
    """Return mean skill x 100 of each arm, by stratum and world, over the seeds."""
    lines = [f"mean skill x 100 over {seeds} seeds"]
    for stratum in STRATA:
        lines += ["", f"| prior {stratum} | " + " | ".join(worlds) + " | mean |", "|---" * (len(worlds) + 2) + "|"]
        for name in arms:
            means = [
                float(np.mean([search(WORLDS[w], ARMS[name], seed, stratum).shipped for seed in range(seeds)]))
                for w in worlds
            ]
            means = [100 * (0.0 if math.isnan(mean) else mean) for mean in means]
            cells = " | ".join(f"{mean:.1f}" for mean in [*means, float(np.mean(means))])
            lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS))
    given = parser.parse_args()
    print(table(given.seeds, given.arms, given.worlds))


if __name__ == "__main__":
    main()
