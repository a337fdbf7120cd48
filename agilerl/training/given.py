"""Rows and graders that a program holds, as settings of a run that can be resumed."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import described
from agilerl.errors import ConfigError, EnvError
from agilerl.runs.atomic import write_text
from agilerl.runs.directory import RunLayout, check_vacant
from agilerl.safety.custom_code import given_name


def in_manifest(dataset: Any, reward: Any, environment: Any) -> tuple[dict[str, Any], Any]:
    """Return ``dataset`` and ``graders`` as keys of an environment that has neither, and rows that are in memory."""
    values: dict[str, Any] = {}
    rows = None
    if reward is not None:
        for one in listed(reward):
            if not isinstance(one, str) and not callable(one):
                raise ConfigError(f"reward: expected a function, a grader or the name of one, found {described(one)}")
        values["graders"] = [{"name": one if isinstance(one, str) else given_name(one)} for one in listed(reward)]
    if isinstance(dataset, str | Path):
        values["dataset"] = str(dataset)
    elif isinstance(dataset, Mapping) and "path" in dataset:
        values["dataset"] = dict(dataset)
    elif dataset is not None:
        from agilerl.envs.sources import read_dataset

        # Only a name in their place: the rows are written beside the run directory when the run begins.
        rows, values["dataset"] = read_dataset(dataset), "rows.jsonl"
    both = [name for name in values if isinstance(environment, Mapping) and name in environment]
    if both:
        argument = "reward" if both[0] == "graders" else both[0]
        raise ConfigError(f"{argument}= and environment[{both[0]!r}] mean the same; leave out one of them")
    return values, rows


def listed(reward: Any) -> list[Any]:
    """Return the rewards of one argument, which is one or a list of them; raises ConfigError for an empty list."""
    if reward == []:
        raise ConfigError("reward: expected at least one in the list, found none; leave it out for the task's own")
    return reward if isinstance(reward, list) else [reward]


@contextmanager
def rows_beside(root: Path, rows: Any) -> Iterator[str | None]:
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
