"""Mutation in two steps: a plan of what changes in which agent (numbers only), then each agent applies its part."""

import inspect
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np

from agilerl.checks.arguments import Count, NotNegative, Positive, Seed, Whole, checked
from agilerl.errors import ConfigError, warn_once
from agilerl.hpo.parameters import Gene, Value
from agilerl.streams import stream

Kind = Literal["none", "hyperparameters", "rank"]


@dataclass(frozen=True, slots=True)
class Change:
    """One value that changes; a rank is the gene ``rank``."""

    gene: str
    old: Value
    new: Value


@dataclass(frozen=True, slots=True)
class Mutation:
    """What happens to one agent, as plain data that any process can apply."""

    agent: int
    kind: Kind = "none"
    changes: tuple[Change, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Why nothing changed, or what else changed it than chance (``reason``)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the mutation as plain data for JSON."""
        return asdict(self) | {"changes": [asdict(change) for change in self.changes]}

    @classmethod
    @checked
    def from_dict(cls, data: Mapping[str, Any]) -> "Mutation":
        """Rebuild a mutation; raises ConfigError when ``data`` is not one."""
        from agilerl.checks.validation import rebuilt  # imports pydantic, which a search does not need

        return rebuilt(cls, data, "a mutation")


class Evolvable(Protocol):
    """What selection and mutation need of an agent."""

    index: int
    mut: str
    fitness: list[float]
    """Result of each evaluation so far; the last one counts."""

    @property
    def hyperparameters(self) -> Mapping[str, Value]:
        """Current value of each gene."""
        ...

    @property
    def genes(self) -> Mapping[str, Gene]:
        """Genes in force."""
        ...

    @property
    def rank(self) -> int:
        """Rank of the agent's adapter; 0 when it has none."""
        ...

    def apply_mutation(self, mutation: Mutation) -> None:
        """Carry out a planned mutation and set ``mut`` to what was done."""
        ...

    def clone(self, index: int) -> Self:
        """Return an independent copy of the agent, its fitness included, under a new index."""
        ...


AgentT = TypeVar("AgentT", bound=Evolvable)


@dataclass(frozen=True, slots=True)
class Member:
    """An agent as a mutation plan sees it."""

    index: int
    hyperparameters: Mapping[str, Value]
    genes: Mapping[str, Gene]
    rank: int = 0

    @classmethod
    def of(cls, agent: Evolvable) -> "Member":
        """Return the member that describes an agent."""
        return cls(agent.index, dict(agent.hyperparameters), dict(agent.genes), agent.rank)


FROZEN = "the base model is frozen; the architecture that mutates is the adapter's rank (architecture, arch_mut)"
IMPOSSIBLE = {
    "parameters": "noise on the weights of an adapter has gone, as it cost accuracy; let genes or the rank mutate",
    "new_layer_prob": FROZEN,
    "activation": FROZEN,
}
"""Mutations that AgileRL has for networks of its own, and why there are none here."""


class Mutations:
    """Choose one kind of mutation for each agent, with the given probabilities (they are divided by their sum).

    ``no_mutation``: nothing; ``rl_hp``: ``genes_per_mutation`` genes move; ``architecture``: the adapter's rank doubles
    or halves within ``rank_range``. ``new_layer_prob``, ``parameters`` and ``activation`` must be 0: the base model is
    frozen, and noise on an adapter costs accuracy. The elite is left alone unless ``mutate_elite``. ``rand_seed`` is
    used by ``mutation`` (None means 0: a run can always be repeated); ``mutation_sd``, ``activation_selection``,
    ``device`` and ``accelerator`` are accepted for compatibility and have no effect.
    ``documented`` are AgileRL's further arguments by position, from ``mutation_sd`` to ``accelerator``.
    Raises ConfigError for probabilities below zero or all zero, and settings out of range.
    """

    @checked
    def __init__(
        self,
        no_mutation: NotNegative,
        architecture: NotNegative,
        new_layer_prob: NotNegative,
        parameters: NotNegative,
        activation: NotNegative,
        rl_hp: NotNegative,
        *documented: Any,
        mutation_sd: Positive = 0.03,
        activation_selection: Sequence[str] | None = None,
        mutate_elite: bool = False,
        rand_seed: Seed | None = None,
        device: object = "cpu",
        accelerator: object = None,
        genes_per_mutation: Count = 1,
        rank_range: tuple[int, int] = (4, 64),
    ) -> None:
        if documented:
            order = ("mutation_sd", "activation_selection", "mutate_elite", "rand_seed", "device", "accelerator")
            if len(documented) > len(order):
                raise ConfigError(f"Mutations: expected at most 12 arguments by position, found {6 + len(documented)}")
            values = (mutation_sd, activation_selection, mutate_elite, rand_seed, device, accelerator)
            named, known = dict(zip(order, values)), inspect.signature(Mutations).parameters
            if twice := [name for name in order[: len(documented)] if named[name] != known[name].default]:
                raise ConfigError(f"Mutations: found {twice[0]} both by position and by name; leave one of them out")
            named |= {"genes_per_mutation": genes_per_mutation, "rank_range": rank_range}
            named |= dict(zip(order, documented))
            # Once more by name, so that @checked sees these values as well.
            Mutations.__init__(self, no_mutation, architecture, new_layer_prob, parameters, activation, rl_hp, **named)
            return
        # The order decides which draw means which kind: another one would change every seeded run.
        chances: dict[Kind, float] = {
            "none": no_mutation,
            "rank": architecture,
            "hyperparameters": rl_hp,
        }
        if not (total := sum(chances.values())):
            raise ConfigError(
                "Mutations: expected no_mutation, architecture and rl_hp not all 0, found no_mutation=0, "
                "architecture=0 and rl_hp=0."
            )
        self._probabilities = {kind: chance / total for kind, chance in chances.items()}
        for name, value in (("parameters", parameters), ("new_layer_prob", new_layer_prob), ("activation", activation)):
            if value:
                raise ConfigError(f"Mutations: expected {name}=0, found {value}; {IMPOSSIBLE[name]}")
        if not 1 <= rank_range[0] <= rank_range[1]:
            raise ConfigError(f"Mutations: rank_range must be (smallest, largest), smallest >= 1, found {rank_range}.")
        self.mutate_elite = mutate_elite
        self.rand_seed = rand_seed
        self.genes_per_mutation = genes_per_mutation
        self.rank_range = rank_range

    @property
    def probabilities(self) -> dict[Kind, float]:
        """Probability of each kind; they add up to one."""
        return dict(self._probabilities)

    @checked
    def plan(
        self,
        members: Sequence[Member],
        elite: int | None,
        generation: int,
        seed: int,
        nominated: Collection[int] | None = None,
    ) -> list[Mutation]:
        """Return one mutation for each member, in order; a pure function of its arguments.

        ``nominated``: indices open to mutation (a selection plan's ``mutants``); None: all but the elite.
        A member's mutation depends on its own values, ``seed``, ``generation`` and its index, not on other members.
        """
        plans = []
        for member in members:
            spared = member.index == elite and not self.mutate_elite
            open_to_mutation = nominated is None or member.index in nominated or (member.index == elite and not spared)
            if spared or not open_to_mutation:
                plans.append(Mutation(member.index, details={"reason": "elite" if spared else "not nominated"}))
            else:
                plans.append(self._mutate(member, generation, seed))
        return plans

    @checked
    def mutation(
        self,
        population: Sequence[AgentT],
        nominated: Collection[int] | None = None,
        *,
        elite: int | None = None,
        generation: Whole | None = None,
    ) -> list[AgentT]:
        """Mutate agents in place and return them; the documented step after ``select``.

        The elite is the agent with index ``elite`` or, by default, the best by last fitness, the oldest if there is a
        tie: a clone has its parent's fitness and a higher index, so this is the elite that ``select`` returned.
        The draws depend on the agents' indices and on how often they were evaluated (or ``generation``).
        """
        if elite is None:
            elite = _elder_best(population)
        if generation is None:
            generation = max((len(agent.fitness) for agent in population), default=0)
        members = [Member.of(agent) for agent in population]
        if self._probabilities.get("hyperparameters") and not any(member.genes for member in members):
            warnings.warn(
                "rl_hp moves genes, and no agent of this population has any; create the agents with hp_config="
                "HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-4)), or set rl_hp=0",
                stacklevel=3,
            )
        plans = self.plan(members, elite, generation, self.rand_seed or 0, nominated)
        for agent, plan in zip(population, plans, strict=True):
            agent.apply_mutation(plan)
        return list(population)

    def _mutate(self, member: Member, generation: int, seed: int) -> Mutation:
        rng = stream(seed, "mutation", generation, member.index)
        kinds = list(self._probabilities)
        kind = kinds[int(rng.choice(len(kinds), p=list(self._probabilities.values())))]
        if kind == "hyperparameters":
            return self._move_genes(member, rng)
        if kind == "rank":
            return self._move_rank(member, rng)
        return Mutation(member.index)

    def _move_genes(self, member: Member, rng: np.random.Generator) -> Mutation:
        if not member.genes:
            return Mutation(member.index, details={"reason": "no hyperparameter is declared to evolve"})
        # Sorted: the order of the declarations must not decide which gene a draw means.
        names = sorted(member.genes)
        if self.genes_per_mutation > len(names):
            warn_once(
                f"genes_per_mutation={self.genes_per_mutation}, but only {len(names)} hyperparameters evolve: every "
                "mutation moves all of them"
            )
        count = min(self.genes_per_mutation, len(names))
        chosen = sorted(int(position) for position in rng.choice(len(names), count, replace=False))
        changes = []
        for name in (names[position] for position in chosen):
            if name not in member.hyperparameters:
                raise ConfigError(f"Agent {member.index} has no value for the gene {name}; give it one to evolve it.")
            old = member.hyperparameters[name]
            new = mutate_value(member.genes[name], old, rng)
            # A monotone gene at the end of its range stays where it is.
            if new != old:
                changes.append(Change(name, old, new))
        if not changes:
            ends = ", ".join(names[position] for position in chosen)
            return Mutation(member.index, details={"reason": f"{ends} moves one way and is at the end of its range"})
        return Mutation(member.index, "hyperparameters", tuple(changes))

    def _move_rank(self, member: Member, rng: np.random.Generator) -> Mutation:
        low, high = self.rank_range
        # Rank 1 halves to 0, which the lower end of the range, at least 1, leaves out.
        options = [rank for rank in (member.rank // 2, member.rank * 2) if low <= rank <= high and rank != member.rank]
        if not options:
            return Mutation(member.index, details={"reason": f"rank {member.rank} has no neighbour in [{low}, {high}]"})
        new = options[int(rng.integers(len(options)))]
        return Mutation(member.index, "rank", (Change("rank", member.rank, new),))


def inherited(agent: int, before: Mapping[str, Value], donor: int, values: Mapping[str, Value]) -> Mutation:
    """Return the mutation that gives ``agent`` the gene values of ``donor`` instead of those ``before``."""
    changes = tuple(
        Change(name, old, values[name]) for name, old in before.items() if name in values and old != values[name]
    )
    return Mutation(agent, "hyperparameters", changes, {"reason": "migration", "hyperparameters_from": donor})


LEARNING_RATES = ("lr", "lr_actor", "lr_critic")
"""Genes that a pulse and the guard multiply."""


def rescaled(member: Member, factor: float) -> Mutation:
    """Return the mutation that multiplies the learning rates of an agent, as far as their ranges reach."""
    changes = []
    for name in LEARNING_RATES:
        gene = member.genes.get(name)
        # A gene of choices has no factor, and a monotone one does not move against its way.
        if gene is None or gene.dtype != "float" or gene.monotone == ("down" if factor > 1 else "up"):
            continue
        old = float(member.hyperparameters[name])
        # A value outside the range, which only a user can set, moves towards it and not to its end.
        new = min(old * factor, max(gene.max, old)) if factor > 1 else max(old * factor, min(gene.min, old))
        if new != old:
            changes.append(Change(name, old, new))
    if not changes:
        return Mutation(member.index, details={"reason": f"no learning rate evolves that {factor:g} could multiply"})
    return Mutation(member.index, "hyperparameters", tuple(changes), {"reason": "selection", "factor": factor})


def _elder_best(population: Sequence[Evolvable]) -> int | None:
    scored = [
        (-agent.fitness[-1] if math.isfinite(agent.fitness[-1]) else math.inf, agent.index)
        for agent in population
        if len(agent.fitness)
    ]
    return min(scored)[1] if scored else None


# -- one value: a symmetric heavy-tailed step, a choice, or the documented factors ------------------------------------


TAIL = 2.0
"""Degrees of freedom of the Student-t step: half of the steps are small, one in a hundred crosses the whole range."""


def mutate_value(gene: Gene, value: Value, rng: np.random.Generator) -> Value:
    """Return another value of ``gene`` near ``value``: in range, and different from ``value`` clipped into the range.

    Heavy-tailed kernel, on the unit position u of the range (its logarithm for a log scale):
    u' = reflect(u + step * t), t ~ Student(2); with probability ``gene.resample`` u' ~ U(0, 1) instead. Reflection at
    the ends keeps the kernel symmetric, so without selection a float does not drift and wanders over the whole range.
    Factor kernel (RLParameter): v' = v * shrink or v * grow, each with probability 1/2. Integers are rounded and move
    by at least one, so over a range of few integers they do drift, especially on a logarithmic scale.
    A monotone gene makes the same steps, as long, all in its direction, and stays where its range ends.
    """
    if gene.dtype == "choice":
        # The present value may be none of the choices, if a user has assigned it.
        others = [choice for choice in gene.choices if choice != value]
        return others[int(rng.integers(len(others)))]
    # A user may have assigned a value outside the range.
    current = min(max(float(value), gene.min), gene.max)
    moved = _by_factor(gene, current, rng) if gene.factors else _by_step(gene, current, rng)
    if gene.monotone:
        moved = _one_way(gene, current, moved)
    return int(moved) if gene.dtype == "int" else float(moved)


def _by_step(gene: Gene, current: float, rng: np.random.Generator) -> float:
    position = gene.to_unit(current)
    resampled = rng.random() < gene.resample
    target = rng.random() if resampled else _reflect(position + gene.step * rng.standard_t(TAIL))
    moved = float(gene.from_unit(target))
    # Rounding has undone the step: take the least one possible, the same way.
    return moved if moved != current else _nudge(gene, current, upwards=target >= position)


def _by_factor(gene: Gene, current: float, rng: np.random.Generator) -> float:
    shrink, grow = gene.factors or (1.0, 1.0)
    # The second one is for the ends of the range, which the first may not leave.
    first, second = (shrink, grow) if rng.random() < 0.5 else (grow, shrink)
    for factor in (first, second):
        target = current * factor
        if gene.dtype == "int":
            # At least one: 4 * 1.2 = 4.8 must not fall back to 4, or integers could only shrink.
            up = target > current
            target = max(round(target), current + 1) if up else min(round(target), current - 1)
        moved = min(max(target, gene.min), gene.max)
        if moved != current:
            return moved
    # Neither factor moves it (e.g. a zero), so draw from the range instead.
    moved = float(gene.from_unit(rng.random()))
    return moved if moved != current else _nudge(gene, current, upwards=rng.random() < 0.5)


def _one_way(gene: Gene, current: float, moved: float) -> float:
    """Return the value as far from ``current`` as ``moved`` is, on the scale of the range, but the way it may move."""
    upwards = gene.monotone == "up"
    if current == (gene.max if upwards else gene.min):
        return current
    here = gene.to_unit(current)
    length = abs(gene.to_unit(moved) - here)
    turned = float(gene.from_unit(min(here + length, 1.0) if upwards else max(here - length, 0.0)))
    # exp(log(min)) may be above a value that is next to min, so the sign is checked and not only that it moved.
    return turned if turned != current and (turned > current) == upwards else _nudge(gene, current, upwards)


def _nudge(gene: Gene, current: float, upwards: bool) -> float:
    """Return the next representable value in the wanted direction, or in the other one at an end of the range."""
    for direction in (1, -1) if upwards else (-1, 1):
        moved = current + direction if gene.dtype == "int" else math.nextafter(current, direction * math.inf)
        if gene.min <= moved <= gene.max:
            return moved
    raise AssertionError(f"the range of {gene.name} holds one value; its declaration should have been refused")


def _reflect(position: float) -> float:
    """Fold the real line into [0, 1] with mirrors at both ends."""
    # Never negative: Python's remainder has the sign of the divisor.
    folded = position % 2.0
    return 2.0 - folded if folded > 1.0 else folded
