"""The search for other trainers: ask what to train, train it, report the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from agilerl.checks.arguments import Count, Having, Seed, Share, checked
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.mutation import Member, Mutation, Mutations
from agilerl.hpo.parameters import Gene, Value, check_values
from agilerl.hpo.selection import Best, Plan, SelectionStrategy, Standing, apply_plan, with_factors
from agilerl.hpo.spread import around, initial_hyperparameters
from agilerl.hpo.strategies import ANNEALED, LRSchedule, make_strategy

_STATE = 1
Strategy = Annotated[
    Any,
    Having("the name of a strategy or an object with plan", ("plan",), "pass TournamentSelection(...), for instance"),
]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a trainer does with one member until the next exam."""

    member: int
    """Its index; indices never repeat."""
    hyperparameters: Mapping[str, Value]
    """The values of its genes. A learning rate is multiplied by ``Evolution.factor(spent)``."""
    parent: int | None = None
    """The member whose weights and optimizer it begins with, as they were at the last exam; None: it continues with its
    own, or begins with the initial ones before the first exam."""
    from_best: bool = False
    """It begins with the copy that was kept of the best exam (``Told.keep``), which was ``parent``'s."""


@dataclass(frozen=True, slots=True)
class Told:
    """The result of an exam."""

    plan: Plan
    """Who stays, who leaves, who is born, and the numbers that decided (``verdicts``)."""
    mutations: tuple[Mutation, ...]
    """What changed in each member that trains next."""
    keep: int | None
    """The member whose exam is the best so far: copy its weights as they are now. None: the last copy stays."""


