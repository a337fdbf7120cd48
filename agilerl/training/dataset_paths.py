"""Where the files are that the section ``environment`` names: beside the manifest, or in the working directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agilerl.envs.sources import names_a_file
from agilerl.errors import ConfigError
from agilerl.validation import shown

__all__ = ["locate", "locate_within"]

_KEYS = ("dataset", "dataset_exam", "dataset_test")


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
        if not any(target.resolve().is_relative_to(root.resolve()) for root in (folder, Path.cwd())):
            raise ConfigError(
                f"environment.{key}={shown(path)} leads out of the folder of the manifest and the working directory; "
                f"move the file there, or name it on the command line: environment.{key}=..."
            )
        return str(target)

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


def locate(environment: Any) -> None:
    """Make all other paths absolute, in place, so that they mean the same wherever a run is resumed."""
    _replace(environment, lambda path, key: str(Path(path).expanduser().absolute()) if names_a_file(path) else path)
    _replace_code(environment, lambda path, key: str(Path(path).expanduser().absolute()))


def _replace(environment: Any, found: Callable[[str, str], str]) -> None:
    """Replace each path; what is no path is left for the checks of the settings."""
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
    named = [(environment, "env_id", "env_id")]
    if isinstance(graders, list):
        named += [(g, "name", f"graders.{n}.name") for n, g in enumerate(graders) if isinstance(g, dict)]
    for owner, name, key in named:
        path, colon, attribute = str(owner.get(name)).rpartition(":")
        if colon and path.endswith(".py") and path.isprintable():
            owner[name] = f"{found(path, key)}:{attribute}"


def _replaced(entry: Any, key: str, found: Callable[[str, str], str]) -> Any:
    if isinstance(entry, dict):
        return {**entry, "path": _replaced(entry["path"], key, found)} if "path" in entry else entry
    # What is no name of a file is left for the checks of the settings.
    return found(entry, key) if isinstance(entry, str) and entry and entry.isprintable() else entry
