"""The manifest: read from a file, overridden, checked."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from agilerl import hooks
from agilerl.checks.arguments import checked, shown
from agilerl.config.named_files import locate
from agilerl.config.plain_yaml import parse_yaml
from agilerl.config.run import RunConfig, unknown_section
from agilerl.errors import ConfigError
from agilerl.safety.addresses import addresses_in
from agilerl.safety.bounds import check_file
from agilerl.safety.custom_code import names_code

Override = str | tuple[str, Any]
_MANIFEST_BYTES = 50_000
LEARNS_FROM = {"SFT": "sft", "DPO": "preference", "KTO": "unpaired"}
"""``environment.env_type`` of the algorithms that learn from data."""

_OF_DATASETS = ("dataset", "dataset_exam", "dataset_test", "columns")
_REPLACED = {
    "environment.task": ("params", *_OF_DATASETS),
    "environment.env_id": ("task", "params", "curriculum", "reward", *_OF_DATASETS),
    "environment.dataset": ("task", "params", "curriculum", *_OF_DATASETS[1:]),
}
"""What an override on the command line takes out of the file: it belongs to what the file had in that place."""


@checked
def load_manifest(
    path: Path | None = None, overrides: Sequence[Override] = (), replay: Path | None = None
) -> RunConfig:
    """Read a manifest (None: the embedded default), apply overrides and check everything.

    An override is a text ``key.path=value``, whose value is YAML, or a pair of the key and a value as it is.

    ``replay`` is a schedule that ``agilerl schedule`` wrote: its content becomes ``training.replay``, and the run one
    of a single agent that nothing selects and whose genes do not evolve.

    Raises ConfigError for a file that is missing, too large, empty or no YAML mapping, and for every wrong setting.
    """
    values = hooks.translate(_read(path))
    if path is not None:
        locate(values, path.parent)
    if replay is not None:
        _put_replay(values, replay)
    # Only the embedded default is ours to adapt; a file of the user means what it says.
    if path is None:
        _suit_learner(values, overrides)
    typed = _override(values, overrides)
    config = _config_of(values).typed_with(typed)
    config._replaced = _replaced(overrides)
    return config


def _replaced(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Return a sentence for each override that a later one of the same key, or of its section, replaces."""
    sentences = []
    for index, (keys, value) in enumerate(changed := [_split(override) for override in overrides]):
        later = next((key for key, other in changed[index + 1 :] if keys[: len(key)] == key and other != value), None)
        if later is not None:
            sentences.append(f"{'.'.join(keys)}: replaced by {'.'.join(later)}, which is given later")
    return tuple(sentences)


