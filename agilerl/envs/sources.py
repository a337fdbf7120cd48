"""Rows from files, the hub and datasets in memory; in sequence, or mixed by weight."""

import csv
import io
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import Count, Positive, checked, described, nearest, reason, shown
from agilerl.config.named_files import ENDINGS, names_a_file
from agilerl.envs.core import Row
from agilerl.errors import EnvError
from agilerl.safety.addresses import is_out_of_reach
from agilerl.safety.bounds import check_file, memory_bytes

# -- any source, alone or in a mixture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source, or some of them."""

    name: str
    """The source's name in messages."""
    rows: Any
    """All rows as they were read: a sequence of dicts, or a Hugging Face ``Dataset``."""
    names: Mapping[str, str]
    """All columns that occur in any row: from the source's names to those in the rows."""
    numbers: Sequence[int]
    """Which of the rows belong to the part."""
    lines: Sequence[int] = ()
    """For text files, the line where each row begins, counted from 1."""
    weight: float = 1.0
    """Its share of a mixture, relative to the other parts."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def columns(self) -> list[str]:
        """Names of all columns, after renaming."""
        return list(self.names.values())

    def where(self, index: int) -> str:
        """Describe where a row is from: the line in a text file, else its number counted from 0."""
        number = self.numbers[index]
        return f"{f'line {self.lines[number]}' if self.lines else f'row {number}'} of {self.name}"

    def row(self, index: int) -> Row:
        """Return a row with all its columns."""
        row = self.rows[self.numbers[index]]
        return {self.names.get(column, column): value for column, value in row.items()}


def _part(name: str, rows: Any, columns: Iterable[Any], lines: Sequence[int] = ()) -> SourceRows:
    return SourceRows(name, rows, {str(column): str(column) for column in columns}, range(len(rows)), lines)


def _read_dicts(name: str, rows: Sequence[Any], lines: Sequence[int] = ()) -> SourceRows:
    """Return rows in memory; raises EnvError for one that is no mapping."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            where = _part(name, rows, (), lines).where(number)
            raise EnvError(f'{where}: expected an object such as {{"question": ...}}, found {described(row)}')
    return _part(name, rows, (column for row in rows for column in row), lines)


class Rows(Sequence[Row]):
    """Rows of one source, or of several that are mixed; what every dataset task and environment reads."""

    def __init__(self, parts: Sequence[SourceRows]) -> None:
        self.parts = tuple(parts)
        self.name = " and ".join(part.name for part in parts)
        """The rows' name in messages."""
        self.columns = list(dict.fromkeys(column for part in parts for column in part.columns))
        """Names of all columns that occur in any row."""
        self.sizes = [len(part) for part in parts]
        """Number of rows of each part."""
        self.weights = [part.weight for part in parts]
        """Weight of each part."""
        self._starts = (0, *accumulate(self.sizes))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return a row as a new dict, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        # A range resolves negative indices and raises IndexError.
        part, number = self._find(range(len(self))[index])
        return part.row(number)

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {self.name}, columns {self.columns})"

    def where(self, index: int) -> str:
        """Describe where a row is from."""
        part, number = self._find(index)
        return part.where(number)

    def part_of(self, index: int) -> int:
        """Return the number of the part that a row belongs to."""
        return bisect_right(self._starts, index) - 1

    def select(self, indices: Iterable[int]) -> "Rows":
        """Return some of the rows in their original order; parts keep their weights."""
        numbers: list[list[int]] = [[] for _ in self.parts]
        for index in sorted(indices):
            part, number = self._find(index)
            numbers[self.part_of(index)].append(part.numbers[number])
        return Rows([replace(part, numbers=selected) for part, selected in zip(self.parts, numbers)])

    def _find(self, index: int) -> tuple[SourceRows, int]:
        number = self.part_of(index)
        return self.parts[number], index - self._starts[number]


@checked
def read_dataset(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    config: str | None = None,
    name: str = "the dataset",
    limit: Count | None = None,
) -> Rows:
    """Read rows from any source; all columns stay, and reach the graders.

    Args:
        source: a file (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), the name of a dataset on the hub, a
            Hugging Face ``Dataset`` or ``DatasetDict``, a sequence of dicts, anything with a length whose items are
            such rows (a torch ``Dataset``), or ``Rows``. With a ``limit`` also what only yields rows: a streamed
            ``IterableDataset``, a generator.
        columns: new column names, mapped to those in the source: ``{"question": "problem"}``; the other way round if
            only that fits the source.
        split: which split of a dataset of the hub, or of a ``DatasetDict``.
        config: which configuration of a dataset of the hub, if it has several.
        name: the name in messages of rows in memory.
        limit: read only so many rows, the first ones; a dataset of the hub is then streamed.

    Raises:
        EnvError: nothing there, an unknown format, a damaged or empty file, text that is not UTF-8, a missing or
            duplicate column, or a hub that does not answer.
    """
    if isinstance(source, Rows):
        parts: Sequence[SourceRows] = source.parts
    else:
        parts = [_read(source, split, config, name, limit)]
        if not len(parts[0]):
            raise EnvError(f"expected at least one row in {parts[0].name}, found none")
    rows = Rows([_rename(part, columns or {}) for part in parts])
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


