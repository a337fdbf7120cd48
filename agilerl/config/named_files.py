"""Files that a configuration names: where they are, and what they held when a run began: it resumes with the same."""

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agilerl.arguments import shown
from agilerl.bounds import check_file, memory_bytes
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.run import RunConfig
from agilerl.custom_code import file_of, names_code, not_allowed
from agilerl.errors import CheckpointError, ConfigError

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
    """Say whether a name, which has no folder, is that of a file that reasoning_gym brings along."""
    spec = find_spec("reasoning_gym")
    places = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return Path(name).name == name and any((Path(place) / "data" / name).is_file() for place in places)


def locate_within(environment: Any, folder: Path) -> None:
    """Make the paths of a manifest absolute, in place; a file beside it comes before one in the working directory.

    A manifest may come from a stranger, so it may not name any file of the machine. Code is beside the manifest alone.

    Raises:
        ConfigError: a file that is, its links followed, neither in the folder or below nor in the working directory
            or below.
    """

    def found(path: str, key: str) -> str:
        given = Path(path).expanduser()
        places = [folder / given, Path.cwd() / given]
        if not (names_a_file(path) or any(place.exists() for place in places)):
            return path
        target = next((place for place in places if place.exists()), places[0]).absolute()
        inside(target, path, key)
        return str(target)

    def found_param(path: str, key: str) -> str:
        if is_packaged(path):
            return path
        given = Path(os.path.expanduser(path))  # which keeps the home of an unknown user as it is
        target = next((place for place in (folder / given, Path.cwd() / given) if place.exists()), folder / given)
        inside(target, path, key)
        return str(target.absolute())

    def inside(target: Path | None, path: str, key: str) -> None:
        if target is not None and not any(target.resolve().is_relative_to(r.resolve()) for r in (folder, Path.cwd())):
            raise ConfigError(
                f"environment.{key}={shown(path)} leads out of the folder of the manifest and the working directory; "
                f"move the file there, or name it on the command line: environment.{key}=..."
            )

    def beside(path: str, key: str) -> str:
        target = (folder / Path(path).expanduser()).absolute()
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"environment.{key}: the code {shown(path)} is not in the folder of the manifest; move it there, or "
                "name it on the command line"
            )
        return str(target)

    _replace(environment, found)
    _replace_code(environment, beside)
    for owner, name, key in file_params(environment):
        owner[name] = found_param(owner[name], key)
    for text, key in other_params(environment):
        for root in (folder, Path.cwd()):
            inside(leads_to(text, root), text, key)


def locate_code(values: dict[str, Any], folder: Path | None = None) -> None:
    """Make the paths of a selection strategy's and of trackers' code absolute, in a manifest's sections.

    Raises ConfigError for code that a manifest in ``folder`` names outside of it.
    """

    def found(path: str, key: str) -> str:
        target = (Path.cwd() if folder is None else folder) / Path(path).expanduser()
        if folder is not None and not target.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key}: the code {shown(path)} is not in the folder of the manifest; move it there, or name it on the "
                "command line"
            )
        return str(target.absolute())

    strategy, training = values.get("selection_strategy"), values.get("training")
    if isinstance(strategy, dict):
        _replace_code_at(strategy, "name", "selection_strategy.name", found)
    if isinstance(training, dict):
        key, trackers = "training.trackers", training.get("trackers")
        if isinstance(trackers, str):
            _replace_code_at(training, "trackers", key, found)
        elif isinstance(trackers, list):
            training["trackers"] = [_located(name, key, found) for name in trackers]
        elif isinstance(trackers, dict):
            training["trackers"] = {_located(name, key, found): settings for name, settings in trackers.items()}


def locate_template(network: Any, folder: Path | None = None) -> None:
    """Make the path of a chat template absolute, in place; errors as of ``locate_code``."""
    path = network.get("chat_template_path") if isinstance(network, dict) else None
    if not isinstance(path, str) or not path.isprintable():
        return
    target = (Path.cwd() if folder is None else folder) / Path(path).expanduser()
    if folder is not None and not target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"network.chat_template_path={shown(path)} is not in the folder of the manifest; move it there, or name it "
            "on the command line"
        )
    network["chat_template_path"] = str(target.absolute())


def locate(environment: Any) -> None:
    """Make all other paths absolute, in place, so that they mean the same wherever a run is resumed."""
    _replace(environment, lambda path, key: str(Path(path).expanduser().absolute()) if names_a_file(path) else path)
    _replace_code(environment, lambda path, key: str(Path(path).expanduser().absolute()))
    for owner, name, _ in file_params(environment):
        if not is_packaged(owner[name]):
            owner[name] = str(Path(os.path.expanduser(owner[name])).absolute())


