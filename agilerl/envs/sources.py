"""Rows from files, the hub and datasets in memory; in sequence, or mixed by weight."""

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from agilerl.addresses import is_out_of_reach
from agilerl.arguments import Count, checked, described, nearest, shown
from agilerl.bounds import check_file, memory_bytes
from agilerl.config.named_files import names_a_file
from agilerl.envs.core import Row
from agilerl.errors import EnvError

# -- files ------------------------------------------------------------------------------------------------------------


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
            read.data.validate(full=True)  # texts that are not UTF-8 would raise when they are read
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
    for column, feature in dict(dataset.features or {}).items():
        if getattr(feature, "decode", None) is True:
            dataset = dataset.cast_column(column, replace(feature, decode=False))
        elif "decode=True" in repr(feature):
            raise EnvError(f"the column {shown(column)} holds lists of images or audio; remove it from the file")
    return dataset


_UNFOLD = """
import sys
limit = int(sys.argv[2])
import pyarrow as pa, pyarrow.parquet as pq
pa.set_cpu_count(1)
if sys.platform == "linux":  # elsewhere only what has been read is counted
    import resource
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


# -- any source, alone or in a mixture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The rows of one source, or some of them."""

    name: str
    """The source's name in messages."""
    table: Table
    """Its rows as they were read."""
    renamed: Mapping[str, str]
    """Renamed columns: from the source's names to those in the rows."""
    weight: float = 1.0
    """Its share of a mixture, relative to the other parts."""
    places: Sequence[int] | None = None
    """Which of the rows belong to the part; None for all."""

    def __len__(self) -> int:
        return len(self.table.rows) if self.places is None else len(self.places)

    @property
    def columns(self) -> list[str]:
        """Names of all columns, after renaming."""
        return [self.renamed.get(column, column) for column in self.table.columns]

    def row(self, index: int) -> Row:
        """Return a row with all its columns."""
        found = self.table.rows[index if self.places is None else self.places[index]]
        if not self.renamed:
            return dict(found)
        return {self.renamed.get(column, column): value for column, value in found.items()}

    def at(self, index: int) -> str:
        """Describe where a row is in its source."""
        place = index if self.places is None else self.places[index]
        return f"line {self.table.lines[place]}" if self.table.lines else f"row {place}"


class Rows(Sequence[Row]):
    """Rows of one source, or of several that are mixed; what every dataset task and environment reads."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._starts = (0, *accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return a row as a new dict, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        part, place = self._find(range(len(self))[index])
        return part.row(place)

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {self.name}, columns {self.columns})"

    @property
    def name(self) -> str:
        """The rows' name in messages."""
        return " and ".join(part.name for part in self.parts)

    @property
    def columns(self) -> list[str]:
        """Names of all columns that occur in any row."""
        return list(dict.fromkeys(column for part in self.parts for column in part.columns))

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each part."""
        return [len(part) for part in self.parts]

    @property
    def weights(self) -> list[float]:
        """Weight of each part."""
        return [part.weight for part in self.parts]

    def where(self, index: int) -> str:
        """Describe where a row is from: the line in a text file, else its number counted from 0."""
        part, place = self._find(index)
        return f"{part.at(place)} of {part.name}"

    def part_of(self, index: int) -> int:
        """Return the number of the part that a row belongs to."""
        return bisect_right(self._starts, index) - 1

    def select(self, kept: Iterable[int]) -> "Rows":
        """Return some of the rows in their original order; parts keep their weights."""
        places: list[list[int]] = [[] for _ in self.parts]
        for index in sorted(kept):
            number = self.part_of(index)
            part, place = self.parts[number], index - self._starts[number]
            places[number].append(place if part.places is None else part.places[place])
        return Rows([replace(part, places=own) for part, own in zip(self.parts, places)])

    def _find(self, index: int) -> tuple[Part, int]:
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
            Hugging Face ``Dataset`` or ``DatasetDict``, a pandas ``DataFrame``, a torch ``Dataset``, a sequence of
            dicts or of tuples (``(chosen, rejected)`` or ``(prompt, chosen, rejected)``), ``Rows``, or anything that
            yields such rows: a streamed ``IterableDataset``, one of torch, a generator. Values of a CSV file stay text.
        columns: new column names, mapped to those in the source: ``{"question": "problem"}``; the other way round if
            only that fits the source.
        split: which split of a dataset of the hub, or of a ``DatasetDict``.
        config: which configuration of a dataset of the hub, if it has several.
        name: the name in messages of rows in memory.
        limit: read only so many rows, the first ones. Rows are held in memory: a source that only yields them is read
            once, up to ``MOST_STREAMED`` rows, and a dataset of the hub is streamed if there is a limit.

    Raises:
        EnvError: nothing there, an unknown format, a damaged or empty file, text that is not UTF-8, a missing or
            duplicate column, or a hub that does not answer.
    """
    if isinstance(source, Rows):
        parts = source.parts
    else:
        label, table = _table(source, split, config, name, limit)
        if len(table.rows) == 0:
            raise EnvError(f"expected at least one row in {label}, found none")
        parts = (Part(label, table, {}),)
    rows = Rows([_with_columns(part, columns or {}) for part in parts])
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


