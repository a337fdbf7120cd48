"""What AgileRL documents under its own names: environments, members of agents and keys of manifests.

Agents inherit :class:`agilerl.compat.agents.DocumentedSurface`; besides, only documented import paths and loops import
this package. It plugs into :mod:`agilerl.hooks` as soon as ``agilerl`` is imported, and loads what they need when they
are called.
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


hooks.translate, hooks.rename = _translate, _rename
