"""The selection strategies by the names that a manifest uses, and the learning rate's course over a run."""

from collections.abc import Mapping
from math import cos, pi
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, model_validator

from agilerl.checks.arguments import NotNegative, Share, checked
from agilerl.checks.validation import Needs, PythonSettings
from agilerl.hpo.knockout import KnockoutSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.selection import NoSelection, Strategy, TruncationSelection
from agilerl.hpo.tournament import TournamentSelection

STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        KnockoutSelection,
        TournamentSelection,
        TruncationSelection,
        MultiFrequencySelection,
        NoSelection,
    )
}
"""The strategies that a manifest may name."""
COST_TOKENS = ("group_size", "update_epochs", "max_output_tokens")
"""Genes that decide how many tokens an iteration costs."""


# -- the learning rate over a run: a factor on each agent's own, by the share of the budget spent ---------------------


class LRSchedule(PythonSettings):
    """The course of every agent's learning rate over the run: a factor on it, by the share of the budget spent.

    The factor at share x is x / warmup (at least 1 % of it) while warming up, 1 in between, and then, with
    p = (x - 1 + decay) / decay, ``end`` + (1 - ``end``) (1 - p) for ``linear`` and
    ``end`` + (1 - ``end``) (1 + cos(pi p)) / 2 for ``cosine``; ``constant`` does not decay.
    Being a factor, it holds for whatever learning rates evolution finds. Raises ConfigError if the two parts overlap.
    """

    model_config = ConfigDict(frozen=True)
    name: Literal["constant", "linear", "cosine"] = "constant"
    """How it decays."""
    warmup: Share = 0.0
    """Share of the budget in which the factor rises from 0 to 1."""
    decay: Annotated[Share, Needs("name", ("linear", "cosine"))] = 1.0
    """Last share of the budget, in which it falls to ``end``; 1 is all that the warm-up leaves."""
    end: Annotated[Share, Needs("name", ("linear", "cosine"))] = 0.0
    """Factor at the end."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        # 1e-9 is for rounding. A decay of 1, the default, begins where the warm-up ends, and overlaps with nothing.
        if self.name != "constant" and self.warmup + self.decay > 1 + 1e-9 and self.decay < 1:
            raise ValueError(f"warmup={self.warmup:g} and decay={self.decay:g} overlap; they add up to at most 1.")
        return self

    @checked
    def factor(self, spent: NotNegative) -> float:
        """Return the factor where ``spent`` of the budget, in [0, 1], is spent."""
        if spent < self.warmup:
            # Nothing is spent before the first iteration, which would learn nothing at a factor of 0.
            return max(spent / self.warmup, 0.01)
        # A decay over the whole run begins where the warm-up ends.
        decay = min(self.decay, 1 - self.warmup)
        begin = 1 - decay
        if self.name == "constant" or spent <= begin or decay == 0:
            return 1.0
        part = min((spent - begin) / decay, 1.0)
        shape = 1 - part if self.name == "linear" else (1 + cos(pi * part)) / 2
        return self.end + (1 - self.end) * shape
