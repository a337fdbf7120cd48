"""Standard output and standard error: characters that they cannot encode, and the loss of their reader."""

import codecs
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from agilerl.errors import WriteError

READER_GONE = 141
"""Exit code of a command whose reader is gone: that of a process ended by SIGPIPE."""
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_SPELT = {"±": "+-", "→": "->", "…": "...", "“": '"', "”": '"', "’": "'", "×": "x", "•": "*"}
_SPELT |= dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#"))


def prepare_streams() -> TextIO:
    """Make the standard streams exist and accept any text; return the one for output.

    Characters that an encoding lacks are spelt in ASCII. A stream that was closed before the command began is replaced
    by /dev/null: otherwise the next file opened (e.g. a checkpoint) would get its number, and everything printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    codecs.register_error("agilerl", _spell)
    # Python has None for a stream that was closed when it started.
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="agilerl")
    # Exactly this type: whoever has put another stream in its place keeps that.
    if sys.stdout is None or type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _Output(sys.stdout)
    return sys.stdout


def console(*, quiet: bool = False, file: TextIO | None = None, width: int | None = None) -> Console:
    """Return a console on a file; the default is standard output."""
    return _Console(file=file, width=width, quiet=quiet, markup=False, emoji=False, highlight=False)


def console_of_lines(say: Callable[[str], None], width: int, *, quiet: bool) -> Console:
    """Return a console without a terminal that passes each printed line to ``say``."""
    return console(quiet=quiet, file=cast(TextIO, _Lines(say)), width=width)


def columns(*headers: str, left: Collection[str] = ("",), gap: int = 3) -> Table:
    """Return a table without lines; the columns named in ``left`` begin on the left, the others end on the right."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(headers))
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right")
    return table


def cut_columns(cells: Mapping[str, Sequence[str]], *, left: Collection[str]) -> Table:
    """Return a table of columns with one line a row: where there is no room, those in ``left`` end in an ellipsis."""
    table = columns(*cells, left=left, gap=2)
    for column in table.columns:
        column.no_wrap = column.header not in left
        column.overflow = "ellipsis"
    for row in zip(*cells.values()):
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and what there is to say of each."""
    table = columns("", "", gap=2)
    for row in rows:
        table.add_row(*row)
    return table


def genes_text(values: Mapping[str, Any], digits: int = 3) -> str:
    """Return gene values as short text, e.g. ``lr=0.0021, group_size=8``."""
    return ", ".join(f"{k}={v:.{digits}g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())


def duration(spent: float) -> str:
    """Return seconds as a short text in a fitting unit: ``2.5 min``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if spent >= size:
            return f"{spent / size:,.1f} {unit}"
    return f"{spent:,.3g} s"


def json_line(event: str, **values: object) -> str:
    """Return an event as one line of strict JSON, with the time (UTC) and its name first."""
    from agilerl.runs.strict_json import dumps

    head = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event})
    # Two objects joined, since dumps sorts the keys, and time and event should come first.
    return f"{head[:-1]}, {dumps(values)[1:]}" if values else head


def readable(text: object) -> str:
    """Return a text of a model, a file or a name that cannot command the terminal.

    Control characters other than line ends and tabs, and those that turn the direction of writing, are replaced.
    """
    return _COMMANDS.sub("\ufffd", str(text))


def one_line(text: str, length: int = 300) -> str:
    """Return a text of a model or a file on one line, cut to so many characters."""
    line = " ".join(readable(text).split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


def tell_apart(texts: Sequence[str], length: int = 300) -> list[str]:
    """Return texts as :func:`one_line` does; those that it would cut to the same lose what they begin with alike."""
    whole = [one_line(text, sys.maxsize) for text in texts]
    lines = [one_line(text, length) for text in whole]
    for line in set(lines):
        alike = [number for number, other in enumerate(lines) if other == line]
        if len({whole[number] for number in alike}) > 1:
            letters = enumerate(zip(*(whole[number] for number in alike)))
            shared = next((k for k, at in letters if len(set(at)) > 1), min(len(whole[number]) for number in alike))
            # From the beginning of a word, unless it is a very long one.
            start = whole[alike[0]].rfind(" ", 0, shared) + 1 or shared
            ends = tell_apart([whole[number][start:] for number in alike], length - 3)
            for number, end in zip(alike, ends):
                lines[number] = f"...{end}"
    return lines


def format_samples(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each sample of a symptom."""
    samples = list(samples)
    return [
        f"  {question} -> {one_line(s['answer']) or '(empty)'} (reward {s['reward']:.4g}"
        f"{'; right: ' * bool(s['right'])}{one_line(s['right'])})"
        for s, question in zip(samples, tell_apart([s["question"] for s in samples]))
    ]


def tell_line(line: object) -> None:
    """Print a line of results at once, also into a pipe."""
    print(readable(line), flush=True)


def say(sentence: str) -> None:
    """Print a message that is not a result to standard error; if that is closed as well, print nothing."""
    with suppress(OSError):
        print(readable(sentence), file=sys.stderr, flush=True)


def lost_output(output: TextIO) -> OSError | None:
    """Flush standard output; return the error if that fails, or if writing failed before.

    After an error nothing more is written to it.
    """
    try:
        output.flush()
        lost = output.lost if isinstance(output, _Output) else None
    except OSError as error:
        lost = error
    if lost is not None:
        # Otherwise the interpreter would try to write the rest of the buffer at its end, and complain.
        with suppress(OSError, io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)
    return lost


def write_error(error: OSError) -> WriteError:
    """Return the error for a lost output."""
    return WriteError(f"the output could not be written: {error.strerror or error}")


class _Output(io.TextIOWrapper):
    """Standard output that remembers its first write error: an OSError alone does not say which file it concerns."""

    def __init__(self, before: TextIO | None) -> None:
        if before is not None:
            before.flush()
        encoding = "utf-8" if before is None else before.encoding
        file = open(1, "wb", closefd=False)  # noqa: SIM115  (open as long as the process runs)
        super().__init__(file, encoding=encoding, errors="agilerl", line_buffering=file.isatty())
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write; on failure remember the error."""
        with self._watch():
            return super().write(text)

    def flush(self) -> None:
        """Write the buffer; on failure remember the error."""
        with self._watch():
            super().flush()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = error
            raise


class _Console(Console):
    """A console whose texts cannot command the terminal, and that raises BrokenPipeError if the reader is gone.

    Rich prints control characters of a text as they are, and would end the program.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print a sentence as one line into a pipe, broken between words on a terminal; other things as rich does."""
        whole = not self.is_terminal and all(isinstance(part, str) for part in objects)
        super().print(*objects, **{"soft_wrap": whole, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the pieces of something to print; those that are commands of rich itself stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=readable(segment.text))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Lines:
    """A file for a console, which passes on each line when it is complete."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun = say, ""

    def write(self, text: str) -> int:
        """Pass on the complete lines."""
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines are passed on when they are complete."""


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that an encoding lacks; undecodable bytes of a file name pass unchanged."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    if all("\udc80" <= c <= "\udcff" for c in characters):
        return bytes(ord(c) - 0xDC00 for c in characters), error.end
    return "".join(_SPELT.get(c) or c.encode("ascii", "backslashreplace").decode() for c in characters), error.end
