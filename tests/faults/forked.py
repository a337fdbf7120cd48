"""The command line in forked children of a process that has imported everything: a start costs no imports.

Only for a process of its own that has neither trained nor started threads that hold locks.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

_LATE = ("agilerl.cli.app", "agilerl.cli.progress", "agilerl.report", "pandas", "pyarrow.dataset", "rich.live")
"""What else is imported while a run goes on."""


def warm(settings: tuple[str, ...]) -> None:
    """Import all that a run needs: set one up, and import the rest."""
    from agilerl.config.manifest import load_manifest
    from agilerl.training.setup import build

    build(load_manifest(None, list(settings)))
    for name in _LATE:
        importlib.import_module(name)


def start(arguments: list[str], *, log: Path, first: Callable[[], None] = lambda: None) -> int:
    """Start ``agilerl`` with these arguments in a child, after ``first`` there, and return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["agilerl", *arguments]
        code = _run(first)
    finally:
        os._exit(code)


def _run(first: Callable[[], None]) -> int:
    from agilerl.cli import main

    try:
        first()
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        return 70
    return 0


def wait(child: int, *, seconds: float | None = None) -> int | None:
    """Return the exit code of a child (minus the signal that ended it), or None where it still runs after a time."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(0.002)