@checked
def mix(sources: Sequence[Any]) -> Rows:
    """Mix sources (anything that ``read_dataset`` takes) by weight.

    Every 1000 training rows hold exactly as many of each source as its weight says.

    Raises:
        EnvError: no source, a weight that is not positive, a source that is a mixture, or as ``read_dataset``.
    """
    if not sources:
        raise EnvError("expected at least one (dataset, weight) to mix, found none")
    parts: list[Part] = []
    for pair in sources:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise EnvError(f"expected pairs (dataset, weight) to mix, found {described(pair)}")
        source, weight = pair
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise EnvError(f"expected a positive number as the weight of a dataset, found {weight!r}")
        rows = read_dataset(source, name=f"dataset {len(parts)} of the mixture")
        if len(rows.parts) > 1:
            raise EnvError(f"a mixture cannot hold a mixture ({rows.name}); list its datasets directly")
        parts.append(replace(rows.parts[0], weight=float(weight)))
    return Rows(parts)


MOST_STREAMED = 100_000
"""Rows that are read of a source without a length, unless ``limit`` says how many."""


def _table(source: Any, split: str, config: str | None, name: str, limit: int | None = None) -> tuple[str, Table]:
    if isinstance(source, str | Path):
        if isinstance(source, Path) or names_a_file(source):
            path = Path(source).expanduser()
            return path.name, read_file(path)
        found = _load_from_hub(source, split, config, stream=limit is not None)
        label = f"{source} ({split})"
        return label, (_of_datasets(found) if limit is None else _listed(_streamed(found, label, limit), label))
    if isinstance(source, Mapping):
        if split not in source:
            raise EnvError(f"expected the split {split} in {name}, found {sorted(map(str, source))}; pass one of them")
        source = source[split]
    try:
        len(source)
    except TypeError as error:
        if isinstance(source, Iterable):
            return name, _listed(_streamed(source, name, limit), name)
        raise EnvError(
            f"expected a dataset, a sequence of dicts, a file or a hub name as {name}, found {described(source)}"
        ) from error
    if hasattr(source, "iterrows") and hasattr(source, "to_dict"):  # pandas
        return name, _listed(_of_pandas(source), name)
    if isinstance(source, Sequence):
        return name, _listed(source, name)
    if not hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        return name, _of_items(source, name)
    return name, _of_datasets(source)


def _of_items(dataset: Any, name: str) -> Table:
    """Read a dataset that has only a length and items, as torch's do."""
    try:
        rows = [dataset[number] for number in range(len(dataset))]
    except Exception as error:  # someone else's code may raise anything; report its reason
        raise EnvError(f"{name}: an item cannot be read: {type(error).__name__}: {error}") from error
    return _listed(rows, name)


def _streamed(source: Iterable[Any], name: str, limit: int | None) -> list[Any]:
    """Read the first rows of what only yields them; warns if there are more than are read without a limit."""
    rows = []
    try:
        for row in islice(source, (limit or MOST_STREAMED) + (limit is None)):
            rows.append(row)
    except Exception as error:  # someone else's code or a download may raise anything; report its reason
        raise EnvError(f"row {len(rows)} of {name} cannot be read: {type(error).__name__}: {error}") from error
    if limit is None and len(rows) > MOST_STREAMED:
        warnings.warn(
            f"{name} has no length, and only its first {MOST_STREAMED:,} rows are read: panels need rows in memory; "
            "set limit (in a manifest: rows)",
            stacklevel=5,
        )
        del rows[MOST_STREAMED:]
    return rows