class Evolution:
    """A search over the hyperparameters of a population that another framework trains.

    ``ask`` says what each member trains with until the next exam; ``tell`` takes the exams and decides who continues.
    The decisions are those of ``agilerl train``: same strategies, same founders, same mutations. Weights stay with the
    trainer, which copies them where an assignment has a ``parent``, and forgets those of ``plan.deaths``.

    ``values`` is the configuration of member 0, and ``genes`` are the ranges that values may ever reach. The other
    founders are spread over ``founders`` (None: for knockout and pulses the part of ``genes`` ``around`` the
    configuration, else all of it), or all alike with ``init="same"``. ``strategy`` is a name (``knockout``,
    ``tournament``, ...), with ``settings`` as in a manifest's ``selection_strategy``, or an object with ``plan``.
    ``mutations`` (None: one gene a mutation) concern strategies with mutants only. ``schedule`` (None: linear over the
    last 40 % of the budget for knockout and pulses, else constant) is a factor on learning rates.
    Raises ConfigError for values outside their genes' ranges, and for unknown strategies and settings.
    """

    @checked
    def __init__(
        self,
        values: Mapping[str, Any],
        genes: Mapping[str, Gene],
        *,
        size: Count = 4,
        strategy: str | Strategy = "knockout",
        settings: Mapping[str, Any] | None = None,
        mutations: Mutations | None = None,
        schedule: LRSchedule | None = None,
        founders: Mapping[str, Gene] | None = None,
        init: Literal["spread", "same"] = "spread",
        seed: Seed = 42,
    ) -> None:
        check_values(genes, values)
        if settings and not isinstance(strategy, str):
            raise ConfigError(f"settings are those of a named strategy, found strategy={type(strategy).__name__}")
        self.strategy: SelectionStrategy = (
            make_strategy(strategy, size, settings or {}) if isinstance(strategy, str) else strategy
        )
        annealed = isinstance(strategy, str) and strategy in ANNEALED
        self.schedule = schedule or (LRSchedule("linear", decay=0.4) if annealed else LRSchedule())
        # rl_hp alone: the other kinds change weights, which the trainer has.
        self.mutations = mutations or Mutations(0, 0, 0, 0, 0, 1)
        self.seed, self._size = seed, size
        self.genes = dict(genes)
        if founders is None:
            founders = {name: around(gene, values[name]) for name, gene in genes.items()} if annealed else genes
        starts = initial_hyperparameters(founders, values, size, seed, init)
        self.generation = 0
        self.next_index = size
        self.best: Best | None = None
        """The best exam so far."""
        self._members = [_Numbers(index, start, self.genes) for index, start in enumerate(starts)]
        self._kept: dict[str, Value] = {}
        self._births: dict[int, tuple[int, bool]] = {}

    def ask(self) -> list[Assignment]:
        """Return what each member does until the next exam; asking again returns the same."""
        return [
            Assignment(member.index, dict(member.hyperparameters), *self._births.get(member.index, (None, False)))
            for member in self._members
        ]

    @checked
    def factor(self, spent: Share) -> float:
        """Return what learning rates are multiplied by where this share of the budget is spent."""
        return self.schedule.factor(spent)

    @checked
    def tell(self, exams: Mapping[int, Fitness | Sequence[float]], spent: Share) -> Told:
        """Decide by the exams of all members: a Fitness, or the scores on the same questions in the same order.

        A Fitness with ``costs`` has several objectives. ``spent`` is the share of the budget that is spent, exams
        included. Raises ConfigError if the exams are not those of the members that ``ask`` named.
        """
        indices = [member.index for member in self._members]
        if set(exams) != set(indices):
            raise ConfigError(f"expected the exams of the members {indices}, found those of {sorted(exams)}")
        panels = {index: len(one) for index, one in exams.items() if not isinstance(one, Fitness)}
        if len(set(panels.values())) > 1:
            raise ConfigError(f"expected scores on the same questions of every member, found as many: {panels}")
        # In slot order, which strategies may go by (multi_frequency does), whatever order the caller has.
        fitness = {
            index: one if isinstance(one := exams[index], Fitness) else Fitness.from_scores(one) for index in indices
        }
        before = self.best
        first = fitness[leader := ranking(fitness)[0]]
        keep = None
        # At equal fitness the later one, which has trained for longer.
        if first.is_finite and (before is None or first.mean >= before.fitness.mean):
            keep, self.best = leader, Best(leader, first)
            self._kept = dict(self._members[indices.index(leader)].hyperparameters)
        plan = self.strategy.plan(fitness, self.generation, self.seed, self.next_index, Standing(spent, self.best))
        # A child of the best exam gets the values of then, which its weights were trained with.
        _, members = apply_plan(plan, self._members, lambda child: _Numbers(child, dict(self._kept), self.genes))
        # Children are clones by now, and carry their parents' values into the mutations.
        known = [Member.of(member) for member in members]
        planned = self.mutations.plan(known, plan.elite, self.generation, self.seed, plan.mutants)
        changes = with_factors(plan, known, planned)
        for member, change in zip(members, changes, strict=True):
            member.apply_mutation(change)
        self._members = members
        self._births = {birth.child: (birth.parent, birth.from_best) for birth in plan.births}
        self.next_index += len(plan.births)
        self.generation += 1
        return Told(plan, tuple(changes), keep)

    def state(self) -> dict[str, Any]:
        """Return where the search stands as plain data; the arguments of the constructor are not part of it."""
        return {
            "version": _STATE,
            "generation": self.generation,
            "next_index": self.next_index,
            "members": [{"index": one.index, "values": dict(one.hyperparameters)} for one in self._members],
            "births": [[child, parent, from_best] for child, (parent, from_best) in self._births.items()],
            "best": None if self.best is None else {"agent": self.best.agent, "fitness": self.best.fitness.state()},
            "kept": dict(self._kept),
        }

    @checked
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken, in a search that was made with the same arguments.

        Raises CheckpointError for what is not such a state.
        """
        try:
            if state["version"] != _STATE:
                raise ValueError(f"version {state['version']!r}")
            members = [_Numbers(int(one["index"]), dict(one["values"]), self.genes) for one in state["members"]]
            births = {int(child): (int(parent), bool(best)) for child, parent, best in state["births"]}
            best = state["best"]
            known = None if best is None else Best(int(best["agent"]), Fitness.from_state(best["fitness"]))
            generation, next_index, kept = int(state["generation"]), int(state["next_index"]), dict(state["kept"])
            for member in members:
                check_values(self.genes, member.hyperparameters)
            indices = {member.index for member in members}
            if not members or len(indices) < len(members) or min(indices) < 0 or max(indices) >= next_index:
                raise ValueError(f"different members below next_index={next_index}, found {sorted(indices)}")
            # A population never grows, and its founders have used the first indices.
            if not len(members) <= self._size <= next_index:
                raise ValueError(f"a search of {self._size} members, found {len(members)} of {next_index} in all")
            if generation < 0:
                raise ValueError(f"a generation of 0 or more, found {generation}")
        # The state is a file's content: whatever is wrong with it has to end in one sentence.
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"expected what Evolution.state() returned for these genes: {error}") from error
        # Only now, so that a state that is refused changes nothing.
        self._members, self._births, self.best = members, births, known
        self.generation, self.next_index, self._kept = generation, next_index, kept


class _Numbers:
    """A member without weights, as selection and mutation see it."""

    def __init__(self, index: int, values: dict[str, Value], genes: Mapping[str, Gene]) -> None:
        self.index, self.hyperparameters, self.genes = index, values, genes
        # The rest is what selection asks of any agent, and is empty without weights.
        self.fitness: list[float] = []
        self.mut = "none"
        self.rank = 0

    def apply_mutation(self, mutation: Mutation) -> None:
        self.mut = mutation.kind
        self.hyperparameters |= {change.gene: change.new for change in mutation.changes}

    def clone(self, index: int) -> "_Numbers":
        return _Numbers(index, dict(self.hyperparameters), self.genes)