def file_params(environment: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the parameters of datasets that are files: what holds one, its name there, and its key in ``environment``.

    They are found wherever they stand: in a composite, or among the parameters of an environment's task.
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


def _replace(environment: Any, found: Callable[[str, str], str]) -> None:
    """Replace each path; other values are left for the checks of the settings."""
    if not isinstance(environment, dict):
        return
    for key in _KEYS:
        value = environment.get(key)
        if value is not None:
            made = [_replaced(entry, key, found) for entry in (value if isinstance(value, list) else [value])]
            environment[key] = made if isinstance(value, list) else made[0]


def _replace_code(environment: Any, found: Callable[[str, str], str]) -> None:
    """Replace the path in each ``path.py:name``."""
    if not isinstance(environment, dict):
        return
    graders = environment.get("graders")
    named = [(environment, "env_id", "env_id"), (environment, "agent", "agent")]
    if isinstance(graders, list):
        named += [(g, "name", f"graders.{n}.name") for n, g in enumerate(graders) if isinstance(g, dict)]
    for owner, name, key in named:
        _replace_code_at(owner, name, key, found)
    command = environment.get("agent")
    if isinstance(command, list):
        environment["agent"] = [
            found(part, "agent") if isinstance(part, str) and part.endswith(".py") and part.isprintable() else part
            for part in command
        ]


def _replace_code_at(owner: dict[str, Any], name: str, key: str, found: Callable[[str, str], str]) -> None:
    if name in owner:
        owner[name] = _located(owner[name], key, found)


def _located(value: Any, key: str, found: Callable[[str, str], str]) -> Any:
    """Return ``path.py:name`` with the path that was found; other values as they are."""
    path, colon, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if colon and path.endswith(".py") and path.isprintable():
        return f"{found(path, key)}:{attribute}"
    return value


def _replaced(entry: Any, key: str, found: Callable[[str, str], str]) -> Any:
    if isinstance(entry, dict):
        return {**entry, "path": _replaced(entry["path"], key, found)} if "path" in entry else entry
    # Values that are not names of files are left for the checks of the settings.
    return found(entry, key) if isinstance(entry, str) and entry and entry.isprintable() else entry


def digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the sha256 of each file that a configuration names, by its path: ``data``, and ``code`` that it runs.

    Raises CheckpointError if a file cannot be read.
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


def check_unchanged(
    config: RunConfig, recorded: Mapping[str, Any], run: Path, *, begun: RunConfig | None = None
) -> None:
    """Raise CheckpointError unless every file is, byte for byte, the one that the run in a directory began with.

    With ``begun``, the run's own settings, files that only the other ones name are the user's, and not checked.

    Bytes that have changed would give another run. And a run directory may come from a stranger: it has nothing of a
    file whose content the stranger does not know, wherever on this machine it says that its rows are.
    """
    own = None if begun is None else set(_named(begun))
    for kind, path in _named(config):
        if own is not None and (kind, path) not in own:
            continue
        of_kind = recorded.get(kind)
        before = of_kind.get(str(path)) if isinstance(of_kind, Mapping) else None
        if before is None or digests(config)[kind].get(str(path)) != before:
            what = "is not recorded in run.json" if before is None else "has changed since the run began"
            resumes = f"agilerl resume {shlex.quote(str(run))} --allow-changes{_allow_code(config)}"
            remedy = f"resume it all the same: {resumes}" if begun is None else "name another file on the command line"
            raise CheckpointError(
                f"the content of {shown(str(path))}, which the run reads, {what}; put the file back as it was, or "
                f"{remedy}"
            )


def _allow_code(config: RunConfig) -> str:
    """Return what else the command needs: a run with code of its own is refused without, whichever file has changed."""
    return " --allow-code" if any(kind == "code" for kind, _ in _named(config)) else ""


def _named(config: RunConfig) -> Iterator[tuple[str, Path]]:
    environment = config.environment
    if config.network.chat_template_path is not None:
        yield "data", Path(config.network.chat_template_path).expanduser().absolute()
    for datasets in (environment.dataset, environment.dataset_exam, environment.dataset_test):
        for dataset in datasets or ():
            if names_a_file(dataset.path):
                yield "data", Path(dataset.path).expanduser().absolute()
    for path in _files_of_params(environment):
        yield "data", path
    if config.sharing.teacher is not None:
        folder = Path(config.sharing.teacher)
        for name in ADAPTER_FILES:
            yield "data", (folder / "actor" if (folder / "actor").is_dir() else folder) / name
    for _, name in _named_code(config):
        code = file_of(name)
        if code is not None:
            yield "code", code
    if isinstance(environment.agent, list):
        yield from (("code", Path(part)) for part in environment.agent if part.endswith(".py"))


def check_allowed(config: RunConfig) -> None:
    """Raise ConfigError if settings name code: for a command without ``--allow-code``, before anything is loaded."""
    for where, name in _named_code(config):
        raise not_allowed(where, name)


def _named_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that name code, with what they name."""
    graders = {f"environment.graders.{n}.name": g.name for n, g in enumerate(config.environment.graders or ())}
    named = {"environment.env_id": config.environment.env_id or "", **graders}
    named["selection_strategy.name"] = config.selection_strategy.strategy
    trackers = [("training.trackers", name) for name in config.training.trackers]
    agent = config.environment.agent
    if agent is not None:
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
