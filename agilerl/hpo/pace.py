"""How long a knockout lasts, as a share of the budget."""

from dataclasses import dataclass

FIELD = 4
"""Founders that the knockout halves generation by generation. More than these share the first generation that four
would have had, after which two stay, so that the knockout costs about as much whatever the population's size."""
MOST = 0.25
"""Share of the budget after which the first exam of more than ``FIELD`` founders leaves one of them."""


def first_steps(steps: int, founders: int) -> int:
    """Return the iterations of the generation in which all founders of a knockout train; ``steps`` have the others."""
    return max(1, steps * FIELD // founders) if founders > FIELD else steps


def survivors(agents: int, spent: float) -> int:
    """Return how many agents a knockout keeps where ``spent`` of the budget, in [0, 1], is spent."""
    return (agents + 1) // 2 if agents <= FIELD else 2 - (spent >= MOST)


@dataclass(frozen=True)
class Pace:
    """What a run's budget holds, in shares of it for one agent."""

    steps: int
    """Iterations of a generation."""
    iteration: float
    """An iteration."""
    exam: float
    """An exam; 0 if exams cost nothing of what limits the run."""

    def knockout(self, founders: int, period: int = 1) -> tuple[int, float]:
        """Return after how many generations, and which share of the budget, a knockout leaves one agent."""
        agents, generation, spent = founders, 0, 0.0
        while agents > 1 and spent < 1:
            steps = first_steps(self.steps, founders) if agents == founders else self.steps
            spent += agents * (steps * self.iteration + self.exam)
            generation += 1
            agents = agents if generation % period else survivors(agents, spent)
        return generation, spent

    def first_pulse(self, founders: int, period: int, every: int) -> float:
        """Return the share of the budget at which the first challenger after a knockout is due."""
        generation, spent = self.knockout(founders, period)
        return spent + (every - generation % every) * (self.steps * self.iteration + self.exam)
