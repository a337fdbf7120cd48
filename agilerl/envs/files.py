"""Files of rows: JSON lines, JSON, CSV and Parquet.

Text files are read here and not by ``datasets``, which turns date-like texts into dates, shifts the columns of a CSV
row that is too long, and does not say which line is damaged.
"""

import csv
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agilerl.arguments import shown
from agilerl.bounds import check_file, memory_bytes
from agilerl.errors import EnvError


@dataclass(frozen=True)
class Table:
    """Rows as they were read."""

    rows: Any
    """Sequence of dicts, or a Hugging Face ``Dataset``."""
    columns: list[str]
    """Names of all columns that occur in any row."""
    lines: Sequence[int] = ()
    """For text files, the line where each row begins, counted from 1."""


def read_file(path: Path) -> Table:
    """Read a file in the format of its suffix.

    Raises:
        EnvError: no such file, an unknown suffix, text that is not UTF-8, a damaged line, or a duplicate column.
    """
    kind = path.suffix.lower()
    try:
        if path.is_dir() or not path.exists():
            found = "a folder" if path.is_dir() else "nothing"
            raise EnvError(f"expected a file of rows, found {found} at {shown(str(path))}")
        if kind not in FORMATS:
            raise EnvError(f"{path.name}: expected a file that ends with {', '.join(FORMATS)}, found {shown(kind)}")
        _check_size(path)
        return FORMATS[kind](path)
    except OSError as error:
        raise EnvError(f"{shown(str(path))} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise EnvError(f"{path.name} does not fit into memory; use fewer rows") from error


def _check_size(path: Path) -> None:
    """Raise EnvError for anything but a plain file, and for one whose rows would not fit into memory."""
    memory = memory_bytes()
    try:
        # The bytes, the text, and the rows as Python objects briefly exist together.
        check_file(path, None if memory is None else memory // 8, error=EnvError)
    except EnvError as error:
        raise EnvError(f"{error} (rows are held in memory; use fewer of them)") from None


def _json_lines(path: Path) -> Table:
    rows, lines = [], []
    # Not splitlines(), which also breaks at characters that JSON allows inside a text.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            where = f"line {number} of {path.name}"
            rows.append(_object(_json(line, path, where, number), where))
            lines.append(number)
    return Table(rows, _columns(rows), lines)


def _json_array(path: Path) -> Table:
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _json_lines(path)
    found = _json(text, path, f"an object of {path.name}")
    rows = [_object(row, f"row {number} of {path.name}") for number, row in enumerate(found)]
    return Table(rows, _columns(rows))


def _json(text: str, path: Path, where: str, line: int = 1) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + 40].strip() or "the end"
        raise EnvError(
            f"line {line + error.lineno - 1} of {path.name} is not a complete JSON value: {error.msg} at character "
            f"{error.colno}, found {shown(found)}; is the file damaged?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{where} cannot be read as JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvError(f"{where} has the column {shown(twice)} twice; remove one")
    return made


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvError(f'{where}: expected an object such as {{"question": ...}}, found {shown(value)}')
    return value


def _csv(path: Path, delimiter: str = ",") -> Table:
    with _long_fields():
        reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            twice = [name for name in header if header.count(name) > 1]
            if twice:
                raise EnvError(f"{path.name} has the column {shown(twice[0])} twice; rename or remove one of them")
            rows, lines, start = [], [], reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    raise EnvError(
                        f"line {start} of {path.name}: expected {len(header)} values, one for each of {header}, found "
                        f"{len(values)}; quote texts that contain a {'comma' if delimiter == ',' else 'tab'}"
                    )
                if values:
                    rows.append(dict(zip(header, values)))
                    lines.append(start)
                start = reader.line_num + 1
        except csv.Error as error:
            raise EnvError(f"line {reader.line_num} of {path.name} cannot be read as CSV: {error}") from error
    return Table(rows, header, lines)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow CSV values beyond the default of 128 KiB; the limit is process-wide."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Table:
    import datasets

    _check_unfolded(path)
    showing = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    try:
        with tempfile.TemporaryDirectory() as cache:
            read = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
            dataset = without_decoding(read)
    except EnvError:
        raise
    except Exception as error:  # a damaged file may raise anything; report its reason
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise EnvError(f"{path.name} cannot be read as Parquet: {reason[:300]}") from error
    finally:
        datasets.logging.set_verbosity(level)
        if showing:
            datasets.enable_progress_bars()
    return Table(dataset, list(dataset.column_names))


def without_decoding(dataset: Any) -> Any:
    """Return a dataset whose images, audio and the like stay bytes and paths.

    Decoding would open the path or URL that a row names. Raises EnvError for nested ones.
    """
    for column, feature in dict(dataset.features).items():
        if getattr(feature, "decode", None) is True:
            dataset = dataset.cast_column(column, replace(feature, decode=False))
        elif "decode=True" in repr(feature):
            raise EnvError(f"the column {shown(column)} holds lists of images or audio; remove it from the file")
    return dataset


_UNFOLD = """
import resource, sys
limit = int(sys.argv[2])
import pyarrow as pa, pyarrow.parquet as pq
pa.set_cpu_count(1)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
for what, most in ((resource.RLIMIT_AS, now + limit), (resource.RLIMIT_CPU, 300), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
try:
    size, file = 0, pq.ParquetFile(sys.argv[1])
    for field in file.schema_arrow:
        if "dictionary<" in str(field.type) and not pa.types.is_dictionary(field.type):
            sys.exit(3)
    for batch in file.iter_batches(batch_size=256, use_threads=False):
        for column in batch.columns:
            size += (column.dictionary_decode() if pa.types.is_dictionary(column.type) else column).nbytes
        if size > limit:
            sys.exit(3)
except MemoryError:
    sys.exit(3)
"""
"""Reads a Parquet file under a memory limit, because a few kilobytes can expand to terabytes."""


def _check_unfolded(path: Path) -> None:
    """Raise EnvError for a file whose rows do not fit into memory, or that crashes its reader.

    A process with limits reads it once; other damage is reported by the actual read.
    """
    limit = (memory_bytes() or _UNKNOWN) // 3
    try:
        command = [sys.executable, "-I", "-c", _UNFOLD, str(path.absolute()), str(limit)]
        ended = subprocess.run(command, capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise EnvError(f"{path.name} took more than ten minutes to read; use fewer rows") from error
    if ended.returncode == 3 or ended.returncode < 0:
        raise EnvError(
            f"{path.name} expands to more than {limit >> 20:,} MiB of rows, which are held in memory, or is built to "
            "crash its reader; use fewer rows"
        )


_UNKNOWN = 2**34  # bytes of memory to assume if the system does not tell


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise EnvError(
            f"line {line} of {path.name} is not UTF-8 text (byte {byte:#04x}); save the file as UTF-8"
        ) from error


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


FORMATS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
    ".tsv": lambda path: _csv(path, "\t"),
    ".parquet": _parquet,
}
"""Readers by file suffix."""
