"""Where names from elsewhere enter a core that knows only its own: ``agilerl.compat`` replaces these functions."""

import copy
from collections.abc import Callable, Mapping
from typing import Any


def _own_names(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(manifest))


def _today(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return dict(settings), []


def _own_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    return keywords


def _unchanged(agent_class: type) -> None: ...


translate: Callable[[Mapping[str, Any]], dict[str, Any]] = _own_names
"""Return a copy of a manifest with other packages' keys replaced by ours; raises ConfigError for one that cannot be."""
rename: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]] = _today
"""Return a copy of settings under today's keys, and a sentence for each key that had another name before."""
keywords: Callable[[dict[str, Any]], dict[str, Any]] = _own_keywords
"""Return keywords of an agent under our names; raises ConfigError for one that would need an action."""
extend: Callable[[type], None] = _unchanged
"""Give the class of agents the members that another package documents for its agents."""
