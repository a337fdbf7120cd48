"""A configuration resolved: every hyperparameter and option with its default, and back to what was set."""

import re
from collections.abc import Mapping
from typing import Any

from agilerl.algorithms import ALGORITHMS, GRPO, LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.config.base_model import SharedOptions, split_options
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError
from agilerl.runs.directory import run_date
from agilerl.training.graders import own_weights
from agilerl.validation import nearest, shown, validated

__all__ = [
    "algorithm_class",
    "algorithm_classes",
    "document",
    "given",
    "hyperparameters",
    "recorded",
    "shared_options",
]

_CHOICE = re.compile(r"choice\[(.*)\]")


def algorithm_class(config: RunConfig) -> type[LLMAlgorithm]:
    """Return the class that ``algorithm.name`` stands for, of several the first."""
    return algorithm_classes(config)[0]


def algorithm_classes(config: RunConfig) -> list[type[LLMAlgorithm]]:
    """Return the class that ``algorithm.name`` stands for, or those of ``choice[GRPO, CISPO]``: a gene.

    Raises ConfigError for an unknown name, and for a choice among algorithms that cannot turn into each other.
    """
    written = config.algorithm["name"]
    choice = _CHOICE.fullmatch(written.strip())
    names = [written] if choice is None else [name.strip() for name in choice[1].split(",")]
    family = GRPO.family()
    for name in names:
        if name not in ALGORITHMS:
            raise ConfigError(f"algorithm.name={shown(name)} is unknown; {nearest(name, ALGORITHMS)}")
        if choice is not None and name not in family:
            raise ConfigError(
                f"algorithm.name={shown(written)}: an agent cannot become {name} or cease to be it; choose among "
                f"{', '.join(family)}"
            )
    if choice is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ConfigError(f"algorithm.name={shown(written)}: a choice is among at least two different algorithms")
    return [ALGORITHMS[name] for name in names]


def hyperparameters(config: RunConfig, algorithm: type[LLMAlgorithm] | None = None) -> AlgorithmConfig:
    """Return the hyperparameters of the agents, checked; the run's seed is theirs unless they have their own.

    Where ``algorithm.name`` is a choice, those of ``algorithm``, or of the first. Raises ConfigError for an unknown
    one, a value out of range, and two different limits of the context.
    """
    model = (algorithm or algorithm_class(config)).Config
    values = {key: value for key, value in split_options(config.algorithm)[0].items() if key != "name"}
    for key in values:
        if key not in model.model_fields and key not in GRPO.Config.model_fields:  # of which the others say why not
            known = [*model.model_fields, *SharedOptions.model_fields]
            raise ConfigError(f"unknown key {shown(f'algorithm.{key}')}; {nearest(key, known)}")
    values.setdefault("seed", config.training.seed)
    limit = config.network.max_context_length
    if limit is not None and values.setdefault("max_model_len", limit) != limit:
        raise ConfigError(
            f"network.max_context_length={limit} and algorithm.max_model_len={shown(values['max_model_len'])} mean the "
            "same and disagree; give one of them"
        )
    given = values.get("reward_weights", {})
    if "reward_weights" in model.model_fields and isinstance(given, Mapping):
        weights = own_weights(config.environment, given, config.mutation.rl_hp_selection)
        values |= {"reward_weights": weights} if weights else {}
    return validated(model, values, "algorithm")


def shared_options(config: RunConfig) -> SharedOptions:
    """Return the options of the base: those under ``algorithm``, and those of ``network`` that mean the same.

    Raises ConfigError for a value out of range, and where the two sections disagree.
    """
    options = validated(SharedOptions, split_options(config.algorithm)[1], "algorithm")
    same = {"quantization": "quantization_config", "attn_implementation": "attn_implementation"}
    for name, option in same.items():
        value, present = getattr(config.network, name), getattr(options, option)
        if value is not None and present not in (None, value):
            raise ConfigError(
                f"network.{name}={shown(value)} and algorithm.{option}={shown(present)} mean the same and disagree; "
                "give one of them"
            )
        if value is not None:
            options = options.model_copy(update={option: value})
    return options


def document(config: RunConfig) -> dict[str, Any]:
    """Return the resolved manifest, defaults included, as plain data; it gives the same run again.

    What it does not say is on how many processes: any number goes on with the run.
    """
    made = hyperparameters(config)
    values = made.model_dump(mode="json")
    # The defaults of one algorithm are not those of another: where there are several, they stay unsaid. So they do
    # where a setting takes the place of others: a default that is written out would contradict it.
    if len(algorithm_classes(config)) > 1 or not _is_valid(type(made), values):
        values = made.model_dump(mode="json", exclude_unset=True)
    options = validated(SharedOptions, split_options(config.algorithm)[1], "algorithm").model_dump(mode="json")
    resolved = config.model_dump(mode="json", exclude={"distributed"})
    resolved["selection_strategy"]["tournament_size"] = config.tournament_size
    return {**resolved, "algorithm": {"name": config.algorithm["name"], **values, **options}}


def given(config: RunConfig) -> dict[str, Any]:
    """Return what was set, as plain data, and none of the defaults: one that is written out can mean something else."""
    rest, options = split_options(config.algorithm)
    values = hyperparameters(config).model_dump(mode="json", include=set(rest))
    shared = validated(SharedOptions, options, "algorithm").model_dump(mode="json", exclude_unset=True)
    algorithm = {"name": config.algorithm["name"], **values, **shared}
    return {**config.model_dump(mode="json", exclude_unset=True, exclude={"distributed"}), "algorithm": algorithm}


def recorded(info: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run from its ``run.json``, what was set told from what had its default, and dated.

    A default that is another one by now keeps the value that is recorded. Of a run that did not write what was set yet,
    all of it was. Raises ConfigError as :meth:`RunConfig.from_dict` does.
    """
    return _with_defaults_of(info["config"], info.get("given")).dated(run_date(info))


def _with_defaults_of(whole: Mapping[str, Any], was_set: Mapping[str, Any] | None) -> RunConfig:
    if was_set is None:
        return RunConfig.from_dict(whole)
    config = RunConfig.from_dict(was_set)
    if (now := document(config)) == whole:
        return config
    config = RunConfig.from_dict(_with_differences(was_set, now, whole))
    return config if document(config) == whole else RunConfig.from_dict(whole)


def _with_differences(values: Mapping[str, Any], now: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was set with those entries of the ``whole`` that have another value ``now``, or none."""
    found = {name: value for name, value in values.items() if name in whole or name not in now}
    for name, value in whole.items():
        if name in now and now[name] == value:
            continue
        inner, before = found.get(name, {}), now.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and isinstance(inner, Mapping):
            found[name] = _with_differences(inner, before, value)
        else:
            found[name] = value
    return found


def _is_valid(model: type[AlgorithmConfig], values: Mapping[str, Any]) -> bool:
    try:
        validated(model, values)
    except ConfigError:
        return False
    return True
