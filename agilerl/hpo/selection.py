"""Selection in two steps: a strategy turns fitness into a plan (numbers only), and one function applies it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any, Protocol, TypeVar

from agilerl.arguments import Seed, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, evidence, ranking
from agilerl.hpo.mutation import Evolvable, Member, Mutation, inherited, rescaled
from agilerl.streams import stream

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
    mate: int | None = None
    """A second parent: the child's weights are the mean of both parents' deltas; all else is as ``parent``'s."""


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
    """The best exam before this one; None at the first exam, and if no copy was kept."""


AT_THE_START = Standing()


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
            raise ConfigError(
                f"A plan must hold every agent exactly once, found slots {self.slots} and children {children}."
            )
        if not set(children) <= set(self.slots) or set(self.deaths) & set(self.slots):
            raise ConfigError(f"A plan's children must be in its slots and its dead must not, found {self}.")
        if not set(self.mutants) <= set(self.slots) - {self.elite}:
            raise ConfigError(f"A plan may mutate agents in its slots only, and never the elite, found {self}.")

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
        try:
            return cls(
                generation=int(data["generation"]),
                elite=int(data["elite"]),
                slots=tuple(data["slots"]),
                births=tuple(Birth(**birth) for birth in data["births"]),
                deaths=tuple(data["deaths"]),
                mutants=tuple(data["mutants"]),
                reason=str(data["reason"]),
                verdicts={int(index): str(text) for index, text in data.get("verdicts", {}).items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"Expected a selection plan, found {dict(data)!r} ({error}).") from error


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
        every process of a run, asks an object of its own.
        """
        ...


class NoSelection:
    """Keep all agents and mutate none: together with the initial spread this is random search, the baseline."""

    @checked
    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: Whole,
        seed: Seed,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return a plan that only names the elite."""
        check_population(fitness, next_index)
        return keep_all(fitness, generation)


def apply_plan(
    plan: Plan,
    agents: Sequence[AgentT],
    revive: Callable[[int], AgentT] | None = None,
    cross: Callable[[AgentT, AgentT], None] | None = None,
) -> tuple[AgentT, list[AgentT]]:
    """Return the elite (as it was evaluated) and the agents of the next generation in slot order.

    Every child is cloned before anything is mutated; a birth's ``factor`` is a mutation, too (``with_factors``).
    ``revive(child)`` makes a child from the run's best exam, ``cross(child, mate)`` merges a second parent into one.
    Raises ConfigError when a parent or survivor is not in ``agents``, and for births that need what was not given.
    """
    by_index = {agent.index: agent for agent in agents}
    living = [birth.parent for birth in plan.births if not birth.from_best]
    living += [birth.mate for birth in plan.births if birth.mate is not None]
    missing = {plan.elite, *plan.slots, *living} - set(by_index)
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
            raise ConfigError(
                f"The plan brings the best exam of agent {birth.parent} back, but no copy of it was kept."
            )
        if birth.mate is not None:
            if cross is None:
                raise ConfigError(
                    f"The plan gives agent {birth.child} the mate {birth.mate}, but these agents cannot be crossed; "
                    "return births with one parent."
                )
            cross(children[birth.child], by_index[birth.mate])
    for birth in plan.births:
        if birth.hyperparameters_from is not None:
            child, donor = children[birth.child], by_index[birth.hyperparameters_from]
            child.apply_mutation(inherited(birth.child, child.hyperparameters, donor.index, donor.hyperparameters))
    return by_index[plan.elite], [children.get(index) or by_index[index] for index in plan.slots]


def with_mates(plan: Plan, fitness: Mapping[int, Fitness], share: float, seed: int) -> Plan:
    """Return the plan with a second parent for a random ``share`` of its clones.

    Mates are drawn evenly from the agents that the plan keeps or copies and whose fitness is finite, the parent itself
    excepted. Births of another kind (a factor, genes of a donor, from the best exam, a mate already) stay as they are.
    """
    children = {birth.child for birth in plan.births}
    kept = {*plan.slots, *(birth.parent for birth in plan.births if not birth.from_best)} - children
    fit = [index for index in fitness if index in kept and fitness[index].is_finite]
    births = []
    for birth in plan.births:
        mates = [index for index in fit if index != birth.parent]
        rng = stream(seed, "crossover", plan.generation, birth.child)
        plain = birth == Birth(birth.child, birth.parent)
        if plain and mates and rng.random() < share:
            birth = replace(birth, mate=mates[int(rng.integers(len(mates)))])
        births.append(birth)
    return replace(plan, births=tuple(births))


def with_factors(plan: Plan, members: Sequence[Member], planned: Sequence[Mutation]) -> list[Mutation]:
    """Return planned mutations, one a member, with those of children that a plan gives other learning rates."""
    factors = {birth.child: birth.factor for birth in plan.births if birth.factor != 1}
    return [
        rescaled(member, factors[member.index]) if member.index in factors else mutation
        for member, mutation in zip(members, planned, strict=True)
    ]


def keep_all(fitness: Mapping[int, Fitness], generation: int, reason: str = "") -> Plan:
    """Return the plan without births and deaths."""
    return Plan(generation, ranking(fitness)[0], tuple(fitness), reason=reason)


def places(fitness: Mapping[int, Fitness], ranked: Sequence[int], kept: Collection[int]) -> dict[int, str]:
    """Return the verdict on each agent that leaves for its place among ``ranked``."""
    return {
        index: f"left: place {place} of {len(ranked)}, {fitness[index].value:.3f}"
        for place, index in enumerate(ranked, start=1)
        if index not in kept
    }


def check_population(fitness: Mapping[int, Fitness], next_index: int, size: int | None = None) -> None:
    """Raise ConfigError unless there are agents, as many as expected, all with an index below ``next_index``."""
    if not fitness:
        raise ConfigError("Selection needs the fitness of at least one agent, found none; evaluate the population.")
    if size is not None and len(fitness) != size:
        raise ConfigError(f"Selection was set up for population_size={size}, found {len(fitness)} agents.")
    if next_index <= max(fitness):
        raise ConfigError(f"next_index must be above every agent index, found {next_index} and agent {max(fitness)}.")


def check_one_objective(fitness: Mapping[int, Fitness], name: str) -> None:
    """Raise ConfigError if agents have several objectives, which this strategy does not compare."""
    costs = sorted({cost for one in fitness.values() for cost in one.costs})
    if costs:
        raise ConfigError(
            f"The strategy {name} compares agents by one number, found the costs {', '.join(costs)} too; use "
            "tournament, truncation, halving or a knockout with a floor of 2, or leave the costs out."
        )


@checked
def latest_fitness(agents: Sequence[Evolvable], exams: int = 1) -> dict[int, Fitness]:
    """Return the mean of each agent's last recorded ``exams``, in slot order.

    Raises ConfigError for an empty population, a repeated index, or an agent that has not been evaluated yet.
    """
    if not agents:
        raise ConfigError("Selection needs at least one agent, found an empty population.")
    for agent in agents:
        if not len(agent.fitness):
            raise ConfigError(
                f"Agent {agent.index} has no fitness yet; evaluate every agent (agent.test(env)) before selection."
            )
    fitness = {agent.index: Fitness(fmean(map(float, agent.fitness[-exams:]))) for agent in agents}
    if len(fitness) != len(agents):
        raise ConfigError(f"Agents must have different indices, found {[agent.index for agent in agents]}.")
    return fitness


def next_generation(agents: Sequence[Evolvable]) -> int:
    """Return the generation of agents outside a population: evaluations so far, minus one."""
    return max(max(len(agent.fitness) for agent in agents) - 1, 0)


# -- truncation: that of population based training, with a gate against replacing on noise ----------------------------


class TruncationSelection:
    """Each of the worst ``fraction`` of agents copies a random one of the best ``fraction`` (PBT, arXiv 1711.09846).

    Gate: an agent is replaced only if the donor is better with probability at least ``confidence``, from the paired
    exam, shrunk by how much of the spread between agents is real (``evidence``, ``reliability``); ties keep.
    Agents whose fitness is not finite are always replaced. Only the new clones are open to mutation.
    Raises ConfigError for a fraction outside (0, 0.5] or a confidence outside [0.5, 1).
    """

    @checked
    def __init__(self, fraction: float = 0.25, confidence: float = 0.8) -> None:
        if not 0 < fraction <= 0.5:
            raise ConfigError(f"fraction must be in (0, 0.5], found {fraction}.")
        if not 0.5 <= confidence < 1:
            raise ConfigError(f"confidence must be in [0.5, 1), found {confidence}.")
        self.fraction = fraction
        self.confidence = confidence

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
        check_population(fitness, next_index)
        ranked = ranking(fitness)
        finite = [index for index in ranked if fitness[index].is_finite]
        if not finite:
            return keep_all(fitness, generation, "no agent has a finite fitness")
        count = max(1, int(self.fraction * len(ranked)))
        donors = finite[:count]
        candidates = {*ranked[-count:], *ranked[len(finite) :]} - set(donors)
        everyone = list(fitness.values())
        births: dict[int, Birth] = {}
        verdicts: dict[int, str] = {}
        for index in sorted(candidates):
            donor = donors[int(stream(seed, "selection", generation, index).integers(len(donors)))]
            found = evidence(fitness[donor], fitness[index], self.confidence, everyone)
            verdicts[index] = found.about_replacing(donor)
            if found.is_enough:
                births[index] = Birth(next_index + len(births), donor)
        return Plan(
            generation,
            ranked[0],
            slots=tuple(births[index].child if index in births else index for index in fitness),
            births=tuple(births.values()),
            deaths=tuple(births),
            mutants=tuple(births[index].child for index in fitness if index in births),
            verdicts=verdicts,
        )


# -- successive halving: the better half continues, with the budget of both halves ------------------------------------


class SuccessiveHalving:
    """Every ``period`` generations the worse half of the agents stops, N -> N/2 -> ... -> ``floor`` (arXiv 1502.07943).

    The plan has fewer slots than before; the tokens per interval stay what they were, so each survivor trains on more.
    Between the halvings ``between`` plans (a strategy that takes any population size, such as TruncationSelection);
    without it no agent changes. Agents whose fitness is not finite are the first to stop.
    Raises ConfigError for a period or floor below one.
    """

    @checked
    def __init__(self, period: int = 1, floor: int = 1, between: SelectionStrategy | None = None) -> None:
        if period < 1 or floor < 1:
            raise ConfigError(f"period and floor must be at least 1, found period={period}, floor={floor}.")
        self.period = period
        self.floor = floor
        self.between = between or NoSelection()

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
        check_population(fitness, next_index)
        if (generation + 1) % self.period or len(fitness) <= self.floor:
            return self.between.plan(fitness, generation, seed, next_index, standing)
        ranked = ranking(fitness)
        finite = sum(one.is_finite for one in fitness.values())
        if not finite:
            reason = "no agent has a finite fitness"
            return replace(NoSelection().plan(fitness, generation, seed, next_index), reason=reason)
        count = min(max((len(ranked) + 1) // 2, self.floor), finite)
        kept = set(ranked[:count])
        return Plan(
            generation,
            ranked[0],
            slots=tuple(index for index in fitness if index in kept),
            deaths=tuple(index for index in fitness if index not in kept),
            reason=f"halving: {len(ranked)} to {count} agents",
            verdicts=places(fitness, ranked, kept),
        )
