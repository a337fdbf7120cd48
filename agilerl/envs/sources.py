"""Rows from files, the hub and datasets in memory; in sequence, or mixed by weight."""

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from agilerl.addresses import is_out_of_reach
from agilerl.arguments import checked, described, nearest, shown
from agilerl.config.named_files import names_a_file
from agilerl.envs.core import Row
from agilerl.envs.files import FORMATS, Table, read_file, without_decoding
from agilerl.errors import EnvError


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
) -> Rows:
    """Read rows from any source; all columns stay, and reach the graders.

    Args:
        source: a file (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), the name of a dataset on the hub, a
            Hugging Face ``Dataset`` or ``DatasetDict``, a sequence of dicts, or ``Rows``. The values of a CSV file
            stay text.
        columns: new column names, mapped to those in the source: ``{"question": "problem"}``.
        split: which split of a dataset of the hub, or of a ``DatasetDict``.
        config: which configuration of a dataset of the hub, if it has several.
        name: the name in messages of rows in memory.

    Raises:
        EnvError: nothing there, an unknown format, a damaged or empty file, text that is not UTF-8, a missing or
            duplicate column, or a hub that does not answer.
    """
    if isinstance(source, Rows):
        parts = source.parts
    else:
        label, table = _table(source, split, config, name)
        if len(table.rows) == 0:
            raise EnvError(f"expected at least one row in {label}, found none")
        parts = (Part(label, table, {}),)
    return Rows([_with_columns(part, columns or {}) for part in parts])


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


def _table(source: Any, split: str, config: str | None, name: str) -> tuple[str, Table]:
    if isinstance(source, str | Path):
        if isinstance(source, Path) or names_a_file(source):
            path = Path(source).expanduser()
            return path.name, read_file(path)
        return f"{source} ({split})", _of_datasets(_load_from_hub(source, split, config))
    if isinstance(source, Mapping):
        if split not in source:
            raise EnvError(f"expected the split {split} in {name}, found {sorted(map(str, source))}; pass one of them")
        source = source[split]
    try:
        len(source)
    except TypeError as error:
        raise EnvError(
            f"expected a dataset, a sequence of dicts, a file or a hub name as {name}, found "
            f"{described(source)}; load streamed datasets without streaming, since they have no length"
        ) from error
    if isinstance(source, Sequence):
        for number, row in enumerate(source):
            if not isinstance(row, Mapping):
                raise EnvError(f"expected dicts as rows of {name}, found {described(row)} in row {number}")
        return name, Table(source, list(dict.fromkeys(str(column) for row in source for column in row)))
    return name, _of_datasets(source)


def _of_datasets(dataset: Any) -> Table:
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        raise EnvError(f"expected a Hugging Face Dataset or a sequence of dicts, found {type(dataset).__name__}")
    return Table(dataset, [str(column) for column in columns])


def _load_from_hub(name: str, split: str, config: str | None) -> Any:
    import datasets

    # Without this the client would retry for half a minute before it looks into its cache.
    reachable = not is_out_of_reach()
    was_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not reachable
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(builder, name)
        builder.download_and_prepare()
        small = (builder.info.dataset_size or 0) < datasets.config.IN_MEMORY_MAX_SIZE
        return without_decoding(builder.as_dataset(split=split, in_memory=small))
    except EnvError:
        raise
    except Exception as error:  # a download may raise anything; report its reason
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        cure = "check its name, split and configuration" if reachable else "the hub cannot be reached from here"
        raise EnvError(
            f"there is no file {shown(name)}, and no dataset of that name can be loaded from the hub: "
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


def _with_columns(part: Part, columns: Mapping[str, str]) -> Part:
    """Rename columns; raises EnvError for missing and duplicate columns."""
    known = part.columns
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
    for column in after:
        if after.count(column) > 1:
            both = [before for before, name in zip(known, after) if name == column]
            raise EnvError(f"{' and '.join(both)} of {part.name} would both be the column {column}; rename one of them")
    return replace(part, renamed={raw: new.get(name, name) for raw, name in zip(part.table.columns, known)})
