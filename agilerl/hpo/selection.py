"""Selection in two steps: a strategy turns fitness into a plan (numbers only), and one function applies it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import ConfigDict, Field

from agilerl.checks.arguments import Count, Seed, Whole, checked
from agilerl.checks.validation import PythonSettings, rebuilt
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, evidence, ranking
from agilerl.hpo.mutation import Evolvable, Member, Mutation, inherited, rescaled
from agilerl.streams import stream

Sureness = Annotated[float, Field(ge=0.5, le=1)]
"""A probability that one agent is better than another, from a coin's on."""
Confidence = Annotated[float, Field(ge=0.5, lt=1)]
Size = Annotated[Count | None, Field(exclude=True)]
"""Agents of the population; None: not known yet."""
AgentT = TypeVar("AgentT", bound=Evolvable)


@dataclass(frozen=True, slots=True)
class Birth:
    """A clone: ``child`` starts as a copy of ``parent`` as it was before the plan."""

    child: int
    parent: int
    hyperparameters_from: int | None = None
    """Agent whose gene values the child takes instead of its parent's (migration of weights alone)."""
    factor: float = 1.0
    """The child's learning rates are multiplied by this, within the range of their genes."""
    from_best: bool = False
    """The child starts as ``parent`` was at the run's best exam (``Standing.best``), not as it is now."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best exam of a run so far; its agent may have died, but the run keeps a copy of it."""

    agent: int
    fitness: Fitness


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands when a selection is planned."""

    spent: float = 0.0
    """Share of the run's budget that is spent, in [0, 1]."""
    best: Best | None = None
    """The best exam so far, this one included; None if no copy of its agent was kept."""
    stuck: frozenset[int] = frozenset()
    """Agents that can learn no more (``agilerl.hpo.guard.stuck``)."""

    @property
    def untrained(self) -> Fitness | None:
        """What is known of agents before any training, as long as no exam is better; None from then on."""
        return None if self.best is None or self.best.fitness.is_finite else self.best.fitness


AT_THE_START = Standing()
RESTART = "restart"
"""Reason of a plan whose child from the best exam is an untrained one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision of a selection: the agent of each slot, the births and deaths, and the agents open to mutation."""

    generation: int
    elite: int
    """Best agent of the exam. With elitism it is in ``slots``, and it is never in ``mutants``."""
    slots: tuple[int, ...]
    """Agent index of each slot after the plan, in slot order; shorter than before when slots were given up."""
    births: tuple[Birth, ...] = ()
    deaths: tuple[int, ...] = ()
    mutants: tuple[int, ...] = ()
    """Agents that are open to mutation after the plan, in slot order."""
    reason: str = ""
    """Why the plan is unusual; empty for an ordinary one."""
    verdicts: Mapping[int, str] = field(default_factory=dict)
    """Why an agent stays or goes, with the numbers that decided: ``kept: P = .63 < .8``; by its index."""

    def __post_init__(self) -> None:
        children = [birth.child for birth in self.births]
        if len(set(self.slots)) != len(self.slots) or len(set(children)) != len(children):
            raise ConfigError(f"A plan holds every agent exactly once, found slots {self.slots}, children {children}")
        if not set(children) <= set(self.slots) or set(self.deaths) & set(self.slots):
            raise ConfigError(f"A plan's children must be in its slots and its dead must not, found {self!r}.")
        if not set(self.mutants) <= set(self.slots) - {self.elite}:
            raise ConfigError(f"A plan may mutate agents in its slots only, and never the elite, found {self!r}.")

    def __str__(self) -> str:
        story = [f"best {self.elite}"]
        story += [f"born {', '.join(f'{birth.parent} -> {birth.child}' for birth in self.births)}"] * bool(self.births)
        whys = (self.verdicts.get(index) or self.reason for index in self.deaths)
        left = (f"{index}{f' ({why})' * bool(why)}".replace("(left: ", "(") for index, why in zip(self.deaths, whys))
        story += [f"left {', '.join(left)}"] * bool(self.deaths)
        return f"generation {self.generation}: {'; '.join(story)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON; fields that few strategies use are left out if unused."""
        values = asdict(self) | {name: list(getattr(self, name)) for name in ("slots", "deaths", "mutants")}
        values["births"] = [
            {name: value for name, value in asdict(birth).items() if name in _ALWAYS or value != _UNUSED[name]}
            for birth in self.births
        ]
        verdicts = values.pop("verdicts")
        return values | ({"verdicts": {str(index): text for index, text in verdicts.items()}} if verdicts else {})

    @classmethod
    @checked
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """Rebuild a plan; raises ConfigError when ``data`` is not one."""
        return rebuilt(cls, data, "a selection plan")


# What is unused and not listed here is left out: files of other strategies' runs keep their bytes.
_ALWAYS = ("child", "parent", "hyperparameters_from")
_UNUSED = {one.name: one.default for one in fields(Birth)}


