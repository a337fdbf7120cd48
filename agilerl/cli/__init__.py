"""The command line: ``agilerl``. Heavy imports happen inside the commands, so that ``--help`` is quick."""

import os
import sys
import warnings
from typing import Any

__all__ = ["main"]

_LONGEST = 2000


def main() -> None:
    """Run the command line; what goes wrong ends in one sentence.

    Exit code 2: the user's mistake; 1: the disk refused, or no agent was fit; 130: interrupted; 143: stopped.
    """
    try:
        _command()
    except SystemExit as ended:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        # One of several processes: threads of gloo may abort it while the interpreter takes itself apart.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1)


def _command() -> None:
    import typer

    from agilerl.cli.app import app
    from agilerl.errors import AgileRLError, WriteError

    warnings.showwarning = _warn
    # Typer's base of all complaints about options; it exports only this descendant under a stable name.
    usage_error: Any = typer.BadParameter.__bases__[0].__bases__[0]
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except AgileRLError as error:
        _fail(str(error), 1 if isinstance(error, WriteError) else 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except usage_error as error:
        _fail(error.format_message(), 2)
    if code == 130:
        _fail("interrupted", 130)
    sys.exit(code)


def _warn(message: Warning | str, *place: object, **more: object) -> None:
    """Print a warning as one line, without the place in the code that it came from."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str, code: int) -> None:
    """Print one line, whatever the message is made of, and exit."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST - 3]}..."
    print(line if code == 130 else f"error: {line}", file=sys.stderr)
    sys.exit(code)
