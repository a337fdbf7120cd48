"""Pulses: one agent trains, and now and then short-lived challengers with other learning rates test it."""

from collections.abc import Mapping, Sequence

from agilerl.arguments import Count, Number, Seed, Share, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, probability_better, ranking
from agilerl.hpo.selection import AT_THE_START, Birth, Plan, Standing, check_population, keep_all


class PulseSelection:
    """Every ``every`` generations fork the agent into challengers, and keep the one that the next exam proves better.

    A challenger is a clone whose learning rates are multiplied by one of ``factors``. It trains beside its parent for
    one generation, as many tokens; then the best challenger takes over if it is better with probability at least
    ``challenge`` by the paired exam (``probability_better``), and all others leave. From ``until`` of the budget on
    there are no more challengers. A population that starts with several agents is treated as a first pulse, in which
    the agent of the lowest index defends.

    Guard: if the run's best exam is better than the agent's present one with probability at least ``guard``, the agent
    of that exam comes back as it was then, at ``guard_factor`` times the learning rates of the one that fell. An agent
    whose fitness is not finite has fallen. ``guard=1`` never brings anything back.
    Raises ConfigError for factors that are not positive or are 1, and probabilities outside [0.5, 1].
    """

    @checked
    def __init__(
        self,
        every: Count = 3,
        factors: Sequence[Number] = (3.0,),
        challenge: Share = 0.8,
        until: Share = 0.4,
        *,
        guard: Share = 0.99,
        guard_factor: Share = 0.4,
    ) -> None:
        if any(not factor > 0 or factor == 1 for factor in factors):
            raise ConfigError(f"factors must be above 0 and not 1, found {list(factors)}.")
        if min(challenge, guard) < 0.5 or not guard_factor > 0:
            raise ConfigError(
                "challenge and guard must be at least 0.5 and guard_factor above 0, found "
                f"challenge={challenge}, guard={guard}, guard_factor={guard_factor}."
            )
        self.every = every
        self.factors = tuple(float(factor) for factor in factors)
        self.challenge = challenge
        self.until = until
        self.guard = guard
        self.guard_factor = guard_factor

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
        ranked, verdicts = ranking(fitness), dict[int, str]()
        winner = self._winner(fitness, ranked, verdicts)
        losers = tuple(index for index in fitness if index != winner)
        fallen = self._guarded(fitness[winner], standing, verdicts, winner)
        if fallen is not None:
            birth = Birth(next_index, fallen, winner, self.guard_factor, from_best=True)
            return Plan(
                generation, ranked[0], (next_index,), (birth,), (*losers, winner), reason="guard", verdicts=verdicts
            )
        if not fitness[winner].is_finite:
            return keep_all(fitness, generation, "no agent has a finite fitness")
        due = len(fitness) == 1 and (generation + 1) % self.every == 0 and standing.spent < self.until
        births = tuple(
            Birth(next_index + number, winner, factor=factor)
            for number, factor in enumerate(self.factors if due else ())
        )
        slots = (winner, *(birth.child for birth in births))
        reason = "pulse" if births else "challenge decided" if losers else ""
        return Plan(generation, ranked[0], slots, births, losers, reason=reason, verdicts=verdicts)

    def _winner(self, fitness: Mapping[int, Fitness], ranked: Sequence[int], verdicts: dict[int, str]) -> int:
        """Return the agent that stays: the oldest, unless the best of the others is better with enough certainty."""
        present = min(fitness)
        best = next((index for index in ranked if index != present), None)
        if best is None:
            return present
        sure = probability_better(fitness[best], fitness[present])
        if sure >= self.challenge and sure > 0.5:
            verdicts[best] = f"takes over from agent {present}: P = {sure:.3f} >= {self.challenge:g}"
            verdicts[present] = f"left: agent {best} is better with P = {sure:.3f} >= {self.challenge:g}"
            winner = best
        else:
            verdicts[present] = f"kept: P = {sure:.3f} < {self.challenge:g} that agent {best} is better"
            winner = present
        for index in ranked:
            if index != winner:
                verdicts.setdefault(index, f"left: did not win against agent {present}")
        return winner

    def _guarded(self, present: Fitness, standing: Standing, verdicts: dict[int, str], winner: int) -> int | None:
        """Return the agent of the best exam if the present one has certainly fallen below it."""
        best = standing.best
        if best is None or not best.fitness.is_finite or self.guard >= 1:
            return None
        sure = probability_better(best.fitness, present)
        if sure < self.guard:
            return None
        verdicts[winner] = (
            f"left: below the best exam, {present.mean:.3f} against {best.fitness.mean:.3f} of agent {best.agent}, "
            f"with P = {sure:.3f} >= {self.guard:g}; it comes back at {self.guard_factor:g} times the learning rate"
        )
        return best.agent
