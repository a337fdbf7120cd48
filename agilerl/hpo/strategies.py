"""The selection strategies by the names and settings that a manifest uses; cheap to import."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING, Any, Literal

from agilerl.checks.arguments import NotNegative, Share, check_fields, checked
from agilerl.errors import ConfigError

if TYPE_CHECKING:
    from agilerl.hpo.selection import SelectionStrategy


SETTINGS: Mapping[str, tuple[str, ...]] = {
    "knockout": ("period", "confidence", "floor", "pulses"),
    "tournament": ("tournament_size", "elitism", "gate"),
    "truncation": ("fraction", "confidence"),
    "multi_frequency": (
        *("n_subpopulations", "evolution_frequency_ratios"),
        *("n_winners", "n_survivors", "n_open_for_migration", "n_losers"),
    ),
    "none": (),
}
"""The settings of each strategy; ``pulses`` are those of a knockout's later rounds."""
COST_TOKENS = ("group_size", "update_epochs", "max_output_tokens")
"""Genes that decide how many tokens an iteration costs."""


def strategy_class(name: str) -> Any:
    """Return the class of a strategy."""
    # Imported when used: numpy and scipy take most of a second, which a misspelt manifest should not cost.
    from agilerl.hpo.knockout import KnockoutSelection
    from agilerl.hpo.multi_frequency import MultiFrequencySelection
    from agilerl.hpo.selection import NoSelection, TruncationSelection
    from agilerl.hpo.tournament import TournamentSelection

    classes: dict[str, Any] = {
        "knockout": KnockoutSelection,
        "tournament": TournamentSelection,
        "truncation": TruncationSelection,
        "multi_frequency": MultiFrequencySelection,
        "none": NoSelection,
    }
    return classes[name]


def defaults_of(name: str) -> dict[str, Any]:
    """Return the settings of a strategy with their defaults; None if it takes one from the population."""
    defaults = _keywords(strategy_class(name)) | {"pulses": _keywords(_pulses())}
    return {setting: defaults[setting] for setting in SETTINGS[name]}


@checked
def make_strategy(name: str, population_size: int, settings: Mapping[str, Any]) -> "SelectionStrategy":
    """Return the strategy of a name, for a population of this size; ``settings`` leave out what keeps its default.

    Raises ConfigError for an unknown name or setting, and for values that the strategy refuses.
    """
    if name not in SETTINGS:
        raise ConfigError(f"expected one of the strategies {', '.join(SETTINGS)}, found {name!r}")
    if unknown := [key for key in settings if key not in SETTINGS[name]]:
        raise ConfigError(f"{name} has no setting {unknown[0]}; it has {', '.join(SETTINGS[name]) or 'none'}")
    given = dict(settings)
    if name == "knockout":
        pulses, defaults = given.pop("pulses", {}), _keywords(_pulses())
        if not isinstance(pulses, Mapping) or not set(pulses) <= set(defaults):
            raise ConfigError(f"pulses: expected a mapping with some of {', '.join(defaults)}, found {pulses!r}")
        given["later"] = _pulses()(**pulses)
    if name == "tournament":
        given = {"tournament_size": min(2, population_size), "elitism": True, **given}
    if name in ("knockout", "tournament", "multi_frequency"):
        given["population_size"] = population_size
    return strategy_class(name)(**given)  # type: ignore[no-any-return]


def _pulses() -> Any:
    from agilerl.hpo.knockout import PulseSelection

    return PulseSelection


def _keywords(strategy: Any) -> dict[str, Any]:
    """Return the keywords of a strategy's class with their defaults."""
    parameters = inspect.signature(strategy).parameters
    return {key: None if one.default is inspect.Parameter.empty else one.default for key, one in parameters.items()}


# -- the learning rate over a run: a factor on each agent's own, by the share of the budget spent ---------------------


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
        # 1e-9 is for rounding. A decay of 1, the default, begins where the warm-up ends, and overlaps with nothing.
        if self.name != "constant" and self.warmup + self.decay > 1 + 1e-9 and self.decay < 1:
            raise ConfigError(f"warmup={self.warmup:g} and decay={self.decay:g} overlap; they add up to at most 1.")

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
