"""Settings of the process that a command runs in: how memory is kept, and when garbage is collected.

They belong to the process, so the command makes them at its start, and ``import agilerl`` does not. They change no
number of a run. ``AGILERL_PROCESS_SETTINGS=off`` leaves all of them out.
"""

import gc
import os
import sys

from agilerl.errors import ConfigError

SWITCH = "AGILERL_PROCESS_SETTINGS"
"""Environment variable: ``on``, as without it, or ``off``."""

_MIB = 2**20
_ALLOCATOR = {
    # name: number in malloc.h, value, glibc's own variable for it
    "M_MMAP_THRESHOLD": (-3, 32 * _MIB, "MALLOC_MMAP_THRESHOLD_"),
    "M_TRIM_THRESHOLD": (-1, 256 * _MIB, "MALLOC_TRIM_THRESHOLD_"),
    "M_TOP_PAD": (-2, 16 * _MIB, "MALLOC_TOP_PAD_"),
}
"""Tensors of some MiB come and go in every step. By default each is a mapping of its own, which the kernel makes, fills
with zeros page by page, and takes back; from the heap they get pages that are there already."""


def are_on() -> bool:
    """Return whether the user leaves the settings on; raises ConfigError for any value but ``on`` and ``off``."""
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"the environment variable {SWITCH} must be on or off, found {value!r}")
    return value == "on"


def apply() -> None:
    """Make the settings, at the start of a command that trains; :func:`loading_done` ends what is for loading only."""
    if are_on():
        keep_memory()
        # Imports make a million objects that stay: looking for garbage among them takes a fifth of the time to load.
        _loading.append(gc.isenabled())
        gc.disable()


def loading_done() -> None:
    """Collect garbage again, if :func:`apply` has stopped it, without looking at what has been loaded."""
    if not _loading:
        return
    was_enabled = any(_loading)
    _loading.clear()
    if gc.get_freeze_count() == 0:  # a second time, it would keep for ever what a first command has left as garbage
        gc.freeze()
    if was_enabled:
        gc.enable()


_loading: list[bool] = []
"""Whether garbage was collected before :func:`apply`; empty if nothing is to be put back."""


def described() -> dict[str, str]:
    """Return what :func:`apply` does here, for bug reports."""
    made = keep_memory() if are_on() else {}
    return {SWITCH: "on" if are_on() else "off"} | {name: f"{value // _MIB} MiB" for name, value in made.items()}


def keep_memory() -> dict[str, int]:
    """Have malloc keep and reuse memory that the program frees; return the settings that were made, in bytes.

    Those that the user has made, in the variables of glibc, stay as they are. Other allocators have no such settings:
    on macOS, on Windows, and on Linux with musl nothing is done.
    """
    if not _has_glibc() or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return {}
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return {}
    wanted = {name: (number, value) for name, (number, value, own) in _ALLOCATOR.items() if own not in os.environ}
    return {name: value for name, (number, value) in wanted.items() if mallopt(number, value) == 1}


def _has_glibc() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):  # musl does not know the name
        return False
