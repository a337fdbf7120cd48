"""What an agent's iterations came to, and whether it may still be a parent."""

import math
from collections.abc import Mapping
from typing import get_args

from agilerl.hpo.guard import Vitals
from agilerl.rollouts.failures import Outcome

__all__ = ["BAD_STEPS", "Health"]

BAD_STEPS = 2
"""Optimizer steps skipped in a row, because a loss or a gradient was not finite, that make an agent sick."""

_MEASURES = {"entropy": "entropy", "completions/mean_length": "length", "reward": "reward"}
"""Metrics of an update that the collapse guard looks at, and what it calls them."""


class Health:
    """Counters of an agent that survive clones and checkpoints; a mutation of the agent begins them anew."""

    outcome: Outcome = "ok"
    """What the last iteration came to."""
    bad_steps: int = 0
    """Optimizer steps in a row, up to the last one, that were skipped because something was not finite."""
    sick: str = ""
    """Why the agent is no elite and no parent, and is replaced at the next selection; empty where it is sound."""
    outcomes: dict[str, int]
    """Iterations by outcome, ancestors' included."""
    vitals: dict[str, list[float]]
    """Entropy, length and reward of each iteration since the last selection, and the rewards before that."""

    def begin_health(self) -> None:
        """Start all counters."""
        self.outcomes = dict.fromkeys(get_args(Outcome), 0)
        self.vitals = {name: [] for name in (*_MEASURES.values(), "reward_before")}

    def note_step(self, *, taken: bool) -> None:
        """Count an optimizer step that was taken, or skipped because something was not finite."""
        self.bad_steps = 0 if taken else self.bad_steps + 1
        if self.bad_steps >= BAD_STEPS:
            self.sick = f"loss, gradient or samples were not finite in {self.bad_steps} optimizer steps in a row"

    def note_outcome(self, outcome: Outcome, metrics: Mapping[str, float]) -> None:
        """Count an iteration, and keep what the collapse guard looks at."""
        self.outcome = outcome
        self.outcomes[outcome] += 1
        for metric, name in _MEASURES.items():
            self.vitals[name].append(metrics.get(metric, math.nan))

    def after_selection(self) -> None:
        """Begin a generation: what was found so far has been acted on, as far as that was possible."""
        self.sick = ""
        self.vitals = {
            **{name: [] for name in self.vitals},
            "reward_before": self.vitals["reward"] or self.vitals["reward_before"],
        }

    def present_vitals(self, *, with_rewards: bool = True) -> Vitals:
        """Return the numbers of this generation; rewards are left out where they are no measure for other agents."""
        own = self.vitals if with_rewards else {**self.vitals, "reward": [], "reward_before": []}
        return Vitals(**{name: tuple(values) for name, values in own.items()})
