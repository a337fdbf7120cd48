"""Files that a configuration names: where they are, and what they held when a run began: it resumes with the same."""

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import shown
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.run import RunConfig
from agilerl.config.training import TrainingConfig
from agilerl.errors import CheckpointError, ConfigError
from agilerl.safety.bounds import check_file, memory_bytes
from agilerl.safety.custom_code import file_of, given_source, names_code, not_allowed

NamedFile = tuple[str, Path]
"""``code`` or ``data``, and where it is."""

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Of files that hold rows."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FILE_PARAMS = {"spell_backward": ("data_file",)}
"""Parameters of reasoning_gym's datasets that are files which they read (found by giving each a file's name; a test
repeats it)."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of a PEFT folder."""

_KEYS = ("dataset", "dataset_exam", "dataset_test")
_FILE_PARAMS = frozenset(name for names in FILE_PARAMS.values() for name in names)


def names_a_file(source: str) -> bool:
    """Say whether a text means a file rather than a dataset of the hub."""
    path = Path(source).expanduser()
    return path.suffix.lower() in ENDINGS or os.path.exists(path) or HUB_NAME.fullmatch(source) is None


def is_packaged(name: str) -> bool:
    """Say whether a name, which has no folder, is that of a file that comes with reasoning_gym."""
    spec = find_spec("reasoning_gym")
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return Path(name).name == name and any((Path(folder) / "data" / name).is_file() for folder in folders)


def locate(values: Mapping[str, Any], folder: Path | None = None) -> None:
    """Make the paths in a manifest's sections absolute, in place, so that they mean the same wherever a run is resumed.

    With ``folder``, that of the manifest's file, a path is first looked for there, then in the working directory. Such
    a manifest may come from a stranger, so it may not name any file of the machine.

    Raises:
        ConfigError: with a folder, for rows that are, links followed, neither in the folder or below nor in the working
            directory or below, and for code or a template that is not in the folder or below.
    """
    names = ("environment", "network", "selection_strategy", "training")
    environment, network, strategy, training = (_section(values, name) for name in names)
    # Files of rows
    for key in _KEYS:
        value = environment.get(key)
        if value is not None:
            entries = value if isinstance(value, list) else [value]
            located = [_located_rows(entry, f"environment.{key}", folder) for entry in entries]
            environment[key] = located if isinstance(value, list) else located[0]
    # Parameters that name files
    for owner, name, key in file_params(environment):
        if not is_packaged(owner[name]):
            owner[name] = _absolute(os.path.expanduser(owner[name]), f"environment.{key}", folder)
    if folder is not None:
        for text, key in other_params(environment):
            for root in (folder, Path.cwd()):
                _check_inside(leads_to(text, root), text, f"environment.{key}", folder)
    # Code that settings name
    graders = environment.get("graders")
    coded = [(environment, name, f"environment.{name}") for name in ("env_id", "agent")]
    coded.append((strategy, "name", "selection_strategy.name"))
    for number, grader in enumerate(graders if isinstance(graders, list) else ()):
        if isinstance(grader, dict):
            coded.append((grader, "name", f"environment.graders.{number}.name"))
    for owner, name, key in coded:
        if name in owner:
            owner[name] = _located_code(owner[name], key, folder)
    if isinstance(command := environment.get("agent"), list):
        environment["agent"] = [
            _beside(part, "environment.agent", folder) if str(part).endswith(".py") and part.isprintable() else part
            for part in command
        ]
    trackers = training.get("trackers")
    if isinstance(trackers, str | list | dict):
        listed = [trackers] if isinstance(trackers, str) else trackers
        located = [_located_code(name, "training.trackers", folder) for name in listed]
        training["trackers"] = dict(zip(located, trackers.values())) if isinstance(trackers, dict) else located
    # The chat template
    template = network.get("chat_template_path")
    if isinstance(template, str) and template.isprintable():
        network["chat_template_path"] = _beside(template, "network.chat_template_path", folder)


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _located_rows(entry: Any, key: str, folder: Path | None) -> Any:
    """Return a dataset with the path that was found; values that name no file are left for the settings' checks."""
    if isinstance(entry, dict):
        return {**entry, "path": _located_rows(entry["path"], key, folder)} if "path" in entry else entry
    if not (isinstance(entry, str) and entry and entry.isprintable()):
        return entry
    path = Path(entry).expanduser()
    beside = folder is not None and (folder / path).exists()
    return _absolute(path, key, folder) if beside or names_a_file(entry) else entry


