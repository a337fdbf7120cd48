"""Multiple-frequency selection: sub-populations that evolve at different periods, with asymmetric migration."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, pairwise
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from agilerl.checks.arguments import Count, Seed, checked
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.selection import AgentT, Birth, Contest, Plan, Size, Strategy, selected
from agilerl.streams import stream


class _Replacement(NamedTuple):
    """A clone of ``parent`` takes the slot of ``dead``."""

    dead: int
    parent: int
    hyperparameters_from: int | None = None
    mutates: bool = False


class MultiFrequencySelection(Strategy):
    """MF-PBT (arXiv 2506.03225): steady sub-populations keep what the greedy ones would lose.

    Slots are dealt in order to ``n_subpopulations`` equal parts; part i evolves at every generation whose number (from
    0) plus one is a multiple of ``evolution_frequency_ratios[i]`` (default 1, 4, 16, ...: the first always evolves).
    An evolving part is ranked into winners, survivors, open for migration and losers (defaults: a quarter each, and at
    least one winner and one loser). Losers become clones of a random winner and are the only ones open to mutation.
    The k-th agent open for migration is replaced by the k-th best agent of the other parts if that one is better: as a
    full clone if it comes from a slower part; from a faster part only its weights are copied, with the gene values of
    the local best. An agent whose fitness is not finite counts as a loser; a part without any finite agent is
    refilled by migration. Raises ConfigError for parts or brackets that do not add up, or ratios that do not increase.
    """

    name = "multi_frequency"
    population_size: Size = None
    n_subpopulations: Count = 2
    """Parts of the population."""
    evolution_frequency_ratios: tuple[Count, ...] | None = None
    """Each part's generations between selections; None: 1, 4, 16, ..."""
    n_winners: Annotated[int | None, Field(ge=1)] = None
    """Agents of a part that are copied; None: a quarter, at least one."""
    n_survivors: Annotated[int | None, Field(ge=0)] = None
    """Agents of a part that stay; None: the rest."""
    n_open_for_migration: Annotated[int | None, Field(ge=0)] = None
    """Agents of a part that better ones of other parts replace; None: a quarter."""
    n_losers: Annotated[int | None, Field(ge=1)] = None
    """Agents of a part that copies of winners replace; None: a quarter, at least one."""
    seed: Annotated[Seed | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        size, parts, ratios = self.population_size, self.n_subpopulations, self.ratios
        if size is not None and (size < 2 * parts or size % parts):
            raise ValueError(
                "population_size must be a multiple of n_subpopulations with at least two agents in each, "
                f"found population_size={size}, n_subpopulations={parts}."
            )
        increasing = all(a < b for a, b in pairwise(ratios))
        if len(ratios) != parts or ratios[0] != 1 or not increasing:
            raise ValueError(
                "evolution_frequency_ratios must start at 1 and increase, one number for each of the "
                f"{parts} sub-populations, found {list(ratios)}."
            )
        if size is not None and (sum(self.brackets) != size // parts or min(self.brackets) < 0):
            raise ValueError(
                f"n_winners, n_survivors, n_open_for_migration and n_losers must add up to the {size // parts} agents "
                f"of a sub-population, with at least one winner; found {self.brackets}."
            )
        return self

    @property
    def fixed_size(self) -> int | None:
        """Agents of every population that it plans for."""
        return self.population_size

    @cached_property
    def ratios(self) -> tuple[int, ...]:
        """Each part's generations between selections."""
        return self.evolution_frequency_ratios or tuple(4**part for part in range(self.n_subpopulations))

    @cached_property
    def brackets(self) -> tuple[int, int, int, int]:
        """Winners, survivors, open for migration and losers of a part, best first."""
        assert self.population_size is not None, "a population is planned for"
        size = self.population_size // self.n_subpopulations
        quarter = size // 4
        winners = max(1, quarter) if self.n_winners is None else self.n_winners
        losers = max(1, quarter) if self.n_losers is None else self.n_losers
        migrants = quarter if self.n_open_for_migration is None else self.n_open_for_migration
        rest = size - winners - losers - migrants
        return winners, rest if self.n_survivors is None else self.n_survivors, migrants, losers

    def decide(self, contest: Contest) -> Plan:
        """Return a plan for each part whose generation it is; the order of ``fitness`` decides the parts."""
        if not contest.finite:
            return contest.unchanged()
        fitness, agents = contest.fitness, list(contest.fitness)
        size = len(agents) // self.n_subpopulations
        parts = [agents[start : start + size] for start in range(0, len(agents), size)]
        births: dict[int, Birth] = {}
        verdicts: dict[int, str] = {}
        mutants: set[int] = set()
        # Faster parts come first, and all plans see the exam: an agent may be cloned by several parts.
        for number, ratio in enumerate(self.ratios):
            if (contest.generation + 1) % ratio:
                continue
            for change in self._evolve(number, parts, fitness, contest.generation, contest.seed):
                child = contest.next_index + len(births)
                births[change.dead] = Birth(child, change.parent, change.hyperparameters_from)
                why = f"among the worst of part {number}" if change.mutates else "open for migration"
                values = f"{fitness[change.dead].value:.3f} against {fitness[change.parent].value:.3f}"
                verdicts[change.dead] = f"left: {why}, {values} of agent {change.parent}, which was cloned"
                mutants.update([child] if change.mutates else [])
        return contest.replaced(births, verdicts, mutants)

    @checked
    def select(self, pop: Sequence[AgentT]) -> tuple[AgentT, list[AgentT], list[int]]:
        """Return the elite, the next population in slot order, and the indices that are open to mutation.

        Pass the third to ``Mutations.mutation(pop, nominated)``. Raises ConfigError if an agent was not evaluated.
        """
        elite, population, plan = selected(self, pop, self.seed or 0)
        return elite, population, list(plan.mutants)

    def _evolve(
        self, number: int, parts: list[list[int]], fitness: Mapping[int, Fitness], generation: int, seed: int
    ) -> Iterator[_Replacement]:
        ranked = ranking({index: fitness[index] for index in parts[number]})
        finite = [index for index in ranked if fitness[index].is_finite]
        best, survivors, _, worst = self.brackets
        first_loser = len(ranked) - worst
        losers = [i for rank, i in enumerate(ranked) if rank >= first_loser or not fitness[i].is_finite]
        winners = finite[:best]
        # Without a sound winner all places are open to migrants, those of losers too.
        for loser in losers if winners else ():
            # A stream for each loser, so that no draw depends on how many there are.
            pick = int(stream(seed, "selection", generation, loser).integers(len(winners)))
            yield _Replacement(loser, winners[pick], mutates=True)
        open_places = [i for i in ranked[best + survivors : first_loser] if i not in losers] if winners else ranked
        home = {index: part for part, members in enumerate(parts) for index in members}
        outside = ranking({i: one for i, one in fitness.items() if home[i] != number and one.is_finite})
        # A part without any finite agent may have more slots than there are migrants: some are then used twice.
        migrants = outside if winners else cycle(outside)
        # The k-th of both sides meet, as far as there are both.
        for local, migrant in zip(open_places, migrants, strict=False):
            if fitness[migrant].value > fitness[local].value:
                # Genes of a faster part are good for the near future, which the slower one is there to resist.
                weights_only = bool(winners) and self.ratios[home[migrant]] < self.ratios[number]
                yield _Replacement(local, migrant, winners[0] if weights_only else None)