def _suit_learner(values: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Drop the embedded default's settings of GRPO if an override names an algorithm that learns from data."""
    named = [value for keys, value in map(_split, overrides) if keys == ["algorithm", "name"]]
    if named and (env_type := LEARNS_FROM.get(str(named[-1]))):
        values["algorithm"] = {}
        values["environment"]["env_type"] = env_type


@checked
def config_of_run(document: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a run that has begun, from its ``run.json``, with ``key.path=value`` overrides.

    Raises ConfigError for every wrong setting.
    """
    values = copy.deepcopy(dict(document))
    typed = _override(values, overrides)
    locate(values)
    # Not _config_of: what a new run is refused for, one that has begun keeps.
    return RunConfig.from_dict(values).typed_with(typed)


def _override(values: dict[str, Any], overrides: Sequence[Override]) -> tuple[str, ...]:
    """Put overrides into a manifest; return the addresses among the values."""
    changed = [_split(override) for override in overrides]
    for sentence in (text for override in overrides for text in _renamed(_pair(override)[0])[1]):
        warnings.warn(sentence, stacklevel=4)
    environment = values.get("environment")
    if isinstance(environment, dict):
        for name in (name for keys, _ in changed for name in _REPLACED.get(".".join(keys), ())):
            environment.pop(name, None)
    # After all that new values replace: their order on the command line does not matter.
    for keys, value in changed:
        _put(values, keys, value)
    # Its address may have no scheme, and would not be found among the others.
    cluster = [str(value) for keys, value in changed if keys == ["distributed", "address"]]
    return (*(address for _, value in changed for address in addresses_in(value)), *cluster)


@checked
def config_of(manifest: Mapping[str, Any], overrides: Sequence[Override] = ()) -> RunConfig:
    """Return the configuration of a manifest in memory; files that it names are relative to the working directory.

    Raises ConfigError for every wrong setting.
    """
    # A copy, which the overrides below may change.
    values = hooks.translate(manifest)
    _override(values, overrides)
    return _config_of(values)


def _config_of(values: dict[str, Any]) -> RunConfig:
    _set_both_rates(values)
    locate(values)
    config = RunConfig.from_dict(values)
    _refuse_meaningless(config)
    return config


def _set_both_rates(values: dict[str, Any]) -> None:
    """Let ``lr`` stand for both learning rates of PPO, as a hyperparameter and as a gene."""
    algorithm, mutation = values.get("algorithm"), values.get("mutation")
    if not isinstance(algorithm, dict) or algorithm.get("name") not in ("PPO", "LLMPPO"):
        return
    for section in (algorithm, mutation.get("rl_hp_selection") if isinstance(mutation, dict) else None):
        if isinstance(section, dict) and "lr" in section:
            rate = section.pop("lr")
            # What is given by its own name wins.
            for name in ("lr_actor", "lr_critic"):
                section.setdefault(name, rate)


def _refuse_meaningless(config: RunConfig) -> None:
    """Raise ConfigError for settings that change nothing, or cannot be meant.

    Only of a run that is about to begin: one that has begun with them is resumed as it is.
    """
    for number, grader in enumerate(config.environment.graders or ()):
        where, is_code = f"environment.graders.{number}", names_code(grader.name)
        if grader.isolate and not is_code:
            raise ConfigError(f"{where}.isolate is for custom functions, found {shown(grader.name)}; remove it")
        if grader.workers is not None and not is_code:
            raise ConfigError(f"{where}.workers is for custom functions, found {shown(grader.name)}; give it in params")
        if grader.is_set("timeout") and not grader.isolate:
            raise ConfigError(
                f"{where}.timeout={grader.timeout:g} is the limit of an isolated grader, found isolate=false; "
                + ("set isolate: true, or leave timeout out" if is_code else "give it in params, if the grader has one")
            )
    selection = config.selection_strategy
    for name in ("tournament_size", "elitism"):
        if selection.is_set(name) and selection.strategy != "tournament":
            raise ConfigError(f"selection_strategy.{name} is a setting of name: tournament, found {selection.strategy}")
    mutation = config.mutation
    evolving, moved = len(mutation.rl_hp_selection), mutation.genes_per_mutation
    if 0 < evolving < moved:
        raise ConfigError(f"mutation.genes_per_mutation={moved} is more than rl_hp_selection has, {evolving}; lower it")
    # Numbers alone: other types are for the checks of the algorithm, which come later.
    longest, limit = config.algorithm.get("max_output_tokens"), config.algorithm.get("max_model_len")
    if isinstance(longest, int) and isinstance(limit, int) and longest > limit:
        raise ConfigError(
            f"algorithm.max_output_tokens={longest} is above algorithm.max_model_len={limit}, prompt included"
        )


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        text = (resources.files("agilerl.config") / "default.yaml").read_text(encoding="utf-8")
        return cast("dict[str, Any]", parse_yaml(text, "the embedded default"))
    name = f"the manifest {shown(str(path))}"
    values = parse_yaml(_text(path, name), name)
    if values is None:
        raise ConfigError(
            f"{name} is empty: expected sections of settings; without a manifest the embedded default is run, and "
            "{} stands for the defaults of every setting"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a mapping of sections, found {shown(values)}")
    return values


def _put_replay(values: dict[str, Any], path: Path) -> None:
    name = f"the schedule {shown(str(path))}"
    schedule = parse_yaml(_text(path, name), name)
    if not isinstance(schedule, dict) or "genes" not in schedule:
        raise ConfigError(f"{name}: expected the output of `agilerl schedule RUN`, with genes, found {shown(schedule)}")
    training = values.get("training")
    values["training"] = {**(training if isinstance(training, dict) else {}), "pop_size": 1, "replay": schedule}
    values["selection_strategy"] = {"name": "none", "candidates": 3}
    values.pop("mutation", None)


def _text(path: Path, name: str) -> str:
    try:
        if not path.exists():
            raise ConfigError(f"expected a YAML file or key.path=value, found nothing at {shown(str(path))}")
        check_file(path, _MANIFEST_BYTES)
        # Editors on Windows begin a file with a byte order mark.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: it is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error


def is_set(key: str, overrides: Sequence[str]) -> bool:
    """Return whether an override sets ``section.key``, alone or with its section."""
    section, _, name = key.partition(".")
    return any(
        keys == [section, name] or (keys == [section] and isinstance(value, Mapping) and name in value)
        for keys, value in map(_split, overrides)
    )


def _split(override: Override) -> tuple[list[str], Any]:
    key, value = _pair(override)
    if not all(key.strip().split(".")):
        raise ConfigError(f"expected key.path=value, found {shown(override)}")
    return _renamed(key)[0], value


def _pair(override: Override) -> tuple[str, Any]:
    if not isinstance(override, str):
        return override
    key, separator, text = override.partition("=")
    return (key, parse_yaml(text, f"the value of {shown(key)}")) if separator else ("", None)


def _renamed(key: str) -> tuple[list[str], list[str]]:
    """Return the path of a key under its name of today, with a sentence if it had another one."""
    written, today = key.strip().split("."), list[str]()
    inner: Any = ""
    for name in reversed(written):
        inner = {name: inner}
    inner, sentences = hooks.rename(inner)
    while inner:
        ((name, inner),) = inner.items()
        today.append(name)
    # What has no meaning here stays, and is answered with all settings.
    return (today, sentences) if today else (written, [])


def key_of(override: str) -> str:
    """Return the key of ``key.path=value`` under its name of today."""
    return ".".join(_renamed(override.partition("=")[0])[0])


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    if keys[0] not in RunConfig.model_fields:
        raise ConfigError(unknown_section(".".join(keys)))
    for depth, key in enumerate(keys[:-1], 1):
        # A section without content is None in YAML.
        if values.get(key) is None:
            values[key] = {}
        if not isinstance(values[key], dict):
            raise ConfigError(
                f"{'.'.join(keys[:depth])} holds {shown(values[key])}, so it has no key {shown(keys[depth])}"
            )
        values = values[key]
    values[keys[-1]] = copy.deepcopy(value)  # which is the caller's