class SelectionStrategy(Protocol):
    """Decide the next population from fitness alone: pure, so that every process computes the same plan."""

    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: int,
        seed: int,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return the plan of this generation.

        ``fitness`` maps agent index to result, in slot order. ``generation`` counts selections from 0. ``next_index``
        is above every index ever used: indices never repeat, children get ``next_index``, ``next_index + 1``, ...
        Random choices depend on ``seed``, ``generation`` and agent indices only. ``standing`` is how much of the budget
        is spent, and the run's best exam so far. A strategy keeps nothing between calls: a run that is resumed, and
        every process of a run, asks its own object.
        """
        ...


@dataclass(frozen=True)
class Contest:
    """The agents of a population and their exams, at the moment when a strategy decides."""

    fitness: Mapping[int, Fitness]
    generation: int
    seed: int
    next_index: int
    standing: Standing

    @cached_property
    def ranked(self) -> list[int]:
        """The agents, best first."""
        return ranking(self.fitness)

    @cached_property
    def finite(self) -> list[int]:
        """Those of them whose fitness is finite."""
        return [index for index in self.ranked if self.fitness[index].is_finite]

    def asked_of(self, strategy: "SelectionStrategy") -> Plan:
        """Return the plan of another strategy."""
        return strategy.plan(self.fitness, self.generation, self.seed, self.next_index, self.standing)

    def unchanged(self, reason: str = "no agent has a finite fitness") -> Plan:
        """Return the plan without births and deaths."""
        # A plan has an elite in any case; if no fitness is finite, it is only the first of equals.
        return Plan(self.generation, self.ranked[0], tuple(self.fitness), reason=reason)

    def reduced(self, kept: Collection[int], reason: str, verdicts: Mapping[int, str] = MappingProxyType({})) -> Plan:
        """Return the plan in which all others give up their slots."""
        return Plan(
            self.generation,
            self.ranked[0],
            slots=tuple(index for index in self.fitness if index in kept),
            deaths=tuple(index for index in self.fitness if index not in kept),
            reason=reason,
            verdicts={**verdicts, **self.places(kept, verdicts)},
        )

    def replaced(
        self, births: Mapping[int, Birth], verdicts: Mapping[int, str], mutants: Collection[int] | None = None
    ) -> Plan:
        """Return the plan in which children take the slots of the dead; ``mutants`` None: all of them may mutate."""
        children = {birth.child for birth in births.values()} if mutants is None else mutants
        slots = tuple(births[index].child if index in births else index for index in self.fitness)
        mutants = tuple(index for index in slots if index in children)
        return Plan(
            self.generation, self.ranked[0], slots, tuple(births.values()), tuple(births), mutants, verdicts=verdicts
        )

    def places(self, kept: Collection[int], judged: Collection[int]) -> dict[int, str]:
        """Return the verdict on each agent that leaves for its place, without those that are ``judged`` already."""
        return {
            index: f"left: place {rank} of {len(self.ranked)}, {self.fitness[index].value:.3f}"
            for rank, index in enumerate(self.ranked, start=1)
            if index not in kept and index not in judged
        }


class Strategy(PythonSettings):
    """A strategy of the package is its settings: ``plan`` checks what it is given, and ``decide`` decides."""

    model_config = ConfigDict(frozen=True)
    name: ClassVar[str]
    """Its name in a manifest."""

    @property
    def fixed_size(self) -> int | None:
        """Agents of every population that it plans for; None: any number."""
        return None

    @checked
    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: Whole,
        seed: Seed,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return the plan of this generation (see SelectionStrategy)."""
        if not fitness:
            raise ConfigError("Selection needs the fitness of at least one agent, found none; evaluate the population.")
        if self.fixed_size not in (None, len(fitness)):
            raise ConfigError(f"Selection is set up for population_size={self.fixed_size}, found {len(fitness)} agents")
        if next_index <= max(fitness):
            raise ConfigError(f"next_index must be above every agent's index, found {next_index}, agent {max(fitness)}")
        return self.decide(Contest(fitness, generation, seed, next_index, standing))

    def decide(self, contest: Contest) -> Plan:
        """Return the plan."""
        raise NotImplementedError


class NoSelection(Strategy):
    """Keep all agents and mutate none: together with the initial spread this is random search, the baseline."""

    name = "none"

    def decide(self, contest: Contest) -> Plan:
        """Return a plan that only names the elite."""
        return contest.unchanged("")


