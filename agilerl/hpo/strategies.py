"""The selection strategies by the names and settings that a manifest uses."""

import inspect
from collections.abc import Mapping
from typing import Any

from agilerl.arguments import checked
from agilerl.errors import ConfigError
from agilerl.hpo.halving import SuccessiveHalving
from agilerl.hpo.knockout import KnockoutSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.pulses import PulseSelection
from agilerl.hpo.selection import NoSelection, SelectionStrategy
from agilerl.hpo.tournament import TournamentSelection
from agilerl.hpo.truncation import TruncationSelection

STRATEGIES: Mapping[str, Any] = {
    "knockout": KnockoutSelection,
    "pulses": PulseSelection,
    "tournament": TournamentSelection,
    "truncation": TruncationSelection,
    "halving": SuccessiveHalving,
    "multi_frequency": MultiFrequencySelection,
    "none": NoSelection,
}
ANNEALED = ("knockout", "pulses")
"""Strategies that end with one agent: it anneals, and its best exams sit a second panel."""
SHRINKING = ("knockout", "pulses", "halving")
"""Strategies that leave fewer agents than began."""
_MADE_BY_THE_RUN = ("population_size", "seed", "later", "between")


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a strategy with their defaults (None where it takes one from the population).

    ``pulses`` are the settings of a knockout's later rounds, and of the strategy pulses itself; those of truncation
    belong to halving as well, which may use it ``between`` its halvings.
    """
    if name == "none":
        return {}
    if name == "pulses":
        return {"pulses": _defaults(PulseSelection)}
    own = _defaults(STRATEGIES[name])
    if name == "knockout":
        return {**own, "pulses": _defaults(PulseSelection)}
    if name == "halving":
        return {**own, "between": "none", **_defaults(TruncationSelection)}
    return own


@checked
def make_strategy(name: str, population_size: int, settings: Mapping[str, Any]) -> SelectionStrategy:
    """Return the strategy of a name, for a population of this size; ``settings`` leave out what keeps its default.

    Raises ConfigError for an unknown name or setting, and for values that the strategy refuses.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"expected one of the strategies {', '.join(STRATEGIES)}, found {name!r}")
    known = settings_of(name)
    if unknown := [key for key in settings if key not in known]:
        raise ConfigError(f"{name} has no setting {unknown[0]}; it has {', '.join(known) or 'none'}")
    given = dict(settings)
    if name in ("knockout", "pulses"):
        later = PulseSelection(**given.pop("pulses", {}))
        return later if name == "pulses" else KnockoutSelection(population_size, later=later, **given)
    if name == "halving":
        truncation = {key: given.pop(key) for key in _defaults(TruncationSelection) if key in given}
        between = given.pop("between", "none")
        return SuccessiveHalving(
            **given, between=TruncationSelection(**truncation) if between == "truncation" else None
        )
    if name in ("tournament", "multi_frequency"):
        given["population_size"] = population_size
    made: SelectionStrategy = STRATEGIES[name](**given)
    return made


def _defaults(strategy: Any) -> dict[str, Any]:
    parameters = inspect.signature(strategy).parameters
    return {
        name: None if one.default is inspect.Parameter.empty else one.default
        for name, one in parameters.items()
        if name not in _MADE_BY_THE_RUN
    }