def _absolute(path: str | Path, key: str, folder: Path | None) -> str:
    roots = [*([] if folder is None else [folder]), Path.cwd()]
    target = next((root / path for root in roots if (root / path).exists()), roots[0] / path)
    _check_inside(target, str(path), key, folder)
    return str(target.absolute())


def _check_inside(target: Path | None, path: str, key: str, folder: Path | None) -> None:
    if target is None or folder is None:
        return
    # Resolved: a link in the folder may lead anywhere.
    if not any(target.resolve().is_relative_to(root.resolve()) for root in (folder, Path.cwd())):
        raise ConfigError(
            f"{key}={shown(path)} leads out of the folder of the manifest and the working directory; move the file "
            f"there, or name it on the command line: {key}=..."
        )


def _located_code(value: Any, key: str, folder: Path | None) -> Any:
    """Return ``path.py:name`` with the path that was found; other values as they are."""
    path, colon, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if colon and path.endswith(".py") and path.isprintable():
        return f"{_beside(path, key, folder)}:{attribute}"
    return value


def _beside(path: str, key: str, folder: Path | None) -> str:
    """Return the absolute path of what has to come with the manifest: code, and a template."""
    target = (Path.cwd() if folder is None else folder) / Path(path).expanduser()
    if folder is not None and not target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{key}: {shown(path)} is not in the folder of the manifest; move it there, or name it on the command line"
        )
    return str(target.absolute())


