"""Every error that a user may cause or see, in one small hierarchy; warnings; and what is said of the installation."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

DISTRIBUTION = "lora-evolution"
"""The name of the package for pip and uv. On PyPI ``agilerl`` is another project, whose modules have the same name."""


class AgileRLError(Exception):
    """Base of all errors raised on purpose; its message says what was expected, what was found and what to do."""

    everywhere: bool = False
    """Whether every process that works on the same agents raises it, so that only one of them needs to report it."""


class ConfigError(AgileRLError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class EnvError(AgileRLError):
    """An environment or dataset breaks its protocol, or does not exist."""


class RewardError(AgileRLError):
    """A reward function raised, or returned something that is not a finite number."""


class RewardTimeoutError(RewardError):
    """A reward function did not answer in time."""


class CheckpointError(AgileRLError):
    """A checkpoint or run directory is missing, damaged, in use, or does not fit."""


class WriteError(CheckpointError):
    """Writing failed: the disk is full, broken or not writable."""


class EngineError(AgileRLError):
    """A rollout engine cannot do what was asked of it."""


class MemoryExhaustedError(EngineError):
    """Memory is too small even for the smallest batch."""


class LostProcessError(EngineError):
    """A process of a run is lost, so the errors of the others cannot be passed on to it."""


# Of Python's threading, the dynamic loader, torch's allocator and the system: none of these is a MemoryError.
_NO_MEMORY = ("can't start new thread", "failed to map segment", "can't allocate memory", "Cannot allocate memory")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, or room for a thread, is lacking."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings as ``warning: TEXT``, as the command line does, not with a place in this package's code."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        # Others, such as deprecations in a user's code, say nothing without their place.
        placed = not issubclass(category, UserWarning)
        return usual(message, category, *where, **more) if placed else f"warning: {message}\n"

    # Not showwarning(): whoever records or filters warnings still gets them.
    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


@cache
def warn_once(text: str) -> None:
    """Warn once a process, of what concerns each clone, mutation or configuration again."""
    warnings.warn(text, stacklevel=2)


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional dependency group, for instance ``math``, for a message.

    It works in the environment of the package, whether that came from an index, a wheel or a checkout: pip and uv leave
    what is installed and add what the group lists.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def mixed_installation() -> str | None:
    """Return what is wrong if another distribution has put its files among this package's; None if none has.

    Lists one folder, the one that this package is in, so that ``import agilerl`` can afford it.
    """
    home = os.path.dirname(os.path.abspath(__file__))
    repair = f"run: pip uninstall --yes agilerl {DISTRIBUTION}; then install {DISTRIBUTION} again"
    package = sys.modules["agilerl"]
    if getattr(package, "DISTRIBUTION", None) != DISTRIBUTION:
        return f"agilerl is another project's package in {package.__file__}, not {DISTRIBUTION}'s in {home}; {repair}"
    for name in sorted(os.listdir(os.path.dirname(home))):
        if name.startswith("agilerl-") and name.endswith(".dist-info"):
            other = name.removesuffix(".dist-info").replace("-", " ")
            return f"the distribution {other} has put its files among those of {DISTRIBUTION} in {home}; {repair}"
    return None
