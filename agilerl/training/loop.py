"""The training loop: iterations, exams and selections, each an event that is yielded once it is over."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.selection import SelectionStrategy
from agilerl.population import Population
from agilerl.training.events import Event, Evolved, PhaseStarted
from agilerl.training.progress import Progress


class Loop(ABC):
    """A training that knows its steps: that of a run (``agilerl.training.run``), or of a function of AgileRL's."""

    progress: Progress
    evaluation_interval: int | None = None
    """Iterations between further exams, besides the one that ends a generation."""

    def generations(self) -> Iterator[Event]:
        """Train until the budget is spent; a generation ends with an exam and, unless it is the last, a selection."""
        progress = self.progress
        # A run that was resumed inside a generation ends it, even if its budget is spent by now.
        while self.spent() < 1 or progress.step:
            yield PhaseStarted("train")
            while progress.step < self.generation_steps and self.spent() < 1:
                yield self.iterate()
                progress.step += 1
                if self.evaluation_interval and progress.iteration % self.evaluation_interval == 0:
                    yield PhaseStarted("exam")
                    yield self.examine()
                self.save_iteration(ends=progress.step == self.generation_steps or self.spent() >= 1)
            # Unless evaluation_interval has just examined the agents as they are now.
            if progress.exam is None:
                yield PhaseStarted("exam")
                yield self.examine()
            yield from self.test_generation()
            # Clones of a last selection would never train.
            if self.spent() < 1:
                yield self.evolve()
            progress.generation, progress.step = progress.generation + 1, 0
            self.save_generation()

    @property
    @abstractmethod
    def generation_steps(self) -> float:
        """Iterations of the present generation."""

    @abstractmethod
    def spent(self) -> float:
        """Return the largest share spent of any budget; training ends at 1."""

    @abstractmethod
    def iterate(self) -> Event:
        """Let every agent sample and learn once, after which exams are out of date."""

    @abstractmethod
    def examine(self) -> Event:
        """Make the ``exam`` of the progress."""

    @abstractmethod
    def evolve(self) -> Event:
        """Select by the exam, and mutate."""

    @abstractmethod
    def save_iteration(self, *, ends: bool) -> None:
        """Save what is due after an iteration; ``ends``: the generation has had its last one."""

    def test_generation(self) -> Iterable[Event]:
        """Do what follows the exam that ends a generation, before anything evolves."""
        return ()

    def save_generation(self) -> object:
        """Save what is due after a generation."""
        return None


def evolved(
    population: Population,
    fitness: Mapping[int, Fitness],
    selection: SelectionStrategy,
    mutations: Mutations,
    *,
    iteration: int,
    generation: int,
    **settings: Any,
) -> Evolved:
    """Let a population evolve with the ``settings`` of :meth:`Population.evolve`, and return the event."""
    start = perf_counter()
    change = population.evolve(fitness, selection, mutations, generation=generation, **settings)
    seconds, elite, agents = perf_counter() - start, change.plan.elite, population.agents
    spreads = [
        float(np.std([agent.genes[name].to_unit(agent.hyperparameters[name]) for agent in agents]))
        for name in agents[0].genes
    ]
    return Evolved(
        generation=generation,
        iteration=iteration,
        fitness=fitness,
        plan=change.plan,
        elite=elite if fitness[elite].is_finite and elite not in change.sick else None,
        sick=change.sick,
        inherited=change.inherited,
        changes=change.mutations,
        mutations={agent.index: agent.mut for agent in agents},
        hyperparameters={agent.index: dict(agent.hyperparameters) for agent in agents},
        diversity=float(np.mean(spreads)) if spreads else 0.0,
        seconds=seconds,
    )
