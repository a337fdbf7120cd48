"""The command line: ``agilerl``. Heavy imports happen inside the commands, so that ``--help`` is quick."""

import errno
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any

__all__ = ["main"]

_LONGEST = 2000


def main() -> None:
    """Run the command line; an error ends it with one sentence.

    Exit codes: 2: a mistake of the user; 1: a write failed, or no agent was fit; 129, 130 and 143: stopped by SIGHUP,
    Ctrl-C and SIGTERM; 141: the reader of the output is gone.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        # Until a command runs, Ctrl-C ends the process at once: an exception would be a traceback out of some import.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agilerl.errors import DISTRIBUTION, mixed_installation

    if getattr(sys.modules["agilerl"], "DISTRIBUTION", None) != DISTRIBUTION:
        # Another project's modules are in this one's places, so nothing more of it can be relied on.
        print(f"error: {mixed_installation()}", file=sys.stderr)
        sys.exit(2)
    from agilerl.checks.arguments import shown
    from agilerl.cli.output import READER_GONE, lost_output, prepare_streams, write_error

    output = prepare_streams()
    failure: OSError | None = None
    code = 0
    try:
        code = _command(interruptible)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except OSError as error:
        failure = error
    lost = lost_output(output)
    if failure is not None and lost is None:
        if failure.filename is None and failure.errno != errno.EIO:
            raise failure  # not about the output, a named file, or a disk that breaks while a folder is listed
        # Whatever is wrong with a path (too long, a loop of links), the user gets the reason.
        path = "a file or folder" if failure.filename is None else shown(str(failure.filename))
        code = _report(f"{path} cannot be used: {failure.strerror}", 2)
    if isinstance(lost, BrokenPipeError) and code in (0, 1):  # 1: what rich and typer make of it
        code = READER_GONE
    elif lost is not None and code == 0:
        code = _report(str(write_error(lost)), 1)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # One of several processes: gloo's threads may abort it while the interpreter shuts down.
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _command(interruptible: bool) -> int:
    """Run what the arguments say, where ``interruptible`` with an exception for Ctrl-C; return the exit code."""
    import typer

    from agilerl.cli.app import app
    from agilerl.cli.process_settings import debug
    from agilerl.errors import AgileRLError, WriteError, lacks_memory

    debug(False)
    warnings.showwarning = _warn
    # Typer's base of all complaints about options; it exports only this descendant under a stable name.
    usage_error: Any = typer.BadParameter.__bases__[0].__bases__[0]
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A shell that completes a word gives it in the environment; the name of the program is part of that variable's.
        code = app(sys.argv[1:] or ["--help"], prog_name="agilerl", standalone_mode=False)
    except AgileRLError as error:
        return _report(str(error), 1 if isinstance(error, WriteError) else 2)
    except (KeyboardInterrupt, typer.Abort):
        return _report("interrupted", 130)
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else ""
        return _report(error.format_message() + _setting_meant(command, str(getattr(error, "option_name", ""))), 2)
    except BaseException as error:
        if lacks_memory(error):
            text = "there was not enough memory for what was read or asked for; use smaller files or settings"
            return _report(f"{text}, and see whether a limit on memory or threads is in force (ulimit -a)", 2)
        # Rust libraries that fail on a file (a tokenizer's regular expression) raise what is not an Exception.
        if type(error).__name__ != "PanicException":
            raise
        return _report(f"a library crashed on a file, most likely a tokenizer's: {error}", 2)
    return _report("interrupted", 130) if code == 130 else code or 0


def _setting_meant(command: str, option: str) -> str:
    """Return a hint if a setting was given as an option, ``--lr``, or an option that the command had."""
    from agilerl.config.run import addresses_of
    from agilerl.gone import instead

    if gone := instead(option) or instead(f"{command} {option}"):
        return f"; {gone}"
    addresses = addresses_of(option.strip("-").replace("-", "_")) if option else []
    return f"; settings are given as {' or '.join(f'{address}=...' for address in addresses)}" if addresses else ""


def _warn(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as one line, without its place in the code."""
    from agilerl.cli.output import say

    say(f"warning: {_line(str(message))}")


def _report(message: str, code: int) -> int:
    """Print a message as one line, with the traceback if that is asked for; return the exit code."""
    from agilerl.cli.output import say
    from agilerl.cli.process_settings import is_debugging

    if is_debugging() and sys.exc_info()[0] is not None:
        with suppress(OSError):
            traceback.print_exc()
    say(f"{'error: ' * (code != 130)}{_line(message)}")
    return code


def _line(message: str) -> str:
    """Return a message as one line of bounded length, without control characters."""
    # Bytes of a name that this locale cannot decode are shown as such.
    readable = (f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else c for c in message)
    line = " ".join("".join(c if c.isprintable() else " " for c in readable).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