@checked
def mix(sources: Sequence[tuple[Any, Positive]]) -> Rows:
    """Mix sources (anything that ``read_dataset`` takes) by weight.

    Every 1000 training rows hold exactly as many of each source as its weight says.

    Raises:
        ConfigError: what is no pair of a dataset and a positive weight.
        EnvError: no source, a source that is a mixture, or as ``read_dataset``.
    """
    if not sources:
        raise EnvError("expected at least one (dataset, weight) to mix, found none")
    parts: list[SourceRows] = []
    for source, weight in sources:
        rows = read_dataset(source, name=f"dataset {len(parts)} of the mixture")
        if len(rows.parts) > 1:
            raise EnvError(f"a mixture cannot hold a mixture ({rows.name}); list its datasets directly")
        parts.append(replace(rows.parts[0], weight=float(weight)))
    return Rows(parts)


_READ = ("question", "answer", "prompt", "completion", "messages", "chosen", "rejected", "target")
"""Columns that something here reads."""


def _rename(part: SourceRows, columns: Mapping[str, str]) -> SourceRows:
    """Rename columns; raises EnvError for missing and duplicate columns."""
    existing = part.columns
    renamed: dict[str, str] = {}
    for new, old in columns.items():
        if old not in existing and new in existing and old in _READ:
            new, old = old, new  # AgileRL's manifests have them the other way round
        if old not in existing:
            raise EnvError(f"{part.name} has no column {shown(old)}; {nearest(old, existing)}")
        if old in renamed:
            raise EnvError(f"columns gives the column {old} of {part.name} two names; give it one")
        renamed[old] = new
    names = {raw: renamed.get(name, name) for raw, name in part.names.items()}
    first: dict[str, str] = {}
    for old, new in zip(existing, names.values()):
        if new in first:
            raise EnvError(f"{first[new]} and {old} of {part.name} would both be the column {new}; rename one of them")
        first[new] = old
    return replace(part, names=names)


# -- files ------------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> SourceRows:
    """Read a file in the format of its suffix.

    Raises EnvError for no file, an unknown suffix, text that is not UTF-8, a damaged line, or a duplicate column.
    """
    kind = path.suffix.lower()
    try:
        if not path.exists():
            raise EnvError(f"expected a file of rows, found nothing at {shown(str(path))}")
        # The bytes, the text, and the rows as Python objects briefly exist together.
        check_file(path, memory_bytes() // 8, error=EnvError)
        if kind not in ENDINGS:
            raise EnvError(f"{path.name}: expected a file that ends with {', '.join(ENDINGS)}, found {shown(kind)}")
        if kind == ".parquet":
            return _parquet(path)
        return _csv(path, kind) if kind in (".csv", ".tsv") else _json(path, kind)
    except OSError as error:
        raise EnvError(f"{shown(str(path))} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise EnvError(f"{path.name} does not fit into memory; use fewer rows") from error


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        # Spreadsheets write a byte-order mark, which would become part of the first column's name.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise EnvError(
            f"line {line} of {path.name} is not UTF-8 text (byte {byte:#04x}); save the file as UTF-8"
        ) from error


def _json(path: Path, kind: str) -> SourceRows:
    """Read one object a line, or a list of objects."""
    text = _text(path)
    if kind == ".json" and text.lstrip().startswith("["):
        return _read_dicts(path.name, _parse(text, path, f"an object of {path.name}"))
    # Not splitlines(), which also breaks at characters that JSON allows inside a text.
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    rows = [_parse(line, path, f"line {number} of {path.name}", number) for number, line in lines.items()]
    return _read_dicts(path.name, rows, list(lines))


def _parse(text: str, path: Path, where: str, line: int = 1) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json by itself keeps the last of several values with one name, and says nothing.
        _check_unique([name for name, _ in pairs], where)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos : error.pos + 40].strip() or "the end"
        raise EnvError(
            f"line {line + error.lineno - 1} of {path.name} is not a complete JSON value: {error.msg} at character "
            f"{error.colno}, found {shown(rest)}; is the file damaged?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{where} cannot be read as JSON: {error}") from error


