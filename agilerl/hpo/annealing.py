"""The course of the learning rate over a run: a factor on each agent's own, by the share of the budget spent."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from agilerl.arguments import Share, check_fields
from agilerl.errors import ConfigError


@dataclass(frozen=True)
class LRSchedule:
    """Warm up over the first ``warmup`` of the budget, and decay to ``end`` over the last ``decay`` of it.

    The factor at share x is x / warmup (at least 1 % of it) while warming up, 1 in between, and then, with
    p = (x - 1 + decay) / decay, ``end`` + (1 - ``end``) (1 - p) for ``linear`` and
    ``end`` + (1 - ``end``) (1 + cos(pi p)) / 2 for ``cosine``; ``constant`` does not decay.
    Being a factor, it holds for whatever learning rates evolution finds. Raises ConfigError if the two parts overlap.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Share = 0.0
    decay: Share = 1.0
    end: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name != "constant" and self.warmup + self.decay > 1 + 1e-9 and self.decay < 1:
            raise ConfigError(f"warmup={self.warmup:g} and decay={self.decay:g} overlap; they add up to at most 1.")

    def factor(self, spent: float) -> float:
        """Return the factor where ``spent`` of the budget, in [0, 1], is spent."""
        if spent < self.warmup:
            return max(spent / self.warmup, 0.01)
        # A decay over the whole run begins where the warm-up ends.
        decay = min(self.decay, 1 - self.warmup)
        begin = 1 - decay
        if self.name == "constant" or spent <= begin or decay == 0:
            return 1.0
        part = min((spent - begin) / decay, 1.0)
        shape = 1 - part if self.name == "linear" else (1 + cos(pi * part)) / 2
        return self.end + (1 - self.end) * shape
