"""Which adapter an environment needs, and environments by name."""

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium

from agilerl.arguments import Count, Name, checked
from agilerl.envs.adapters.gem import GemEnv, make_gem
from agilerl.envs.adapters.gymnasium_text import GymnasiumText, without_checks
from agilerl.envs.adapters.openenv import OpenEnv, make_openenv
from agilerl.envs.adapters.plain import PlainEnv
from agilerl.envs.adapters.textarena import TextArenaEnv, make_textarena
from agilerl.envs.text_env import TextEnv
from agilerl.errors import ConfigError

_FOREIGN: dict[str, Callable[[Any, int | None], TextEnv]] = {
    "gem": GemEnv,
    "textarena": TextArenaEnv,
    "openenv": OpenEnv,
}
"""Adapters by the package that an environment's class descends from."""
_MAKERS: dict[str, tuple[str, Callable[..., TextEnv]]] = {
    "gem": ("gem-llm", make_gem),
    "textarena": ("textarena", make_textarena),
    "openenv": ("openenv", make_openenv),
}
"""By prefix: the package's name on PyPI, and what makes one of its environments."""


@checked
def as_text_env(env: Any, max_turns: Count | None = None) -> TextEnv:
    """Return ``env`` as a TextEnv: itself if it is one, else in a thin adapter for its kind.

    Kinds: gymnasium environments with ``Text`` spaces, also wrapped by ``gymnasium.make``; GEM environments;
    single-player textarena games; openenv environments and clients; and any object with ``max_turns``,
    ``reset(seed=...)`` and ``step(action)``. ``max_turns`` overrides the environment's own limit.

    Raises:
        ConfigError: it is none of these, its spaces are not text, or no ``max_turns`` is known.
    """
    if isinstance(env, gymnasium.Env):
        env = without_checks(env)
        if isinstance(env, TextEnv) and max_turns in (None, env.max_turns):
            return env
        return GymnasiumText(env, max_turns)
    packages = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    for package, adapter in _FOREIGN.items():
        if package in packages:
            return adapter(env, max_turns)
    return PlainEnv(env, max_turns)


@checked
def make_env(name: Name, /, **settings: Any) -> TextEnv:
    """Return a new environment by name.

    ``agilerl/GuessTheNumber-v0`` (any id of gymnasium), ``gem:game:Mastermind-v0-easy``,
    ``textarena:GuessTheNumber-v0``, ``openenv:http://127.0.0.1:8000``, or ``module:Class`` for a custom one, whose
    module is imported. ``settings`` are keyword arguments of its constructor.

    Raises:
        ConfigError: the name is unknown, its package is not installed, or it refuses the settings.
    """
    prefix, _, rest = name.partition(":")
    try:
        if prefix in _MAKERS and rest:
            return _MAKERS[prefix][1](rest, **settings)
        if rest:
            return as_text_env(_named(prefix, rest)(**settings))
        return as_text_env(gymnasium.make(name, **settings))
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if prefix in _MAKERS and error.name == prefix:
            raise ConfigError(
                f"{name} needs the package {_MAKERS[prefix][0]}; see docs/environments.md for how to install it"
            ) from error
        raise ConfigError(f"{name} cannot be imported: {error}") from error
    except Exception as error:  # a third-party constructor may raise anything; report its reason
        given = ", ".join(f"{k}={v!r}" for k, v in settings.items()) or "no settings"
        raise ConfigError(f"{name} cannot be made with {given}: {type(error).__name__}: {error}") from error


def _named(module: str, name: str) -> Callable[..., Any]:
    found = importlib.import_module(module)
    for part in name.split("."):
        if part not in vars(found):
            raise ConfigError(f"expected {name} in the module {module}, found {_public(found)}")
        found = vars(found)[part]
    if not callable(found):
        raise ConfigError(f"expected {module}:{name} to be a class or a function that returns an environment")
    return found


def _public(module: Any) -> str:
    names = [key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")]
    return ", ".join(names[:12]) or "no classes"
