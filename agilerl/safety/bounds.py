"""Bounds on untrusted files: sizes, kinds of files, regular expressions."""

import math
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import regex

from agilerl.errors import AgileRLError, ConfigError

PATTERN_SECONDS = 2.0
"""Seconds for all matches of one pattern."""
_PATTERN = 10_000
_REPEATS = 100_000


def memory_bytes() -> int:
    """Return the memory of the machine, or of its container if that allows less."""
    import psutil  # as elsewhere, only where it is used

    return int(min(psutil.virtual_memory().total, _container_limit() or math.inf))


def _container_limit() -> int | None:
    # Of cgroups v2 and v1. Without a limit v2 says "max", which is no number, and is passed over.
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return None


def check_file(path: Path, most: int | None = None, *, error: type[AgileRLError] = ConfigError) -> None:
    """Raise ``error`` for anything but a plain file of at most ``most`` bytes, before it is opened.

    Reading a named pipe would wait for ever, a device never ends, and a sparse file of terabytes costs an attacker
    nothing. Links are followed. A missing file is left to its reader.
    """
    try:
        status = os.stat(path)
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise error(f"expected a plain file at {path}, found {kind}")
    if most is not None and status.st_size > most:
        raise error(f"{path} has {status.st_size:,} bytes, expected at most {most:,}")


def check_links(folder: Path, below: Iterable[str] | None = None, *, error: type[AgileRLError] = ConfigError) -> None:
    """Raise ``error`` if a link in a folder leads out of it: whoever wrote the folder could have your files read.

    ``below`` names its folders that are searched as well, None all of them. A snapshot in the cache of the hub may lead
    to the blobs of its repository: ``snapshots/REVISION/config.json`` to ``blobs/HASH``. A missing folder is for
    its reader to report.
    """
    root = os.path.realpath(folder)
    snapshots, searched = Path(root).parent, None if below is None else set(below)
    allowed: list[str | Path] = [root, *([snapshots.parent / "blobs"] if snapshots.name == "snapshots" else [])]

    def unreadable(failure: OSError) -> None:
        if not isinstance(failure, FileNotFoundError):
            raise error(f"{failure.filename or root} cannot be read: {failure.strerror or failure}") from failure

    # os.walk follows no links, so each is looked at here and none is entered.
    for parent, folders, files in os.walk(root, onerror=unreadable):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            if os.path.islink(path) and not any(Path(os.path.realpath(path)).is_relative_to(one) for one in allowed):
                raise error(f"{path} is a link that leads out of {root}; put there what it leads to, if you trust it")
        if searched is not None and parent == root:
            # In place: os.walk continues with what the list holds.
            folders[:] = searched.intersection(folders)


def valid_unicode(value: Any) -> Any:
    """Return a value as JSON has them with each lone surrogate replaced by U+FFFD, keys included.

    JSON and Python may write half of a pair as text, and what holds one can be neither tokenized nor recorded.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {valid_unicode(key): valid_unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(valid_unicode, value)) if type(value) in (list, tuple) else value
    return value


def compiled_pattern(pattern: str, where: str) -> "regex.Pattern[str]":
    """Return a compiled regular expression; raises ConfigError for one that is invalid or too large to compile."""
    if len(pattern) > _PATTERN or _repeats(pattern) > _REPEATS:
        raise ConfigError(
            f"{where}: the regular expression is too large: expected at most {_PATTERN:,} characters and repeats of "
            f"at most {_REPEATS:,} parts, found {pattern[:80]!r}"
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{where}: {pattern[:80]!r} is not a regular expression: {error}") from error


def _repeats(pattern: str) -> int:
    """Return how many parts a pattern has with each ``{n}`` expanded, as the compiler does it."""
    # `parts` counts within the innermost open group; `last` is the size of what a repeat would repeat.
    stack, parts, last, index = [], 0, 0, 0
    while index < len(pattern):
        character = pattern[index]
        if character == "(":
            stack.append(parts)
            parts = last = 0
        elif character == ")" and stack:
            last, parts = parts, parts + stack.pop()
        elif character == "{":
            count = max((int(n) for n in pattern[index + 1 :].partition("}")[0].split(",") if n.isdecimal()), default=1)
            parts, last = parts + last * max(count - 1, 0), last * max(count, 1)
        elif character == "[":
            # A bracket right after the opening one is a member of the set, not its end.
            end = pattern.find("]", index + 2)
            parts, last, index = parts + 1, 1, end if end > 0 else index
        else:
            # An escaped character is one part.
            index += character == "\\"
            parts, last = parts + 1, 1
        index += 1
    return parts + sum(stack)


def full_matches(pattern: str, names: Iterable[str], where: str) -> set[str]:
    """Return the names that a pattern matches as a whole.

    Raises ConfigError for an invalid pattern, or one that takes too long: a pattern that tries every way to split a
    name (``(\\w+\\.?)+x``) would run for years.
    """
    compiled, end = compiled_pattern(pattern, where), time.process_time() + PATTERN_SECONDS

    def matches(name: str) -> bool:
        # Processor time, as regex counts it, to which a negative timeout is none.
        return compiled.fullmatch(name, timeout=max(end - time.process_time(), 0.0)) is not None

    try:
        return set(filter(matches, names))
    except TimeoutError:
        raise ConfigError(
            f"{where}: matching {pattern[:80]!r} takes over {PATTERN_SECONDS:g} s; avoid nested repeats"
        ) from None
