"""The knockout: a tournament whose losers leave, so that their budget goes to the winners; the default."""

from collections.abc import Mapping, Sequence

from agilerl.arguments import Count, Seed, Share, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, probability_better, ranking
from agilerl.hpo.pulses import PulseSelection
from agilerl.hpo.selection import AT_THE_START, Plan, SelectionStrategy, Standing, check_population, keep_all


class KnockoutSelection:
    """Every ``period`` generations the worse half of the founders leaves: N -> N/2 -> ... -> ``floor``.

    Agent 0 has the user's configuration and is seeded: where it would leave, it stays in place of the last agent that
    would stay, unless that one is better with probability at least ``confidence`` by the paired exam
    (``probability_better``); a tie is no evidence. An agent whose fitness is not finite leaves at once. What the losers
    would have spent, the others do. ``population_size`` is the number of founders, of indices 0 to population_size - 1.

    Later rounds: once one agent is left, ``later`` plans (None: ``PulseSelection()``, which tests it with challengers).
    With a ``floor`` above 1 the last agents stay as they are.
    Raises ConfigError for a floor above the population's size, and a confidence outside [0.5, 1].
    """

    @checked
    def __init__(
        self,
        population_size: Count,
        period: Count = 1,
        confidence: Share = 0.8,
        floor: Count = 1,
        later: SelectionStrategy | None = None,
    ) -> None:
        if floor > population_size:
            raise ConfigError(f"floor must be at most population_size={population_size}, found {floor}.")
        if confidence < 0.5:
            raise ConfigError(f"confidence must be in [0.5, 1], found {confidence}.")
        self.population_size = population_size
        self.period = period
        self.confidence = confidence
        self.floor = floor
        self.later = PulseSelection() if later is None else later

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
        all_founders = max(fitness) < self.population_size
        if self.floor == 1 and (len(fitness) == 1 or not all_founders):
            return self.later.plan(fitness, generation, seed, next_index, standing)
        ranked = ranking(fitness)
        finite = [index for index in ranked if fitness[index].is_finite]
        if not finite:
            return keep_all(fitness, generation, "no agent has a finite fitness")
        halves = (generation + 1) % self.period == 0 and len(fitness) > self.floor
        count = min(max((len(ranked) + 1) // 2, self.floor) if halves else len(ranked), len(finite))
        verdicts: dict[int, str] = {}
        kept = self._kept(fitness, ranked, count, verdicts)
        return Plan(
            generation,
            ranked[0],
            slots=tuple(index for index in fitness if index in kept),
            deaths=tuple(index for index in fitness if index not in kept),
            reason=f"knockout: {len(ranked)} to {count} agents" if count < len(ranked) else "",
            verdicts=verdicts,
        )

    def _kept(
        self, fitness: Mapping[int, Fitness], ranked: Sequence[int], count: int, verdicts: dict[int, str]
    ) -> set[int]:
        kept, seeded = list(ranked[:count]), 0
        if seeded in fitness and seeded not in kept and fitness[seeded].is_finite:
            rival = kept[-1]
            sure = probability_better(fitness[rival], fitness[seeded])
            if sure < self.confidence or sure <= 0.5:
                verdicts[seeded] = f"kept: P = {sure:.3f} < {self.confidence:g} that agent {rival} is better"
                verdicts[rival] = f"left: better than agent {seeded} with P = {sure:.3f} < {self.confidence:g} only"
                kept[-1] = seeded
            else:
                verdicts[seeded] = f"left: agent {rival} is better with P = {sure:.3f} >= {self.confidence:g}"
        for place, index in enumerate(ranked, start=1):
            if index not in kept:
                verdicts.setdefault(index, f"left: place {place} of {len(ranked)}, {fitness[index].value:.3f}")
        return set(kept)
