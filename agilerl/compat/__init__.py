"""What AgileRL and other trainers call things: their loops, environments, attributes and keys, on top of the core.

Nothing but documented import paths imports this package. It plugs into the three :mod:`agilerl.hooks` as soon as
``agilerl`` is imported, and loads what they need when they are called.
"""

from collections.abc import Mapping
from typing import Any

from agilerl import hooks


def _translate(manifest: Mapping[str, Any]) -> dict[str, Any]:
    from agilerl.compat.manifests import translated

    return translated(manifest)


def _hint(path: str, value: Any = None) -> str | None:
    from agilerl.compat.other_trainers import ours

    return ours(path, value)


def _extend(agent_class: type) -> None:
    from agilerl.compat.agents import extend

    extend(agent_class)


hooks.translate, hooks.hint, hooks.extend = _translate, _hint, _extend
