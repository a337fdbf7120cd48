"""Where names from elsewhere enter a core that knows only its own: ``agilerl.compat`` replaces these functions."""

import copy
from collections.abc import Callable, Mapping
from typing import Any


def _own_names(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(manifest))


def _unknown(path: str, value: Any = None) -> str | None:
    return None


def _unchanged(agent_class: type) -> None: ...


translate: Callable[[Mapping[str, Any]], dict[str, Any]] = _own_names
"""Return a copy of a manifest with other packages' keys replaced by ours; raises ConfigError for one that cannot be."""
hint: Callable[..., str | None] = _unknown
"""Return what the unknown key ``path`` (with its ``value``, if known) of another trainer is called here, or None."""
extend: Callable[[type], None] = _unchanged
"""Give the class of agents the members that another package documents for its agents."""
