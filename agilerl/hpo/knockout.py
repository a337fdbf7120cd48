"""The default search, down to one agent: knockout rounds, then pulses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from agilerl.checks.arguments import Count, Fraction, Positive, Share, Whole
from agilerl.hpo.fitness import Fitness, evidence, probability_better
from agilerl.hpo.selection import RESTART, Birth, Contest, Plan, Size, Standing, Strategy, Sureness

TRUST = 0.99
"""Least ``confidence`` against a founder whose rate is known to be usual: one that is too high often leads the first
exam, and collapses later."""
STUCK_PROOF = 0.9
"""Probability that the best exam was better from which on an agent that is stuck gives way. Without proof good agents
give way by luck, as those that answer surely have few groups that differ."""
STUCK_FACTOR = 0.2
"""Factor on the learning rate of an agent that comes back because it, or its successor, could learn no more."""


def _compared(one: Fitness, other: Fitness, name: str, probability: float) -> str:
    """Return that one is not better than the other with this name, and the exams of both."""
    how = "not better" if probability < 0.5 else "not surely better"
    return f"{how} than {name}, {one.value:.3f} against {other.value:.3f}"


class PulseSelection(Strategy):
    """Every ``every`` generations fork the agent into challengers, and keep the one that the next exam proves better.

    A challenger is a clone whose learning rates are multiplied by one of ``factors``. It trains beside its parent for
    one generation, as many tokens; then the best challenger takes over if it is better with probability at least
    ``challenge`` by the paired exam (``probability_better``), and all others leave. One that takes over is challenged
    again at once: there is more to find in that direction. From ``until`` of the budget on there are no more
    challengers. A population that starts with several agents is treated as a first pulse, in which
    the agent of the lowest index defends.

    Guard: if the run's best exam is better than the agent's present one with certainty, the agent of that exam comes
    back as it was then, at ``guard_factor`` times the learning rates of the one that fell. The best of n exams exceeds
    the next one by chance, and is compared with many, so the probability must be at least 1 - (1 - ``guard``) / n
    (Bonferroni). An agent whose fitness is not finite has fallen. For one that is stuck (``Standing.stuck``) below the
    best exam ``STUCK_PROOF`` is enough, because waiting can hardly win; its rate was far too high, so it comes back at
    ``STUCK_FACTOR`` times that. As long as no exam is above the rewards before training (``Standing.untrained``), an
    agent that has fallen begins again at that factor. ``guard=1`` never brings anything back.
    Raises ConfigError for factors that are not positive or are 1, and probabilities outside [0.5, 1].
    """

    name = "pulses"
    every: Count = 3
    """Generations from one fork into challengers to the next."""
    factors: tuple[Positive, ...] = (3.0,)
    """One challenger each: its learning rates are the agent's times this. An empty list forks none."""
    challenge: Sureness = 0.8
    """Probability of being better, by the paired exam, with which a challenger takes over."""
    until: Share = 0.45
    """Share of the budget after which there are no more challengers."""
    guard: Sureness = 0.99
    """Bring the best exam's agent back if it is better than the present one with this probability; 1 never does."""
    guard_factor: Fraction = 0.4
    """Factor on its learning rates then."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        # Such a challenger would train just as its parent does.
        if 1 in self.factors:
            raise ValueError(f"PulseSelection: factors must be above 0 and not 1, found {list(self.factors)}")
        return self

    def decide(self, contest: Contest) -> Plan:
        """Return a plan with challengers, or with the winner of those that are there."""
        fitness, generation = contest.fitness, contest.generation
        verdicts = dict[int, str]()
        winner = self._winner(contest, verdicts)
        losers = tuple(index for index in fitness if index != winner)
        fallen = self._guarded(fitness[winner], generation, contest.standing, verdicts, winner)
        if fallen is not None:
            agent, factor = fallen
            # Weights of the best exam, genes of the fallen agent: its rate is the one that went wrong and is lowered.
            birth = Birth(contest.next_index, agent, winner, factor, from_best=True)
            elite, deaths = contest.ranked[0], (*losers, winner)
            reason = "guard" if contest.standing.untrained is None else RESTART
            return Plan(generation, elite, (birth.child,), (birth,), deaths, reason=reason, verdicts=verdicts)
        if not fitness[winner].is_finite:
            return contest.unchanged()
        # Indices never repeat, so the defender is the one with the lowest.
        taken_over = winner != min(fitness)
        due = (len(fitness) == 1 and (generation + 1) % self.every == 0) or taken_over
        births = tuple(
            Birth(contest.next_index + number, winner, factor=factor)
            for number, factor in enumerate(self.factors if due and contest.standing.spent < self.until else ())
        )
        slots = (winner, *(birth.child for birth in births))
        reason = "pulse" if births else "challenge decided" if losers else ""
        return Plan(generation, contest.ranked[0], slots, births, losers, reason=reason, verdicts=verdicts)

    def _winner(self, contest: Contest, verdicts: dict[int, str]) -> int:
        """Return the agent that stays: the oldest, unless the best of the others is better with enough certainty."""
        fitness, present = contest.fitness, min(contest.fitness)
        best = next((index for index in contest.ranked if index != present), None)
        if best is None:
            return present
        sure = probability_better(fitness[best], fitness[present])
        # With challenge=0.5 a tie, which is no evidence, would be enough without the second condition.
        if sure >= self.challenge and sure > 0.5:
            verdicts[best] = f"takes over from agent {present}: P = {sure:.3f} >= {self.challenge:g}"
            verdicts[present] = f"left: agent {best} is better with P = {sure:.3f} >= {self.challenge:g}"
            winner = best
        else:
            verdicts[present] = f"kept: P = {sure:.3f} < {self.challenge:g} that agent {best} is better"
            winner = present
            compared = _compared(fitness[best], fitness[present], f"agent {present}", sure)
            verdicts[best] = f"left: {compared}, P = {sure:.3f} < {self.challenge:g}"
        verdicts |= contest.places([winner], verdicts)
        return winner

    def _guarded(
        self, present: Fitness, generation: int, standing: Standing, verdicts: dict[int, str], winner: int
    ) -> tuple[int, float] | None:
        """Return the agent of the best exam and a factor on its rate, if the present one has fallen below it."""
        best = standing.best
        if best is None or self.guard >= 1:
            return None
        if standing.untrained is not None:
            if present.is_finite:
                return None
            verdicts.clear()
            verdicts[winner] = f"begins again, as before training, at {STUCK_FACTOR:g} times the rate"
            return best.agent, STUCK_FACTOR
        # The best of as many exams as there were is above the next one by luck alone.
        sure, needed = probability_better(best.fitness, present), 1 - (1 - self.guard) / (generation + 1)
        if winner in standing.stuck and sure >= STUCK_PROOF:
            verdicts[winner] = (
                f"left: rewards differ within hardly any group, {present.mean:.3f} in the exam against "
                f"{best.fitness.mean:.3f} of agent {best.agent}; back at {STUCK_FACTOR:g} times the learning rate"
            )
            return best.agent, STUCK_FACTOR
        if sure < needed:
            return None
        other = "its own" if best.agent == winner else f"agent {best.agent}'s"
        verdicts[winner] = (
            f"left: {present.mean:.3f} in the exam is below the best one, {other} {best.fitness.mean:.3f}, with "
            f"P = {sure:.5f} >= {needed:.5f}; that comes back at {self.guard_factor:g} times the learning rate"
        )
        return best.agent, self.guard_factor


# -- knockout rounds: a tournament whose losers leave, so that their budget goes to the winners -----------------------


class KnockoutSelection(Strategy):
    """Every ``period`` generations the worse half of the founders leaves: N -> N/2 -> ... -> ``floor``.

    One agent is seeded, 0 with the user's configuration unless :meth:`seeding` names another: if it would leave, it
    stays in place of the last agent that would stay, unless that one is better with probability at least ``confidence``
    by the paired exam (``evidence``); a tie is not evidence. If one of n is left at once, that is the best of n - 1
    others, so the probability must be at least 1 - (1 - ``confidence``) / (n - 1). An agent whose fitness is not finite
    leaves at once. The agents that stay spend what the losers would have spent. ``population_size`` is the number of
    founders, whose indices are 0 to population_size - 1.

    While more than four are left, an agent leaves only if the second-best (the ``floor``-th, if that is more) is better
    with ``confidence``. Once ``MOST`` of the budget is spent, place decides and one stays (``floor``, if that is more),
    or none would be left for later rounds.

    Later rounds: once one agent is left, ``pulses`` test it with challengers. With a ``floor`` above 1 the last agents
    stay as they are.
    Raises ConfigError for a floor above the population's size, and a confidence outside [0.5, 1].
    """

    name = "knockout"
    population_size: Size = None
    period: Count = 1
    """Generations from one halving to the next."""
    confidence: Sureness = 0.8
    """Probability of being better from which on an agent displaces the user's configuration."""
    floor: Count = 1
    """Agents that are left in the end."""
    pulses: PulseSelection = PulseSelection()
    """Later rounds."""
    seeded: Annotated[Whole, Field(exclude=True)] = 0

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        if self.population_size is not None and self.floor > self.population_size:
            raise ValueError(f"floor must be at most population_size={self.population_size}, found {self.floor}.")
        return self

    def seeding(self, agent: int) -> "KnockoutSelection":
        """Return the same strategy with another agent that is trusted most, and leaves on more evidence."""
        return self.model_copy(update={"seeded": agent, "confidence": max(self.confidence, TRUST)})

    def decide(self, contest: Contest) -> Plan:
        """Return a plan without those that leave, or that of the later rounds."""
        fitness, founders, spent = contest.fitness, self.population_size, contest.standing.spent
        assert founders is not None, "a population is planned for"
        agents = len(fitness)
        # An index beyond the founders' is that of a challenger: the later rounds have begun.
        if self.floor == 1 and (agents == 1 or max(fitness) >= founders):
            return contest.asked_of(self.pulses)
        if not contest.finite:
            return contest.asked_of(self.pulses) if self.floor == 1 else contest.unchanged()
        leave = (contest.generation + 1) % self.period == 0 and agents > self.floor
        few = max(survivors(agents, spent), self.floor) if leave else agents
        verdicts: dict[int, str] = {}
        kept = self._kept(fitness, contest.finite, few, leave and on_evidence(agents, spent), verdicts)
        if self.seeded in kept and 0 in set(fitness).difference(kept, verdicts):
            rule = f"agent {self.seeded} is protected, as it has the usual rate of this base"
            verdicts[0] = f"{contest.places(kept, verdicts)[0]}; {rule}"
        reason = f"knockout: {agents} to {len(kept)} agents" if len(kept) < agents else ""
        return contest.reduced(kept, reason, verdicts)

    def _kept(
        self, fitness: Mapping[int, Fitness], finite: list[int], few: int, evidently: bool, verdicts: dict[int, str]
    ) -> list[int]:
        """Return the first ``few`` agents, and those that the last of these does not beat: all, or the seeded one."""
        kept, others = finite[:few], finite[few:]
        # The best of several is better than the seeded one by luck, too.
        rival, chances = kept[-1], len(others) if few == 1 and not evidently else 1
        for index in others if evidently else {self.seeded}.intersection(others):
            proof = evidence(fitness[rival], fitness[index], 1 - (1 - self.confidence) / chances)
            verdicts[index] = proof.about_replacing(rival)
            if proof.is_enough:
                continue
            # The agent that is not beaten stays beside the others or, if places decide, in the rival's place.
            kept.append(index)
            if not evidently:
                protected = f"the protected agent {self.seeded}"
                compared = _compared(fitness[rival], fitness[index], protected, proof.probability)
                verdicts[rival] = f"left: place {few} of {len(fitness)}, but {compared}, {proof}"
                kept.remove(rival)
        return kept


