"""Standard output and standard error: characters that they lack, and what becomes of a command when they go away."""

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO, cast

from rich.console import Console

from agilerl.errors import WriteError

READER_GONE = 141
"""Exit code of a command whose reader has gone, as of those that SIGPIPE ends."""
_SPELT = {"±": "+-", "→": "->", "…": "...", "“": '"', "”": '"', "’": "'", "×": "x", "•": "*"}


def prepare_streams() -> TextIO:
    """Make the standard streams take any text, and be there; return the one for output.

    What an encoding lacks is spelt in ASCII. A stream that was closed before the command began is one to nowhere: else
    the next file that is opened, a checkpoint say, would get its number, and whatever is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    codecs.register_error("agilerl", _spelt)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="agilerl")
    if sys.stdout is None or type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _Output(sys.stdout)
    return sys.stdout


def console(*, quiet: bool = False, file: TextIO | None = None) -> Console:
    """Return a console on a file, standard output if there is none."""
    return _Console(file=file, quiet=quiet, markup=False, emoji=False, highlight=False)


def console_of_lines(say: Callable[[str], None], width: int, *, quiet: bool) -> Console:
    """Return a console without a terminal: each line that is printed to it is said."""
    file = cast(IO[str], _Lines(say))
    return Console(file=file, width=width, quiet=quiet, markup=False, emoji=False, highlight=False)


def say(sentence: str) -> None:
    """Say on standard error what is no result; without a word where that is gone too."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def lost_output(output: TextIO) -> OSError | None:
    """Write what is still to be written to standard output; return why it cannot be, if that is so.

    After that nothing more is written to it.
    """
    try:
        output.flush()
        found = output.lost if isinstance(output, _Output) else None
    except OSError as error:
        found = error
    if found is not None:
        # What is left in the buffer would be tried again, and complained about, when the interpreter ends.
        with suppress(OSError, io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)
    return found


def write_error(error: OSError) -> WriteError:
    """Return the sentence about an output that was lost."""
    return WriteError(f"the output could not be written: {error.strerror or error}")


class _Output(io.TextIOWrapper):
    """Standard output that remembers why it could not be written to: an OSError alone does not say what it is about."""

    def __init__(self, before: TextIO | None) -> None:
        if before is not None:
            before.flush()
        encoding = "utf-8" if before is None else before.encoding
        file = open(1, "wb", closefd=False)  # noqa: SIM115  (it is as open as the process)
        super().__init__(file, encoding=encoding, errors="agilerl", line_buffering=file.isatty())
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write, or remember why not."""
        with self._watched():
            return super().write(text)

    def flush(self) -> None:
        """Write what is in the buffer, or remember why not."""
        with self._watched():
            super().flush()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = error
            raise


class _Console(Console):
    """A console that leaves it to the command what to do when the reader has gone; rich's ends the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Lines:
    """A file for a console: each line that is written to it is said once it is whole."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun = say, ""

    def write(self, text: str) -> int:
        """Say the lines that are whole."""
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """A line is said when it is whole."""


def _spelt(error: UnicodeError) -> tuple[str | bytes, int]:
    """Stand in for what an encoding lacks; the bytes of a file name that is no text pass as they are."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    if all("\udc80" <= c <= "\udcff" for c in characters):
        return bytes(ord(c) - 0xDC00 for c in characters), error.end
    return "".join(_SPELT.get(c) or c.encode("ascii", "backslashreplace").decode() for c in characters), error.end
