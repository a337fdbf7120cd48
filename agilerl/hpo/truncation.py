"""Truncation selection of population based training, with a gate against replacing on noise."""

from collections.abc import Mapping

from agilerl.arguments import Seed, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, probability_better, ranking, reliability
from agilerl.hpo.selection import AT_THE_START, Birth, Plan, Standing, check_population, keep_all
from agilerl.streams import stream


class TruncationSelection:
    """Each of the worst ``fraction`` of agents copies a random one of the best ``fraction`` (PBT, arXiv 1711.09846).

    Gate: an agent is replaced only if the donor is better with probability at least ``confidence``, from the paired
    exam, shrunk by how much of the spread between agents is real (``probability_better``, ``reliability``); ties keep.
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
        trust = reliability(list(fitness.values()))
        births: dict[int, Birth] = {}
        for index in sorted(candidates):
            donor = donors[int(stream(seed, "selection", generation, index).integers(len(donors)))]
            better = probability_better(fitness[donor], fitness[index], trust)
            # With confidence=0.5 a tie would pass as well, but a tie must not replace an agent.
            if better >= self.confidence and better > 0.5:
                births[index] = Birth(next_index + len(births), donor)
        return Plan(
            generation,
            ranked[0],
            slots=tuple(births[index].child if index in births else index for index in fitness),
            births=tuple(births.values()),
            deaths=tuple(births),
            mutants=tuple(births[index].child for index in fitness if index in births),
        )