def file_params(environment: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the parameters of datasets that are files: what holds one, its name there, and its key in ``environment``.

    They are found wherever they are: in a composite, or among the parameters of an environment's task.
    """
    for owner, name, key in _params(environment):
        if name in _FILE_PARAMS and owner[name] and owner[name].isprintable():
            yield owner, name, key


def other_params(environment: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts among the parameters of an environment ``env_id``, any of which may be a file that it opens."""
    if isinstance(environment, dict) and environment.get("env_id"):
        yield from ((owner[name], key) for owner, name, key in _params(environment) if name not in _FILE_PARAMS)


def _params(environment: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield all texts among the parameters: the dict or list that holds one, its key or place there, the whole key."""
    waiting: list[tuple[Any, Any, str]] = []
    if isinstance(environment, dict) and "params" in environment:
        waiting.append((environment, "params", "params"))
    while waiting:
        owner, name, key = waiting.pop()
        value = owner[name]
        if isinstance(value, str):
            yield owner, name, key
        elif isinstance(value, dict | list):
            names: Iterable[Any] = value if isinstance(value, dict) else range(len(value))
            waiting += [(value, inner, f"{key}.{inner}") for inner in names]


def leads_to(text: str, root: Path) -> Path | None:
    """Return the place on this machine that a text may name, as seen from ``root``; None if it names none.

    That is a path that exists, one that begins with a folder that exists (the rest may be a pattern), or one that
    climbs with ``..``; also after ``file:``.
    """
    try:
        given = Path(text.rpartition("file:")[2]).expanduser()
        if given.is_absolute():
            return given if len(given.parts) > 1 and Path(*given.parts[:2]).exists() else None
        return root / given if given.name and (".." in given.parts or (root / given).exists()) else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, with a null byte, or an unknown user's home
        return None


def digests(files: Iterable[NamedFile]) -> dict[str, dict[str, str]]:
    """Return the sha256 of each of the files by its path: of ``data``, and of ``code`` that the run executes.

    Raises CheckpointError if a file cannot be read.
    """
    by_kind: dict[str, dict[str, str]] = {"code": {}, "data": {}}
    for kind, path in files:
        if path.exists() and not path.is_file():  # a folder or a pipe that a parameter names has no content to compare
            continue
        try:
            check_file(path, memory_bytes(), error=CheckpointError)
            with open(path, "rb") as file:
                by_kind[kind][str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"the run needs {shown(str(path))}: {error.strerror or error}") from error
    return by_kind


def given_digests(environment: EnvironmentConfig, strategy: str, training: TrainingConfig) -> dict[str, str]:
    """Return the sha256 of the source of each object that Python handed over, by its name, as far as it is known."""
    sources = {name: given_source(name) for _, name in _named_code(environment, strategy, training)}
    return {name: hashlib.sha256(source.encode()).hexdigest() for name, source in sources.items() if source}


def check_unchanged(
    files: Sequence[NamedFile], recorded: Mapping[str, Any], run: Path, *, begun: Collection[NamedFile] | None = None
) -> None:
    """Raise CheckpointError unless every file is, byte for byte, the one that the run in a directory began with.

    With ``begun``, the files of the run's own settings, all others are the user's, and not checked.

    Bytes that have changed would give another run. And a run directory may come from a stranger: it has nothing of a
    file whose content the stranger does not know, wherever on this machine it says that its rows are.
    """
    for kind, path in files:
        if begun is not None and (kind, path) not in begun:
            continue
        of_kind = recorded.get(kind)
        before = of_kind.get(str(path)) if isinstance(of_kind, Mapping) else None
        if before is None or digests([(kind, path)])[kind].get(str(path)) != before:
            what = "is not recorded in run.json" if before is None else "has changed since the run began"
            # A run with custom code is refused without --allow-code, whichever file has changed.
            allow_code = " --allow-code" if any(kind == "code" for kind, _ in files) else ""
            resumes = f"agilerl resume {shlex.quote(str(run))} --allow-changes{allow_code}"
            remedy = f"resume it anyway: {resumes}" if begun is None else "name another file on the command line"
            raise CheckpointError(
                f"the content of {shown(str(path))}, which the run reads, {what}; put the file back as it was, or "
                f"{remedy}"
            )


def named_files(config: RunConfig) -> list[NamedFile]:
    """Return the files that the settings of a run name."""
    environment, network, teacher = config.environment, config.network, config.teacher.adapter
    rows = chain.from_iterable(getattr(environment, key) or () for key in _KEYS)
    data = [] if network.chat_template_path is None else [network.chat_template_path]
    data += [dataset.path for dataset in rows if names_a_file(dataset.path)]
    files = [("data", Path(path).expanduser().absolute()) for path in data]
    files += [("data", path) for path in _files_of_params(environment)]
    if teacher is not None:
        # The teacher may be an agent of a checkpoint, which has its adapter in actor/.
        folder = Path(teacher, "actor") if Path(teacher, "actor").is_dir() else Path(teacher)
        files += [("data", folder / name) for name in ADAPTER_FILES]
    code = [file_of(name) for _, name in _named_code(environment, config.selection_strategy.strategy, config.training)]
    if isinstance(environment.agent, list):
        code += [Path(part) for part in environment.agent if part.endswith(".py")]
    return files + [("code", path) for path in code if path is not None]


def check_allowed(config: RunConfig) -> None:
    """Raise ConfigError if settings name code: for a command without ``--allow-code``, before anything is loaded."""
    for where, name in _named_code(config.environment, config.selection_strategy.strategy, config.training):
        raise not_allowed(where, name)


def _named_code(environment: EnvironmentConfig, strategy: str, training: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that name code, with what they name."""
    graders = {f"environment.graders.{n}.name": g.name for n, g in enumerate(environment.graders or ())}
    named = {"environment.env_id": environment.env_id or "", **graders, "selection_strategy.name": strategy}
    trackers = [("training.trackers", name) for name in training.trackers]
    if (agent := environment.agent) is not None:
        yield "environment.agent", agent if isinstance(agent, str) else shlex.join(agent)
    yield from ((where, name) for where, name in [*named.items(), *trackers] if names_code(name))


def _files_of_params(environment: EnvironmentConfig) -> Iterator[Path]:
    """Yield the files that parameters name; of an environment of another package also what else leads outside.

    What custom code does with its parameters is not checked: it may write to these paths.
    """
    values = {"params": environment.params}
    yield from (Path(owner[name]) for owner, name, _ in file_params(values) if not is_packaged(owner[name]))
    if environment.env_id and not names_code(environment.env_id):
        for text, _ in other_params({**values, "env_id": environment.env_id}):
            path = leads_to(text, Path.cwd())
            if path is not None and (path.is_file() or not path.resolve().is_relative_to(Path.cwd().resolve())):
                yield path.absolute()
