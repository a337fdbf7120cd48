"""Append-only files of JSON lines, whose torn tail is cut off when they are reopened after a crash."""

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from agilerl.checks.arguments import Location, checked
from agilerl.errors import CheckpointError
from agilerl.runs import strict_json
from agilerl.runs.atomic import PLAIN_FILE, reading, writing
from agilerl.safety.bounds import check_file, memory_bytes

_BLOCK = 1 << 20
"""Bytes read at once for a digest."""
_JOURNAL_BYTES, _LINE_BYTES = 2**30, 2**26
"""The most bytes of a journal, and of a line: a thousand agents with a hundred genes need fewer."""


class Closing:
    """A context manager that is closed at the end of the ``with`` block."""

    def close(self) -> None:
        """Release what it holds; closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Appending: after a cut, the next line goes to the new end without a seek. Not blocking: opening a pipe must not wait
# for its other end, since what is no plain file is refused once it is open.
_APPENDING = os.O_RDWR | os.O_CREAT | os.O_APPEND | PLAIN_FILE | getattr(os, "O_NONBLOCK", 0)
_INTACT = "The earlier lines are intact"


class _AppendFile(Closing):
    """A file that grows by whole lines: a line that could not be written in full is removed again."""

    @checked
    def __init__(self, path: Path, *, keep: int | None = None) -> None:
        self.path = path
        with writing(path, "Nothing was changed"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link: a run directory from elsewhere could make this truncate an unrelated file.
            self._descriptor: int | None = os.open(path, _APPENDING, 0o666)
        try:
            with reading(path):
                status = os.fstat(self._open())
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"expected a plain file at {path}, found a device or a pipe.")
                self.position = status.st_size
                """Bytes written so far; ``keep=position`` restores the file to this state."""
                whole = self._whole(keep)
            self._cut(whole)
        except BaseException:
            self.close()
            raise

    def _whole(self, keep: int | None) -> int:
        """Return how many bytes of an existing file to keep, and take note of them."""
        raise NotImplementedError

    def _append(self, data: bytes) -> None:
        descriptor = self._open()
        with writing(self.path, _INTACT):
            try:
                # A full disk or a signal may end a write early, without an error.
                written = os.write(descriptor, data)
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            except OSError:
                try:
                    os.ftruncate(descriptor, self.position)
                except OSError:
                    self.close()  # the torn line stays until the file is reopened, and nothing may be written after it
                raise
        self.position += len(data)

    def _cut(self, position: int) -> None:
        if position == self.position:
            return
        with writing(self.path, _INTACT):
            try:
                os.ftruncate(self._open(), position)
            except OSError:
                self.close()
                raise
        self.position = position

    def sync(self) -> None:
        """Return when everything written is on the disk, safe even from a power failure."""
        with writing(self.path, _INTACT):
            os.fsync(self._open())

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            raise CheckpointError(f"{self.path} has been closed; open it again to write.")
        return self._descriptor


class JsonLines(_AppendFile):
    """Writer of metrics and lineage: one JSON object per line, with sorted keys, written line by line.

    Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity" (see ``strict_json``). Bytes after
    the last newline of an existing file are a line that a crash interrupted; they are cut off. ``keep`` truncates the
    file to its first ``keep`` bytes, a ``position`` that was noted at a checkpoint.
    """

    def _whole(self, keep: int | None) -> int:
        if keep is not None and (lost := missing_bytes(self.path, keep)):
            raise CheckpointError(f"{lost}.")
        whole = _end_of_last_line(self.path) if keep is None else keep
        self._written = _digest(self.path, whole)
        return whole

    @property
    def sha256(self) -> str:
        """The sha256 of all bytes up to ``position``, with which a reader can check that no line was changed."""
        return self._written.hexdigest()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; raises WriteError if the disk is full or refuses, and leaves no partial line then."""
        line = strict_json.dumps(record).encode() + b"\n"
        self._append(line)
        self._written.update(line)


class Journal(_AppendFile):
    """The record of decisions from which a run can be replayed: each line has a sequence number and its own crc32.

    Opening reads and checks every record, and cuts off a torn tail. A damaged record before intact ones is not a torn
    tail: it raises CheckpointError with the line number, because cutting there would silently lose records.
    ``keep`` truncates the journal to its first ``keep`` records, as many as it had at a checkpoint.
    """

    def _whole(self, keep: int | None) -> int:
        self.records, whole = _read_journal(self.path)
        if keep is None:
            return whole
        if lost := _fewer_records(self.path, len(self.records), keep):
            raise CheckpointError(f"{lost}.")
        self.records = self.records[:keep]
        return sum(len(_seal(sequence, data)) for sequence, data in enumerate(self.records))

    def append(self, data: Mapping[str, Any]) -> int:
        """Write ``data`` to the disk (synced) and return its sequence number, counted from 0."""
        sequence, before = len(self.records), self.position
        line = _seal(sequence, data)
        self._append(line)
        try:
            self.sync()
        except CheckpointError:
            self._cut(before)  # otherwise the next record would reuse this number
            raise
        # Keep what a reader would get back, not an alias of the caller's dict.
        self.records.append(strict_json.loads(line)["data"])
        return sequence

    def __len__(self) -> int:
        return len(self.records)


