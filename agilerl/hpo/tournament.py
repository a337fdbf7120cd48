"""Tournament selection, as AgileRL documents it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from agilerl.checks.arguments import Count, Seed, checked
from agilerl.hpo.fitness import Fitness, evidence
from agilerl.hpo.selection import AgentT, Birth, Contest, Plan, Size, Strategy, selected
from agilerl.streams import stream


class TournamentSelection(Strategy):
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

    name = "tournament"
    tournament_size: Count = 2
    """Agents that compete for one place; if not given, at most as many as there are."""
    elitism: bool = True
    """The best agent keeps its place."""
    population_size: Size = None
    eval_loop: Annotated[Count, Field(exclude=True)] = 1
    language_model: Annotated[bool, Field(exclude=True)] = True
    gate: Annotated[float | None, Field(ge=0.5, lt=1)] = None
    """Replace an agent only by one that is better with this probability; None always replaces."""
    seed: Annotated[Seed, Field(exclude=True)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fits_one(cls, values: Any) -> Any:
        alone = isinstance(values, dict) and values.get("population_size") == 1
        return {**values, "tournament_size": 1} if alone else values  # of itself alone

    @model_validator(mode="after")
    def _fits(self) -> Self:
        size = self.population_size
        if size is not None and self.tournament_size > size:
            raise ValueError(
                f"tournament_size must be between 1 and population_size={size}, found {self.tournament_size}"
            )
        return self

    @property
    def fixed_size(self) -> int | None:
        """Agents of every population that it plans for."""
        return self.population_size

    def decide(self, contest: Contest) -> Plan:
        """Return a plan in which winners of several tournaments replace agents that won none."""
        fitness, finite = contest.fitness, contest.finite
        if not finite:
            return contest.unchanged()
        rng = stream(contest.seed, "selection", contest.generation)
        # Fewer agents may be sound than a tournament has places.
        size = min(self.tournament_size, len(finite))
        draws = [rng.choice(len(finite), size, replace=False) for _ in range(len(fitness) - int(self.elitism))]
        # They are ranked, so the lowest position wins.
        wins = Counter(finite[int(np.min(draw))] for draw in draws)
        if self.elitism:
            # The elite keeps one place without a tournament; every tournament it wins adds a clone.
            wins[finite[0]] += 1
        losers = sorted(index for index in fitness if not wins[index])
        parents = [index for index in sorted(wins) for _ in range(wins[index] - 1)]
        births: dict[int, Birth] = {}
        verdicts: dict[int, str] = {}
        # As many of both, because there are as many wins as agents.
        for loser, parent in zip(losers, parents, strict=True):
            if self._passes(fitness, loser, parent, verdicts):
                births[loser] = Birth(contest.next_index + len(births), parent)
        return contest.replaced(births, verdicts)

    @checked
    def select(self, pop: Sequence[AgentT]) -> tuple[AgentT, list[AgentT], None]:
        """Return the elite, the next population in slot order, and None: as documented, all but the elite may mutate.

        Uses the last ``eval_loop`` entries of each agent's ``fitness``. Raises ConfigError when an agent has none.
        """
        elite, population, _ = selected(self, pop, self.seed, self.eval_loop)
        return elite, population, None

    def _passes(self, fitness: Mapping[int, Fitness], dead: int, parent: int, verdicts: dict[int, str]) -> bool:
        """Say whether an agent may be replaced: without a gate always, and never by a tie with one; and why."""
        if self.gate is None:
            values = f"{fitness[dead].value:.3f} against {fitness[parent].value:.3f} of agent {parent}"
            verdicts[dead] = f"left: won no tournament, {values}, which was cloned"
            return True
        proof = evidence(fitness[parent], fitness[dead], float(self.gate))
        verdicts[dead] = proof.about_replacing(parent)
        return proof.is_enough
