"""Settings of the process that a command runs in: memory allocation and garbage collection.

The command sets them at its start; ``import agilerl`` does not, because the process belongs to the user. They do not
change any result. ``AGILERL_PROCESS_SETTINGS=off`` turns all of them off.
"""

import gc
import os
import platform
import sys
from functools import cache

from agilerl.errors import ConfigError

SWITCH = "AGILERL_PROCESS_SETTINGS"
"""Environment variable: ``on`` (the default) or ``off``."""

_MIB = 2**20
_ALLOCATOR = {
    # name: number in malloc.h, value, glibc's own variable for it
    "M_MMAP_THRESHOLD": (-3, 32 * _MIB, "MALLOC_MMAP_THRESHOLD_"),
    "M_TRIM_THRESHOLD": (-1, 256 * _MIB, "MALLOC_TRIM_THRESHOLD_"),
    "M_TOP_PAD": (-2, 16 * _MIB, "MALLOC_TOP_PAD_"),
}
"""Every step allocates and frees tensors of some MiB. By default each is a separate mapping, which the kernel creates,
zeroes page by page and removes; from the heap they get pages that already exist."""


def are_on() -> bool:
    """Return whether the settings are on; raises ConfigError for any value but ``on`` and ``off``."""
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"the environment variable {SWITCH} must be on or off, found {value!r}")
    return value == "on"


def apply() -> None:
    """Apply the settings at the start of a command that trains; :func:`loading_done` ends those for loading only."""
    if are_on():
        keep_memory()
        # Imports create a million lasting objects: searching them for garbage takes a fifth of the loading time.
        _loading.append(gc.isenabled())
        gc.disable()


def loading_done() -> None:
    """Resume garbage collection if :func:`apply` has stopped it, but exempt everything loaded so far."""
    if not _loading:
        return
    was_enabled = any(_loading)
    _loading.clear()
    _freeze_once()
    if was_enabled:
        gc.enable()


_loading: list[bool] = []
"""Whether garbage collection was on before :func:`apply`; empty if there is nothing to restore."""
# A second freeze would keep the first command's garbage forever; gc.get_freeze_count takes as long as a search.
_freeze_once = cache(gc.freeze)
_debugging: list[bool] = [False]


def debug(on: bool) -> None:
    """Show the tracebacks of errors and what libraries print, or not: ``--debug``."""
    _debugging[0] = on


def is_debugging() -> bool:
    """Return whether :func:`debug` is on."""
    return _debugging[0]


def keep_memory() -> dict[str, int]:
    """Make malloc keep and reuse freed memory; return the values that were set, in bytes.

    Settings that the user made with glibc's environment variables stay. Other allocators (macOS, Windows, musl) have
    no such settings, and nothing is done.
    """
    is_glibc = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
    if not is_glibc or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return {}
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    wanted = {name: (number, value) for name, (number, value, theirs) in _ALLOCATOR.items() if theirs not in os.environ}
    return {name: value for name, (number, value) in wanted.items() if mallopt(number, value) == 1}
