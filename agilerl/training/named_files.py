"""Files that a run reads besides its directory: what they held when it began, so that it goes on with the same."""

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agilerl.bounds import check_file, memory_bytes
from agilerl.envs.sources import names_a_file
from agilerl.envs.upstream import is_packaged
from agilerl.errors import CheckpointError
from agilerl.training.config import EnvironmentConfig, RunConfig
from agilerl.training.dataset_paths import file_params, leads_to, other_params
from agilerl.training.own_code import file_of, names_code
from agilerl.validation import shown

__all__ = ["check_unchanged", "digests"]


def digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the sha256 of each file that a configuration names, by its path: ``data``, and ``code`` that it runs.

    Raises CheckpointError where a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {"code": {}, "data": {}}
    for kind, path in _named(config):
        if path.exists() and not path.is_file():  # a folder or a pipe that a parameter names has no content to compare
            continue
        try:
            check_file(path, memory_bytes(), error=CheckpointError)
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
        if before is None or digests(config)[kind].get(str(path)) != before:
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
    for path in _params(environment):
        yield "data", path
    for name in (environment.env_id or "", *(grader.name for grader in environment.graders or ())):
        code = file_of(name) if names_code(name) else None
        if code is not None:
            yield "code", code


def _params(environment: EnvironmentConfig) -> Iterator[Path]:
    """Yield the files that parameters name; of an environment of another package also what else leads outside.

    What code of one's own makes of its parameters is its own business: it may well write there.
    """
    values = {"params": environment.params}
    yield from (Path(owner[name]) for owner, name, _ in file_params(values) if not is_packaged(owner[name]))
    if environment.env_id and not names_code(environment.env_id):
        for text, _ in other_params({**values, "env_id": environment.env_id}):
            path = leads_to(text, Path.cwd())
            if path is not None and (path.is_file() or not path.resolve().is_relative_to(Path.cwd().resolve())):
                yield path.absolute()
