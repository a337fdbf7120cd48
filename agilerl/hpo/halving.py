"""Successive halving: the better half continues, with the budget of both halves."""

from collections.abc import Mapping
from dataclasses import replace

from agilerl.arguments import Seed, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.selection import AT_THE_START, NoSelection, Plan, SelectionStrategy, Standing, check_population


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
        )
