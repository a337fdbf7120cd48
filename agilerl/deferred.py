"""Libraries that another library imports and a run hardly ever uses: imported when something of them is used."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def deferred(name: str, load: Callable[[], Any], *, required: bool = True) -> Iterator[None]:
    """Let ``import name`` inside the block bind a stand-in; ``load`` imports the library when it is first used.

    The stand-in passes every attribute on. Only modules that are imported inside the block hold it; afterwards
    ``import name`` gives every module the library itself. Nothing is deferred if the library has been imported before.
    If it is missing, ``import name`` fails inside the block, unless it is not ``required``: then ``load`` says so.
    """
    spec = None if name in sys.modules else find_spec(name)
    if name in sys.modules or (spec is None and required):
        yield
        return
    stand_in: Any = ModuleType(name)
    # Without these, code that looks through all modules would ask for them, and import the library.
    stand_in.__spec__, stand_in.__loader__ = spec, None if spec is None else spec.loader
    stand_in.__file__ = None if spec is None else spec.origin

    def withdraw() -> None:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]

    def look_up(attribute: str) -> Any:
        # First, so that the import inside load() finds the library and not this stand-in.
        withdraw()
        return getattr(load(), attribute)

    stand_in.__getattr__ = look_up  # Python asks a module's own __getattr__ for what it lacks
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        withdraw()
