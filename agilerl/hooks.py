"""Where names from elsewhere enter a core that knows only its own: ``agilerl.compat`` replaces these functions."""

import copy
from collections.abc import Callable, Mapping
from typing import Any


def _own_names(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(manifest))


def _today(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return dict(settings), []


translate: Callable[[Mapping[str, Any]], dict[str, Any]] = _own_names
"""Return a copy of a manifest with other packages' keys replaced by ours; raises ConfigError for one that cannot be."""
rename: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]] = _today
"""Return a copy of settings under today's keys, and a sentence for each key that had another name before."""
