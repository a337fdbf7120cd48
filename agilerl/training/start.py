"""A run from its settings, or from its directory: built, carried out by its events, and closed."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.config.run import RunConfig, place_of_run
from agilerl.errors import EnvError
from agilerl.runs.atomic import write_text
from agilerl.runs.directory import RunLayout, check_vacant
from agilerl.training.events import Event
from agilerl.training.loop import resume, train
from agilerl.training.resolved import Resolved, resolve
from agilerl.training.saved import open_run
from agilerl.training.setup import Session, build


@dataclass(frozen=True)
class Started:
    """A run that has begun, or is resumed."""

    session: Session
    root: Path
    """The run directory."""
    events: Generator[Event, None, None]
    """What happens in the run, which is carried out by iterating over it."""


@contextmanager
def start(
    config: RunConfig | Resolved,
    out: Path | None,
    rows: Any = None,
    *,
    allow_code: bool = False,
    trackers: Mapping[str, Any] | None = None,
) -> Iterator[Started]:
    """Begin a run in ``out``, or in a directory of its own; ``trackers`` follow it besides those of its settings.

    ``rows`` are a dataset in memory, which takes the place of that of the settings. Raises as :func:`build` and
    :func:`agilerl.training.loop.train` do.
    """
    resolved = resolve(config)
    with place_of_run(resolved.config.environment, out) as root:
        wanted = {**resolved.config.training.trackers, **(trackers or {})}
        with _rows_beside(root, rows) as file:
            session = build(resolved if file is None else resolved.reading(file), allow_code=allow_code)
            # Also closes the run of a caller that stops following its events.
            with closing(train(session, root, trackers=wanted)) as events:
                yield Started(session, root, events)


@contextmanager
def reopen(
    path: Path, *, report: Callable[[str], None], allow_code: bool = False, trackers: Mapping[str, Any] | None = None
) -> Iterator[Started]:
    """Resume the unfinished run in a directory, from its newest intact checkpoint; see :func:`start`."""
    saved = open_run(path, report=report)
    with closing(saved.run):
        session = build(saved.config, saved.checkpoint, allow_code=allow_code)
        wanted = {**saved.config.training.trackers, **(trackers or {})}
        with closing(resume(session, saved.run, trackers=wanted)) as events:
            yield Started(session, saved.run.root, events)


@contextmanager
def _rows_beside(root: Path, rows: Any) -> Iterator[str | None]:
    """Write rows next to the directory of a run that begins, and yield the file; None if there are no rows.

    They are JSON lines, so that a resumed run reads the same, and are removed again if the run does not begin. Raises
    EnvError for values that JSON lacks, CheckpointError if there is a run already, which still needs its rows.
    """
    if rows is None:
        yield None
        return
    check_vacant(root)
    file, lines = root.with_name(f"{root.name}.rows.jsonl").absolute(), []
    for number, row in enumerate(rows):
        try:
            # JSON has no NaN: Python would write one that other readers refuse.
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"row {number} of the dataset cannot be written as JSON ({error}); convert its columns to text, "
                "numbers, lists and dicts, or leave them out"
            ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(f"{line}\n" for line in lines))
    try:
        yield str(file)
    except BaseException:
        if not RunLayout(root).run_json.exists():  # which would name it
            file.unlink(missing_ok=True)
        raise
