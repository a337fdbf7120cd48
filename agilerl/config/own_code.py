"""Python that a manifest names: ``rewards.py:my_reward`` or ``module:Name``. It runs where the user allows it."""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from agilerl.arguments import shown
from agilerl.custom_code import run_file, torch_restored
from agilerl.errors import ConfigError

PACKAGES = ("gem", "textarena", "openenv")
"""Prefixes of environments of other packages; any other one means code."""


def names_code(name: str) -> bool:
    """Return whether what stands for a grader or an environment is the name of Python code."""
    prefix, colon, _ = name.partition(":")
    return name.endswith(".py") or (bool(colon) and prefix not in PACKAGES)


def code_name(name: str) -> str:
    """Return what a function or class is called; other names are returned as they are."""
    return name.rpartition(":")[2] if names_code(name) else name


def file_of(name: str) -> Path | None:
    """Return the file that code is in, without running any; None where there is none, or a part of Python itself."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser().absolute()
    parts, path = place.split("."), [os.getcwd(), *sys.path]
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def load_code(where: str, name: str, *, allowed: bool) -> Any:
    """Return the function or class that a setting names, after running the file or module that it is in.

    A file runs under a module name of its own and is not found by ``import``; what it imports has to be. A module is
    searched in the working directory first.

    Raises:
        ConfigError: code is not allowed, cannot be found or raises, or has nothing of that name.
    """
    if not allowed:
        raise ConfigError(
            f"{where}={shown(name)} names code, and a manifest does not run code unless you allow it: read it, then "
            "give --allow-code (in Python: build(config, allow_code=True))"
        )
    place, _, attribute = name.rpartition(":")
    if not place or not all(part.isidentifier() for part in attribute.split(".")):
        raise ConfigError(f"{where}: expected path.py:name or module:name, found {shown(name)}")
    try:
        with torch_restored():
            found: Any = run_file(Path(place).expanduser().absolute()) if place.endswith(".py") else _import(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever foreign code raises, the user gets its reason
        raise ConfigError(f"{where}={shown(name)} cannot be loaded: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if part not in vars(found):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"{where}: expected {attribute} in {place}, found {', '.join(known[:12]) or 'nothing'}")
        found = vars(found)[part]
    if not callable(found):
        raise ConfigError(f"{where}: expected {shown(name)} to be a function or a class, found {shown(found)}")
    return found


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)