def _check_unique(names: Sequence[str], where: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvError(f"{where} has the column {shown(twice)} twice; rename or remove one of them")


def _csv(path: Path, kind: str) -> SourceRows:
    delimiter, name = (",", "comma") if kind == ".csv" else ("\t", "tab")
    rows, lines = [], []
    limit = csv.field_size_limit(sys.maxsize)  # 128 KiB unless raised; it is process-wide, so it is put back below
    try:
        # Strict: otherwise a quote that never ends swallows the rest of the file without an error.
        reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
        header = next(reader, [])
        _check_unique(header, path.name)
        # A row may have several lines, and line_num is that of its last.
        start = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                raise EnvError(
                    f"line {start} of {path.name}: expected {len(header)} values, one for each of {header}, found "
                    f"{len(values)}; quote texts that contain a {name}"
                )
            if values:
                rows.append(dict(zip(header, values)))
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise EnvError(f"line {reader.line_num} of {path.name} cannot be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return _part(path.name, rows, header, lines)


def _parquet(path: Path) -> SourceRows:
    import datasets
    import pyarrow.parquet

    try:
        # Not Dataset.from_parquet, which copies the rows to its cache first.
        table = datasets.table.InMemoryTable(pyarrow.parquet.ParquetFile(path).read())
        table.validate(full=True)  # texts that are not UTF-8 would raise when they are read
        rows = stop_decoding(datasets.Dataset(table))
        return _part(path.name, rows, rows.column_names)
    except (EnvError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything; report its reason
        raise EnvError(f"{path.name} cannot be read as Parquet: {reason(error)}") from error


def stop_decoding(dataset: Any) -> Any:
    """Return a dataset whose images, audio and the like stay bytes and paths.

    Decoding would open the path or URL that a row names. Raises EnvError for nested ones.
    """
    for column, feature in dict(dataset.features or {}).items():
        if getattr(feature, "decode", None) is True:
            dataset = dataset.cast_column(column, replace(feature, decode=False))
        elif "decode=True" in repr(feature):
            raise EnvError(f"the column {shown(column)} holds lists of images or audio; remove it from the file")
    return dataset


# -- rows in memory, streams and the hub ------------------------------------------------------------------------------


def _read(source: Any, split: str, config: str | None, name: str, limit: int | None) -> SourceRows:
    if isinstance(source, str | Path):
        if isinstance(source, Path) or names_a_file(source):
            return read_file(Path(source).expanduser())
        source, name = _load_from_hub(source, split, config, stream=limit is not None), f"{source} ({split})"
    elif isinstance(source, Mapping):
        if split not in source:
            raise EnvError(f"expected the split {split} in {name}, found {sorted(map(str, source))}; pass one of them")
        source = source[split]
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return _read_dicts(name, source)
    sized, columns = hasattr(source, "__len__"), getattr(source, "column_names", None)
    if sized and isinstance(columns, list):
        return _part(name, source, columns)
    if hasattr(source, "__getitem__") if sized else isinstance(source, Iterable) and limit is not None:
        # torch's datasets have only a length and items
        rows = (source[number] for number in range(len(source))) if sized else source
        return _read_dicts(name, _first(rows, name, limit))
    raise EnvError(
        f"expected a file, a hub name, a Hugging Face Dataset or a sequence of dicts as {name}, or with a limit what "
        f"only yields rows, found {described(source)}; Dataset.from_generator and its like make one"
    )


def _first(source: Iterable[Any], name: str, limit: int | None) -> list[Any]:
    """Read rows one by one, only the first ``limit`` if there is one."""
    rows = []
    try:
        for row in islice(source, limit):
            rows.append(row)
    except Exception as error:  # someone else's code or a download may raise anything; report its reason
        raise EnvError(f"row {len(rows)} of {name} cannot be read: {type(error).__name__}: {error}") from error
    return rows


def _load_from_hub(name: str, split: str, config: str | None, *, stream: bool = False) -> Any:
    import datasets

    # Without this the client would retry for half a minute before it looks into its cache.
    reachable = not is_out_of_reach()
    was_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not reachable
    try:
        # The steps of load_dataset, since the files must be checked before they are downloaded.
        builder = datasets.load_dataset_builder(name, config)
        _check_files(builder, name)
        if stream:
            return stop_decoding(builder.as_streaming_dataset(split=split))
        builder.download_and_prepare()
        # As load_dataset has it: only if the user has set HF_DATASETS_IN_MEMORY_MAX_SIZE.
        small = (builder.info.dataset_size or 0) < datasets.config.IN_MEMORY_MAX_SIZE
        return stop_decoding(builder.as_dataset(split=split, in_memory=small))
    except EnvError:
        raise
    except Exception as error:  # a download may raise anything; report its reason
        remedy = "check its name, split and configuration" if reachable else "the hub cannot be reached from here"
        raise EnvError(
            f"there is no file {shown(name)}, and the hub has no dataset of that name that can be loaded: "
            f"{reason(error)}; {remedy}, or pass a file ({', '.join(ENDINGS)})"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _check_files(builder: Any, name: str) -> None:
    """Raise EnvError for a hub dataset that reads files outside its repository.

    Its README may name any URL or local path, which ``datasets`` would read as rows.
    """
    starts = [f"hf://datasets/{repository}@" for repository in (name, builder.repo_id) if repository]
    if os.path.isdir(builder.base_path or ""):
        starts.append(f"{os.path.abspath(builder.base_path)}{os.sep}")
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            # Of a chain such as zip://rows.csv::https://host/rows.zip, the last part is what is opened.
            path = file.rpartition("::")[2]
            path = path if "://" in path else os.path.realpath(path)
            if ".." in path.split("/") or not path.startswith(tuple(starts)):
                raise EnvError(
                    f"the hub dataset {shown(name)} names a file outside its repository, {shown(file)}; use another "
                    "dataset"
                )
