"""What AgileRL documents under its own names: loops, environments, attributes and keys, on top of the core.

Nothing but documented import paths imports this package. It plugs into the three :mod:`agilerl.hooks` as soon as
``agilerl`` is imported, and loads what they need when they are called.
"""

from collections.abc import Mapping
from typing import Any

from agilerl import hooks


def _translate(manifest: Mapping[str, Any]) -> dict[str, Any]:
    from agilerl.compat.manifests import translated

    return translated(manifest)


def _rename(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from agilerl.compat.manifests import renamed

    return renamed(settings)


def _keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    from agilerl.compat.agents import translated

    return translated(keywords)


def _extend(agent_class: type) -> None:
    from agilerl.compat.agents import extend

    extend(agent_class)


hooks.translate, hooks.rename, hooks.keywords, hooks.extend = _translate, _rename, _keywords, _extend
