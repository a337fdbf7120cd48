"""Tournament selection, as AgileRL documents it."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agilerl.arguments import Count, Number, Seed, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, evidence, ranking
from agilerl.hpo.selection import (
    AT_THE_START,
    AgentT,
    Birth,
    Plan,
    Standing,
    apply_plan,
    check_population,
    keep_all,
    latest_fitness,
    next_generation,
)
from agilerl.streams import stream


class TournamentSelection:
    """Fill the next population with the winners of random tournaments; with ``elitism`` the best agent keeps its place.

    Each tournament draws ``tournament_size`` different agents; the best of them wins. The winners are those of AgileRL,
    but an agent keeps its identity if possible: one that won at least once stays in its slot under its index, and its
    further wins become clones in the slots of agents that never won, and these die. The plan opens only the clones to
    mutation: mutating the kept agents too costs up to 6 points in the surrogate worlds of the tests. An agent whose
    fitness is not finite enters no tournament; if no agent has a finite one, the population stays as it is.
    With a ``gate``, in [0.5, 1), an agent that never won stays nevertheless, unless the winner that would replace it is
    better with at least this probability by the paired exam (``evidence``).
    ``select`` compares the mean of each agent's last ``eval_loop`` exams; ``plan`` is told the fitness.
    ``language_model`` is accepted and has no effect.
    Raises ConfigError if the tournament is larger than the population or either is below one, and for another gate.
    """

    @checked
    def __init__(
        self,
        tournament_size: int,
        elitism: bool,
        population_size: int,
        eval_loop: Count = 1,
        language_model: bool = True,
        *,
        gate: Number | None = None,
        seed: Seed = 0,
    ) -> None:
        if population_size < 1:
            raise ConfigError(f"A population needs at least one agent, found population_size={population_size}.")
        if population_size == 1 and tournament_size >= 1:
            tournament_size = 1  # there is nobody to compete with
        if not 1 <= tournament_size <= population_size:
            raise ConfigError(
                f"tournament_size must be between 1 and population_size={population_size}, found {tournament_size}."
            )
        if gate is not None and not 0.5 <= gate < 1:
            raise ConfigError(f"gate must be in [0.5, 1), found {gate}.")
        self.tournament_size, self.eval_loop = tournament_size, eval_loop
        self.gate = gate
        self.elitism = elitism
        self.population_size = population_size
        self.seed = seed

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
        check_population(fitness, next_index, self.population_size)
        ranked = ranking(fitness)
        finite = [index for index in ranked if fitness[index].is_finite]
        if not finite:
            return keep_all(fitness, generation, "no agent has a finite fitness")
        wins = Counter(self._winners(finite, len(fitness) - int(self.elitism), generation, seed))
        elite = finite[0]
        if self.elitism:
            # The elite keeps one place without a tournament; every tournament it wins adds a clone.
            wins[elite] += 1
        deaths = tuple(sorted(index for index in fitness if not wins[index]))
        parents = [index for index in sorted(wins) for _ in range(wins[index] - 1)]
        verdicts: dict[int, str] = {}
        pairs = [pair for pair in zip(deaths, parents, strict=True) if self._passes(fitness, *pair, verdicts)]
        births = [Birth(next_index + offset, parent) for offset, (_, parent) in enumerate(pairs)]
        deaths = tuple(dead for dead, _ in pairs)
        replaced = {dead: birth.child for dead, birth in zip(deaths, births, strict=True)}
        slots = tuple(replaced.get(index, index) for index in fitness)
        children = {birth.child for birth in births}
        mutants = tuple(index for index in slots if index in children)
        return Plan(generation, elite, slots, tuple(births), deaths, mutants, verdicts=verdicts)

    @checked
    def select(self, pop: Sequence[AgentT]) -> tuple[AgentT, list[AgentT], None]:
        """Return the elite, the next population in slot order, and None: as documented, all but the elite may mutate.

        Uses the last ``eval_loop`` entries of each agent's ``fitness``. Raises ConfigError when an agent has none.
        """
        fitness = latest_fitness(pop, self.eval_loop)
        plan = self.plan(fitness, next_generation(pop), self.seed, max(fitness) + 1)
        elite, population = apply_plan(plan, pop)
        return elite, population, None

    def _passes(self, fitness: Mapping[int, Fitness], dead: int, parent: int, verdicts: dict[int, str]) -> bool:
        """Say whether an agent may be replaced: without a gate always, and never by a tie with one; and why."""
        if self.gate is None:
            values = f"{fitness[dead].value:.3f} against {fitness[parent].value:.3f} of agent {parent}"
            verdicts[dead] = f"left: won no tournament, {values}, which was cloned"
            return True
        found = evidence(fitness[parent], fitness[dead], float(self.gate))
        verdicts[dead] = found.about_replacing(parent)
        return found.is_enough

    def _winners(self, finite: list[int], count: int, generation: int, seed: int) -> list[int]:
        """Return the winner of each tournament; ``finite`` is ranked, so the lowest position wins."""
        rng = stream(seed, "selection", generation)
        size = min(self.tournament_size, len(finite))
        draws = [rng.choice(len(finite), size, replace=False) for _ in range(count)]
        return [finite[int(np.min(draw))] for draw in draws]