def missing_bytes(path: Path, keep: int) -> str:
    """Return in words what is missing from the first ``keep`` bytes of a file, which end a line; "" if nothing is."""
    with reading(path):
        if not path.exists():
            return f"{path} should have {keep:,} bytes of lines, but it does not exist" if keep else ""
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, keep - 1))
            ends = file.read(1) == b"\n"
    if keep > size:
        return f"{path} should have at least {keep:,} bytes, found {size:,}; lines were lost"
    return "" if keep == 0 or ends else f"{path} should have a line that ends at byte {keep:,}; lines were changed"


def damaged_lines(path: Path, keep: int, sha256: str | None) -> str:
    """Return in words what is wrong with the first ``keep`` bytes of a file of lines; "" if nothing is.

    They must all exist, end with a line, hold one JSON object per line, and match the ``sha256`` of what was written,
    if it was noted.
    """
    if lost := missing_bytes(path, keep):
        return lost
    with reading(path):
        if keep == 0 or (sha256 is not None and _digest(path, keep).hexdigest() == sha256):
            return ""
        with open(path, "rb") as file:
            # They end with a newline, after which there is nothing to parse.
            lines = file.read(keep).split(b"\n")[:-1]
    try:
        for number, line in enumerate(lines, start=1):
            _parse_line(path, number, line)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if sha256 is None:
        return ""
    return f"the lines of {path} are not what was written: something in its first {keep:,} bytes was changed"


def missing_records(path: Path, keep: int) -> str:
    """Return in words what is missing from a journal's first ``keep`` records; "" if nothing is.

    Raises CheckpointError if a record before intact ones is damaged.
    """
    with reading(path):
        return _fewer_records(path, len(_read_journal(path)[0]) if path.exists() else 0, keep)


def _fewer_records(path: Path, count: int, keep: int) -> str:
    return "" if keep <= count else f"{path} should have at least {keep} records, found {count}; records were lost"


@checked
def read_lines(path: Location) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; a missing file has none, and a torn last line is skipped.

    Raises CheckpointError naming the line if one before the end is damaged.
    """
    path, memory = Path(path), memory_bytes()
    with reading(path), suppress(FileNotFoundError):
        # As Python objects, lines take about ten times the memory of their text.
        check_file(path, None if memory is None else memory // 10, error=CheckpointError)
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, _LINE_BYTES), b""), start=1):
                if not line.endswith(b"\n"):
                    if len(line) == _LINE_BYTES:
                        raise CheckpointError(f"line {number} of {path} has more than {_LINE_BYTES:,} bytes.")
                    return
                yield _parse_line(path, number, line)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"line {number} of {path} should be JSON, but it is not: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"line {number} of {path} should be a JSON object, found a {type(value).__name__}.")
    return value


_HEAD = b'{"crc":"'


def _seal(sequence: int, data: Mapping[str, Any]) -> bytes:
    body = strict_json.dumps({"data": data, "seq": sequence})
    # Over the body alone. The keys of the line stay sorted: crc, data, seq.
    crc = zlib.crc32(body.encode())
    return f'{{"crc":"{crc:08x}",{body[1:]}\n'.encode()


def _unseal(line: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the sequence number and data of an intact line, else None."""
    try:
        record = strict_json.loads(line)
        # Sealing the data again and comparing bytes checks the crc and the JSON's form at once.
        return (record["seq"], record["data"]) if _seal(record["seq"], record["data"]) == line else None
    except (ValueError, KeyError, TypeError):
        return None


def _read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records up to the first damaged line, and the bytes they take."""
    check_file(path, _JOURNAL_BYTES, error=CheckpointError)
    lines = [line + b"\n" for line in path.read_bytes().split(b"\n")]
    lines[-1] = lines[-1][:-1]  # Whatever follows the last newline is an unfinished line.
    records: list[dict[str, Any]] = []
    whole = 0
    for number, line in enumerate(lines, start=1):
        record = _unseal(line)
        # An intact record may also be hidden behind the damaged newline of the record before it.
        if record is None and _unseal(line[line.rfind(_HEAD) :]) is None:
            # Whether damage is a torn tail shows only further on: nothing intact may follow it.
            continue
        if record is None or record[0] != len(records) or number != len(records) + 1:
            raise CheckpointError(
                f"line {len(records) + 1} of {path} is damaged or lost, but line {number} is intact: this is not an "
                "interrupted write, so nothing was cut off. Restore the file from a copy."
            )
        records.append(record[1])
        whole += len(line)
    return records, whole


def _digest(path: Path, size: int) -> "hashlib._Hash":
    """Return the hash of the first ``size`` bytes of a file, ready to be updated."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK))):
            digest.update(block)
            size -= len(block)
    return digest


def _end_of_last_line(path: Path) -> int:
    """Return the number of bytes up to and including the last newline."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        first = file.seek(max(0, size - _LINE_BYTES))
        end = file.read().rfind(b"\n") + 1
    if first and not end:
        raise CheckpointError(f"the last line of {path} has more than {_LINE_BYTES:,} bytes.")
    return first + end
