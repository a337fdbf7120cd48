"""Sampled completions of a run: one Parquet file per step, never overwritten."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agilerl.errors import CheckpointError
from agilerl.runs.atomic import write_bytes
from agilerl.safety.bounds import check_file

_SAMPLED = "reward"
"""A metric of the steps that sample completions; steps that learn from data have lengths too."""
_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """One row of a completions file."""

    generation: int
    step: int
    agent: int
    group: int
    """Rows of one agent and step in the same group answer the same prompt."""
    sample: int
    """Number of the sample in its group."""
    prompt: str
    completion: str
    answer: str
    reward: float | None
    """None if the grader gave no grade."""
    length: int
    """Generated tokens."""
    finish_reason: str
    failure: str = ""
    """Why a completion of this agent and step got no grade, if one did not; in ``metrics.jsonl``, not in the file."""


_TEXTS = ("prompt", "completion", "answer")
_TYPES: dict[Any, Any] = {int: pa.int64(), str: pa.string(), float | None: pa.float64()}
_SCHEMA = pa.schema([(f.name, _TYPES[f.type]) for f in fields(CompletionRecord) if f.name != "failure"])


def write_completions(folder: Path, step: int, records: Sequence[CompletionRecord]) -> Path:
    """Write the completions of one step to ``folder/step_<step>.parquet``, atomically, and return the path.

    Writing the same rows again changes nothing; raises CheckpointError if the file holds different rows.
    """
    columns = {name: [getattr(record, name) for record in records] for name in _SCHEMA.names}
    # A tokenizer may decode half a character into a lone surrogate, which UTF-8 cannot hold.
    columns |= {name: [text.encode("utf-8", "replace").decode() for text in columns[name]] for name in _TEXTS}
    buffer = BytesIO()
    # Through memory: the bytes are compared with those of an earlier attempt, and written atomically.
    pq.write_table(pa.Table.from_pydict(columns, schema=_SCHEMA), buffer, compression="zstd")
    data = buffer.getvalue()
    path = _file(folder, step)
    if path.exists():  # a resumed run samples its last steps again, to the same bytes
        if path.read_bytes() != data:
            raise CheckpointError(f"{path} exists with different rows, and completions are never overwritten.")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path


def completion_steps(folder: Path) -> list[int]:
    """Return the steps that have a completions file, in order."""
    names = (path.stem.removeprefix("step_") for path in folder.glob("step_*.parquet"))
    return sorted(int(name) for name in names if name.isdigit())


def lost_completions(folder: Path, lines: Iterable[Mapping[str, Any]], *, before: int) -> str:
    """Describe which completions of steps before ``before`` the train lines know and the folder lacks; "" if none."""
    sampled = {line.get("step") for line in lines if line.get("kind") == "train" and _SAMPLED in line}
    steps = {step for step in sampled if isinstance(step, int) and step < before}
    lost = sorted(steps.difference(completion_steps(folder)))
    if not lost:
        return ""
    return (
        f"{folder} lacks the completions of {len(lost):,} of {len(steps):,} steps, the first of them "
        f"{_file(folder, lost[0]).name}: they were deleted, and are not sampled again."
    )


def read_completions(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of one step; raises CheckpointError if the file is missing, damaged or lacks columns."""
    path = _file(folder, step)
    check_file(path, _MOST_BYTES, error=CheckpointError)
    try:
        with pq.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            rows: list[dict[str, Any]] = file.read([name for name in _SCHEMA.names if name in names]).to_pylist()
    except FileNotFoundError as error:
        raise CheckpointError(f"expected completions in {path}, but the file does not exist.") from error
    # A damaged name of a column makes Arrow raise UnicodeDecodeError.
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise CheckpointError(f"expected a Parquet file of completions at {path}, found none: {error}.") from error
    if rows and (missing := sorted(set(_SCHEMA.names) - set(rows[0]))):
        raise CheckpointError(f"expected a Parquet file of completions at {path}, but it lacks {', '.join(missing)}.")
    return rows


def discard_completions(folder: Path, *, after: int) -> None:
    """Delete the files of steps after ``after``, which a resumed run is about to sample again."""
    for step in completion_steps(folder):
        if step > after:
            _file(folder, step).unlink()


def _file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"