# -- how long a knockout lasts, as a share of the budget ---------------------------------------------------------------


FIELD = 4
"""Agents that the knockout halves generation by generation."""
SHARED = 3
"""Generations of one agent that more founders than ``FIELD`` share in one of theirs, so that the knockout costs about
as much whatever the population's size: four, then two, take 6 of them."""
MOST = 0.2
"""Share of the budget that the first generation takes at most, and after which place decides and one founder stays."""


FOUNDERS = 0.1
"""Share of the budget that an iteration of every founder takes at most. In smaller budgets one costs more than its rate
can be worth, and challengers try other rates, too."""


def on_evidence(agents: int, spent: float) -> bool:
    """Return whether founders leave only on evidence where ``spent`` of the budget, in [0, 1], is spent."""
    return agents > FIELD and spent < MOST


def survivors(agents: int, spent: float) -> int:
    """Return how many agents a knockout keeps at least, where ``spent`` of the budget, in [0, 1], is spent."""
    if spent >= MOST:
        return 1
    return 2 if agents > FIELD else (agents + 1) // 2


@dataclass(frozen=True)
class Pace:
    """What a run's budget holds, in shares of it for one agent."""

    steps: int
    """Iterations of a generation."""
    iteration: float
    """An iteration; 0 if the number of iterations is not known before the run."""
    exam: float
    """An exam; 0 if exams cost nothing of what limits the run."""
    given: bool = False
    """Whether the user chose ``steps``."""

    def founders(self, least: int, most: int) -> int:
        """Return with how many founders a knockout starts: as many as ``FOUNDERS`` of the budget pays an iteration."""
        return most if self.given or not self.iteration else min(most, max(least, int(FOUNDERS / self.iteration)))

    def founders_steps(self, agents: int) -> int:
        """Return the iterations of a generation in which so many of a knockout's founders are left: at least one.

        In small budgets a generation of one agent is an eighth, so that four would spend half before their first exam.
        """
        steps = self.steps * SHARED // agents if agents > FIELD else self.steps
        if self.iteration and not self.given:
            # For FIELD agents at least, so that generations stay as long while founders leave.
            steps = min(steps, int(MOST / (max(agents, FIELD) * self.iteration)))
        return max(1, steps)

    def knockout(self, founders: int, period: int = 1) -> tuple[int, float]:
        """Return the generations, and the share of the budget, after which one agent is left at the latest."""
        # Plays through what KnockoutSelection.decide does if founders leave by their place alone.
        agents, generation, spent = founders, 0, 0.0
        while agents > 1 and spent < 1:
            spent += agents * (self.founders_steps(agents) * self.iteration + self.exam)
            generation += 1
            if generation % period == 0 and not on_evidence(agents, spent):
                agents = survivors(agents, spent)
        return generation, spent

    def first_pulse(self, founders: int, period: int, every: int) -> float:
        """Return the share of the budget at which the first challenger after a knockout is due."""
        generation, spent = self.knockout(founders, period)
        # PulseSelection.decide counts all generations, those of the knockout too.
        return spent + (every - generation % every) * (self.steps * self.iteration + self.exam)