def apply_plan(
    plan: Plan,
    agents: Sequence[AgentT],
    revive: Callable[[int], AgentT] | None = None,
) -> tuple[AgentT, list[AgentT]]:
    """Return the elite (as it was evaluated) and the agents of the next generation in slot order.

    Every child is cloned before anything is mutated; a birth's ``factor`` is a mutation, too (``with_factors``).
    ``revive(child)`` makes a child from the run's best exam.
    Raises ConfigError when a parent or survivor is not in ``agents``, and for a best exam of which there is no copy.
    """
    by_index = {agent.index: agent for agent in agents}
    living = [birth.parent for birth in plan.births if not birth.from_best]
    missing = {plan.elite, *plan.slots, *living} - set(by_index)
    # Slots name children too, which do not live before this function has run.
    missing -= {birth.child for birth in plan.births}
    if missing:
        raise ConfigError(f"The plan names agents {sorted(missing)}, but the population is {sorted(by_index)}.")
    children: dict[int, AgentT] = {}
    for birth in plan.births:
        if not birth.from_best:
            children[birth.child] = by_index[birth.parent].clone(birth.child)
        elif revive is not None:
            children[birth.child] = revive(birth.child)
        else:
            raise ConfigError(f"The plan brings back the best exam of agent {birth.parent}, but no copy was kept")
    for birth in plan.births:
        if birth.hyperparameters_from is not None:
            child, donor = children[birth.child], by_index[birth.hyperparameters_from]
            child.apply_mutation(inherited(birth.child, child.hyperparameters, donor.index, donor.hyperparameters))
    return by_index[plan.elite], [children.get(index) or by_index[index] for index in plan.slots]


def with_factors(plan: Plan, members: Sequence[Member], planned: Sequence[Mutation]) -> list[Mutation]:
    """Return planned mutations, one a member, with those of children that a plan gives other learning rates."""
    factors = {birth.child: birth.factor for birth in plan.births if birth.factor != 1}
    return [
        rescaled(member, factors[member.index]) if member.index in factors else mutation
        for member, mutation in zip(members, planned, strict=True)
    ]


@checked
def latest_fitness(agents: Sequence[Evolvable], exams: int = 1) -> dict[int, Fitness]:
    """Return the mean of each agent's last recorded ``exams``, in slot order.

    Raises ConfigError for an empty population, a repeated index, or an agent that has not been evaluated yet.
    """
    if not agents:
        raise ConfigError("Selection needs at least one agent, found an empty population.")
    for agent in agents:
        if not len(agent.fitness):
            raise ConfigError(f"Agent {agent.index} has no fitness yet; evaluate every agent (agent.test(env)) first")
    # Means alone: these agents record no scores, so no two of them can be compared prompt by prompt.
    fitness = {agent.index: Fitness(fmean(map(float, agent.fitness[-exams:]))) for agent in agents}
    if len(fitness) != len(agents):
        raise ConfigError(f"Agents must have different indices, found {[agent.index for agent in agents]}.")
    return fitness


def next_generation(agents: Sequence[Evolvable]) -> int:
    """Return the generation of agents outside a population: evaluations so far, minus one."""
    return max(max(len(agent.fitness) for agent in agents) - 1, 0)


def selected(
    strategy: Strategy, agents: Sequence[AgentT], seed: int, exams: int = 1
) -> tuple[AgentT, list[AgentT], Plan]:
    """Return elite and next generation of agents outside a population, and the plan, by their last ``exams``."""
    fitness = latest_fitness(agents, exams)
    plan = strategy.plan(fitness, next_generation(agents), seed, max(fitness) + 1)
    return *apply_plan(plan, agents), plan


# -- truncation: that of population based training, with a gate against replacing on noise ----------------------------


class TruncationSelection(Strategy):
    """Each of the worst ``fraction`` of agents copies a random one of the best ``fraction`` (PBT, arXiv 1711.09846).

    Gate: an agent is replaced only if the donor is better with probability at least ``confidence``, from the paired
    exam, shrunk by how much of the spread between agents is real (``evidence``, ``reliability``); ties keep.
    Agents whose fitness is not finite are always replaced. Only the new clones are open to mutation.
    Raises ConfigError for a fraction outside (0, 0.5] or a confidence outside [0.5, 1).
    """

    name = "truncation"
    fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the agents that is replaced by copies of as many best ones."""
    confidence: Confidence = 0.8
    """Probability of being better from which on a copy replaces an agent."""

    def decide(self, contest: Contest) -> Plan:
        """Return a plan in which donors replace those that are worse with enough certainty."""
        fitness, finite, ranked = contest.fitness, contest.finite, contest.ranked
        if not finite:
            return contest.unchanged()
        count = max(1, int(self.fraction * len(ranked)))
        donors = finite[:count]
        births: dict[int, Birth] = {}
        verdicts: dict[int, str] = {}
        # By age, so that the order of the slots does not decide which child gets which index.
        for index in sorted({*ranked[-count:], *ranked[len(finite) :]} - set(donors)):
            # A stream for each agent: its donor does not depend on how many others are replaced.
            draw = stream(contest.seed, "selection", contest.generation, index).integers(len(donors))
            donor = donors[int(draw)]
            proof = evidence(fitness[donor], fitness[index], self.confidence, list(fitness.values()))
            verdicts[index] = proof.about_replacing(donor)
            if proof.is_enough:
                births[index] = Birth(contest.next_index + len(births), donor)
        return contest.replaced(births, verdicts)