def _listed(rows: Sequence[Any], name: str) -> Table:
    """Return rows in memory; tuples are pairs of answers, with or without their prompt."""
    if any(isinstance(row, tuple) and len(row) in _PAIRS for row in rows):
        rows = [dict(zip(_PAIRS[len(row)], row)) if type(row) is tuple and len(row) in _PAIRS else row for row in rows]
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise EnvError(
                f"expected dicts (or tuples of chosen and rejected) as rows of {name}, found {described(row)} in row "
                f"{number}"
            )
    return Table(rows, list(dict.fromkeys(str(column) for row in rows for column in row)))


_PAIRS = {2: ("chosen", "rejected"), 3: ("prompt", "chosen", "rejected")}


def _of_pandas(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame as plain values; what pandas calls missing is None."""
    found = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(column): _plain(value) for column, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _of_datasets(dataset: Any) -> Table:
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        raise EnvError(f"expected a Hugging Face Dataset or a sequence of dicts, found {type(dataset).__name__}")
    return Table(dataset, [str(column) for column in columns])


def _load_from_hub(name: str, split: str, config: str | None, *, stream: bool = False) -> Any:
    import datasets

    # Without this the client would retry for half a minute before it looks into its cache.
    reachable = not is_out_of_reach()
    was_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not reachable
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(builder, name)
        if stream:
            return without_decoding(builder.as_streaming_dataset(split=split))
        builder.download_and_prepare()
        small = (builder.info.dataset_size or 0) < datasets.config.IN_MEMORY_MAX_SIZE
        return without_decoding(builder.as_dataset(split=split, in_memory=small))
    except EnvError:
        raise
    except Exception as error:  # a download may raise anything; report its reason
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        cure = "check its name, split and configuration" if reachable else "the hub cannot be reached from here"
        raise EnvError(
            f"there is no file {shown(name)}, and the hub has no dataset of that name that can be loaded: "
            f"{reason[:300]}; {cure}, or pass a file ({', '.join(FORMATS)})"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _check_files(builder: Any, name: str) -> None:
    """Raise EnvError for a hub dataset that reads files outside its repository.

    Its README may name any URL or local path, which ``datasets`` would read as rows.
    """
    base = os.path.abspath(builder.base_path) if os.path.isdir(builder.base_path or "") else None
    starts = [f"hf://datasets/{repository}@" for repository in (name, builder.repo_id) if repository]
    starts += [] if base is None else [f"{base}{os.sep}"]
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            place = file.rpartition("::")[2]
            place = place if "://" in place else os.path.realpath(place)
            if ".." in place.split("/") or not place.startswith(tuple(starts)):
                raise EnvError(
                    f"the hub dataset {shown(name)} names a file outside its repository, {shown(file)}; use another "
                    "dataset"
                )


_READ = ("question", "answer", "prompt", "completion", "messages", "chosen", "rejected", "target")
"""Columns that something here reads."""


_OF_TUNIX = {"prompt": "prompts", "chosen": "chosen_responses", "rejected": "rejected_responses"}
"""Columns of Tunix's rows, read without being renamed by the user."""


def _read_as_meant(own: str, theirs: str, known: Sequence[str]) -> tuple[str, str]:
    """Return a new name and that in the source; AgileRL's manifests have them the other way round."""
    return (theirs, own) if theirs not in known and own in known and theirs in _READ else (own, theirs)


def _with_columns(part: Part, columns: Mapping[str, str]) -> Part:
    """Rename columns; raises EnvError for missing and duplicate columns."""
    known = part.columns
    columns = dict(_read_as_meant(own, theirs, known) for own, theirs in columns.items())
    if not {"question", "prompt", "messages"} & {*known, *columns}:
        free = {*known, *columns} - {*columns.values()}
        columns |= {own: theirs for own, theirs in _OF_TUNIX.items() if theirs in free and own not in free}
    for own, theirs in columns.items():
        if theirs not in known:
            raise EnvError(
                f"expected the column {shown(theirs)} in {part.name} to rename to {own}; {nearest(theirs, known)}"
            )
    new = {theirs: own for own, theirs in columns.items()}
    if len(new) < len(columns):
        twice = sorted(theirs for theirs in new if list(columns.values()).count(theirs) > 1)
        raise EnvError(f"columns gives the column {twice[0]} of {part.name} two names; give it one")
    after = [new.get(column, column) for column in known]
    for column, count in Counter(after).items():
        if count > 1:
            both = [before for before, name in zip(known, after) if name == column]
            raise EnvError(f"{' and '.join(both)} of {part.name} would both be the column {column}; rename one of them")
    return replace(part, renamed={raw: name for raw, name in zip(part.table.columns, after) if raw != name})
