"""The keys ``graders`` and ``fitness_grader`` of a manifest as the graders of a task."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agilerl.addresses import OPENAI, check_key
from agilerl.arguments import nearest, shown
from agilerl.config.environment import EnvironmentConfig, GraderConfig
from agilerl.config.own_code import load_code, names_code
from agilerl.custom_code import contained
from agilerl.envs.core import Task
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.errors import ConfigError
from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.grader import Grader
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.rewards.library import LIBRARY, library_grader
from agilerl.rewards.waiting import ThreadedGrader

OWN = "task"
"""The name of the task's built-in reward in manifests."""


def graded(
    config: EnvironmentConfig, task: Task, *, allow_code: bool = False, typed_addresses: Iterable[str] = ()
) -> Task:
    """Return ``task`` with the manifest's graders, set up, or unchanged if there are none.

    ``allow_code`` allows graders that are functions and classes named by the manifest; ``typed_addresses`` are those
    that a judge's key may be sent to because the user gave them on the command line.

    Raises:
        ConfigError: a grader that is unknown, takes other parameters, or is not for manifests; duplicate graders; a
            fitness grader that is none of them.
    """
    if config.graders is None:
        return task
    named: dict[str, tuple[Grader, float]] = {}
    for number, entry in enumerate(config.graders):
        where, name = f"environment.graders.{number}", entry.called
        if name in named:
            raise ConfigError(f"{where}: two graders are called {name!r}; give one of them a different label")
        if entry.name == "judge":
            _check_judge(where, entry, typed_addresses)
        named[name] = (_grader(where, entry, task, allow_code), entry.weight)
    # Weights that evolve may start at 0; they need a fitness grader.
    if not any(weight for _, weight in named.values()) and config.fitness_grader is None:
        raise ConfigError("environment.graders: every weight is 0, so there is nothing to learn; raise one of them")
    made = GradedTask(task, CombinedGrader(named), _fitness(config.fitness_grader, named, task))
    made.prepare()
    return made


def uses_own_reward(graders: Sequence[GraderConfig] | None, fitness: str | None) -> bool:
    """Return whether the task's built-in reward is used."""
    return graders is None or fitness == OWN or any(entry.name == OWN for entry in graders)


def own_weights(config: EnvironmentConfig, given: Mapping[str, Any], genes: Iterable[str]) -> dict[str, Any]:
    """Return ``algorithm.reward_weights``: the given ones, and for genes without a start their grader's weight.

    Raises:
        ConfigError: a part that the reward does not have; a gene without a fitness grader.
    """
    weights = {entry.called: entry.weight for entry in config.graders or ()}
    evolving = [name.partition(".")[2] for name in genes if name.startswith("reward_weights.")]
    where = {f"algorithm.reward_weights.{name}": name for name in given}
    where |= {f"mutation.rl_hp_selection.reward_weights.{name}": name for name in evolving}
    for key, name in where.items():
        if not weights:
            raise ConfigError(f"{key}: the reward has no parts; list them in environment.graders")
        if name not in weights:
            raise ConfigError(f"{key}: environment.graders has no {shown(name)}; {nearest(str(name), weights)}")
    if evolving and config.fitness_grader is None:
        raise ConfigError(
            f"mutation.rl_hp_selection.reward_weights.{evolving[0]}: a weight that evolves needs "
            "environment.fitness_grader, which does not change: without one, agents win by weighting what is easy; "
            f"use one of {', '.join(dict.fromkeys([OWN, *weights]))}"
        )
    return {**{name: weights[name] for name in evolving}, **given}


def _fitness(name: str | None, named: dict[str, tuple[Grader, float]], task: Task) -> Grader | None:
    if name is None:
        return None
    if name in named:
        return named[name][0]
    if name == OWN:
        return TaskGrader(task)
    raise ConfigError(f"environment.fitness_grader={shown(name)} is unknown; {nearest(name, [OWN, *named])}")


def _grader(where: str, entry: GraderConfig, task: Task, allow_code: bool) -> Grader:
    if entry.name == OWN:
        if entry.params:
            raise ConfigError(f"{where}: the task's built-in reward has no parameters, found {shown(entry.params)}")
        return TaskGrader(task)
    if names_code(entry.name):
        found = load_code(f"{where}.name", entry.name, allowed=allow_code)
        if entry.isolate:
            return _isolated(where, entry, found)
        own = _own(where, entry, found)
        return own if entry.workers is None else ThreadedGrader(own, workers=entry.workers, name=entry.called)
    if entry.isolate:
        raise ConfigError(f"{where}.isolate is for custom functions, found {shown(entry.name)}; remove it")
    if entry.name not in LIBRARY:
        raise ConfigError(f"{where}.name={shown(entry.name)} is unknown; {nearest(entry.name, [OWN, *LIBRARY])}")
    try:
        return library_grader(entry.name, entry.params)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _isolated(where: str, entry: GraderConfig, found: Any) -> Grader:
    """Return a function as a grader in a separate process."""
    if isinstance(found, type) or entry.params:
        raise ConfigError(
            f"{where}.isolate is for functions without params, found {shown(entry.name)}; write a function that "
            "contains them"
        )
    return IsolatedGrader(entry.name, timeout=entry.timeout, workers=entry.workers or 1, name=entry.called)


def _own(where: str, entry: GraderConfig, found: Any) -> Grader:
    """Return a custom grader: an instance of a class, or a function with its parameters filled in."""
    if not isinstance(found, type):
        return partial(found, **entry.params) if entry.params else found
    try:
        with contained():
            return found(**entry.params)  # type: ignore[no-any-return]
    except Exception as error:  # custom code may raise anything; report its reason
        raise ConfigError(f"{where}: {entry.called} cannot be made: {type(error).__name__}: {error}") from error


def _check_judge(where: str, entry: GraderConfig, typed: Iterable[str]) -> None:
    """Raise ConfigError if an untrusted manifest could leak a secret or write outside the working directory."""
    params = entry.params
    variable, address = params.get("api_key_env", "OPENAI_API_KEY"), params.get("base_url", OPENAI)
    # Even without an address, a manifest could choose a key that must not be sent to OpenAI.
    if isinstance(variable, str) and ("base_url" in params or os.environ.get(variable)):
        check_key(f"{where}.params.base_url", variable, str(address), typed, without="set api_key_env to null")
    cache = params.get("cache")
    if cache is None:
        return
    if not isinstance(cache, str) or not Path(cache).resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(f"{where}: expected a cache below the working directory, found {shown(cache)}")
    if not cache.endswith(".jsonl"):  # replies are appended to an existing file
        raise ConfigError(f"{where}: expected a cache named *.jsonl, found {shown(cache)}")
