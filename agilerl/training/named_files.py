"""Files that a run reads besides its directory: what they held when it began, so that it goes on with the same."""

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agilerl.envs.sources import names_a_file
from agilerl.errors import CheckpointError
from agilerl.training.config import RunConfig
from agilerl.training.own_code import file_of, names_code
from agilerl.validation import shown

__all__ = ["check_unchanged", "digests"]


def digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the sha256 of each file that a configuration names, by its path: ``data``, and ``code`` that it runs.

    Raises CheckpointError where a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {"code": {}, "data": {}}
    for kind, path in _named(config):
        try:
            with open(path, "rb") as file:
                found[kind][str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"the run needs {shown(str(path))}: {error.strerror or error}") from error
    return found


def check_unchanged(config: RunConfig, recorded: Mapping[str, Any], run: Path) -> None:
    """Raise CheckpointError unless every file is, byte for byte, the one that the run in a directory began with.

    Bytes that have changed would give another run. And a run directory may come from a stranger: it has nothing of a
    file whose content the stranger does not know, wherever on this machine it says that its rows are.
    """
    for kind, path in _named(config):
        of_kind = recorded.get(kind)
        before = of_kind.get(str(path)) if isinstance(of_kind, Mapping) else None
        if before is None or digests(config)[kind][str(path)] != before:
            what = "is not recorded in run.json" if before is None else "has changed since the run began"
            raise CheckpointError(
                f"the content of {shown(str(path))}, which the run reads, {what}; put the file back as it was, or go "
                f"on with it as it is: agilerl resume {shlex.quote(str(run))} --allow-changes{_allow_code(config)}"
            )


def _allow_code(config: RunConfig) -> str:
    """Return what else the command needs: a run with code of its own is refused without, whichever file has changed."""
    return " --allow-code" if any(kind == "code" for kind, _ in _named(config)) else ""


def _named(config: RunConfig) -> Iterator[tuple[str, Path]]:
    environment = config.environment
    for datasets in (environment.dataset, environment.dataset_exam, environment.dataset_test):
        for dataset in datasets or ():
            if names_a_file(dataset.path):
                yield "data", Path(dataset.path).expanduser().absolute()
    for name in (environment.env_id or "", *(grader.name for grader in environment.graders or ())):
        path = file_of(name) if names_code(name) else None
        if path is not None:
            yield "code", path
