"""Adapters from other libraries' environments to TextEnv: which one an environment needs, and environments by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from agilerl.checks.arguments import Count, Name, checked
from agilerl.envs.adapters.base import Adapter, AnyText, GymnasiumText, PlainEnv
from agilerl.envs.adapters.openenv import OpenEnv, make_openenv
from agilerl.envs.text_env import Begun, StepResult, TextEnv
from agilerl.errors import AgileRLError, ConfigError
from agilerl.gone import instead
from agilerl.safety.custom_code import contained, load_code, names_code
from agilerl.streams import sealed

__all__ = ["Adapter", "AnyText", "as_text_env", "make_env"]


class GemEnv(Adapter):
    """A GEM environment, without its observation wrappers: the transcript already holds the history.

    What GEM puts into ``info["suffix"]`` (the board, what to answer) is part of the observation. Rewards are those of
    GEM; a malformed answer earns -0.1 in most of its games. Seeds are taken modulo 2 ** 32.
    """

    action_form = "\\boxed{{}}"
    draws_globally = True

    def begin(self, seed: int) -> Begun:
        """Return the first observation with its suffix."""
        # GEM hands it to numpy's global generator, which takes 32 bits.
        observation, info = self.inner.reset(seed=seed % 2**32)
        return _add_suffix(observation, info), info

    def act(self, action: str) -> StepResult:
        """Return what the game answers, with its suffix."""
        observation, reward, terminated, truncated, info = self.inner.step(action)
        if not (terminated or truncated):
            # The suffix asks for the next action, of which a finished game has none.
            observation = _add_suffix(observation, info)
        return observation, reward, terminated, truncated, info


_COMPARING = ("gem.envs.game_env", "gem.envs.qa_env")
"""GEM modules whose environments only compare a completion's text and never run it."""
_INSTEAD = {
    "gem.envs.reasoning_gym": "take environment.task=reasoning_gym:{rest}",
    "gem.envs.math_env": "pass its problems as a dataset with the grader accuracy",
    "gem.envs.code_env": "pass its problems as a dataset with the grader sandbox",
}


def make_gem(name: str, **settings: Any) -> TextEnv:
    """Return the GEM environment registered as ``name``, e.g. "game:GuessTheNumber-v0-easy".

    Raises ConfigError for one that evaluates completions in this process (code, mathematics, its reasoning_gym,
    terminals).
    """
    import gem
    import gem.envs
    from gem.envs.registration import ENV_REGISTRY

    made_by = ENV_REGISTRY[name].entry_point if name in ENV_REGISTRY else ""
    module = made_by.partition(":")[0] if isinstance(made_by, str) else str(made_by.__module__)
    # A name whose code is not in gem was registered by the user, who trusts it.
    if module.startswith("gem.") and not module.startswith(_COMPARING):
        instead = _INSTEAD.get(module, "run it in a container, behind an openenv server")
        instead = instead.format(rest=name.partition(":")[2])
        raise ConfigError(
            f"gem:{name} evaluates completions in the training process, where they could run as code; {instead}; "
            f"or, if that is intended, pass the environment itself in Python: gem.make({name!r})"
        )
    with sealed(0):  # some constructors draw random numbers
        return GemEnv(gem.make(name, **settings))


def _add_suffix(observation: str, info: dict[str, Any]) -> str:
    suffix = info.get("suffix", "")
    return f"{observation.rstrip()}\n{suffix}" if suffix else observation


class TextArenaEnv(Adapter):
    """A single-player textarena game.

    Its observation wrappers, which repeat the whole history each time, are dropped: an observation is what the game has
    said since the last action. Its action wrappers stay. A game pays when it is over; most games end at the second
    invalid move in a row. ``info`` of the last step is that of textarena.
    """

    action_form = "[{}]"
    draws_globally = True

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``; raises ConfigError if the game does not declare its number of turns."""
        from textarena import Wrapper

        core = inner
        while isinstance(core, Wrapper):
            core = core.env
        self._core = core
        # The game itself, so that messages name its class; its action wrappers are still called.
        super().__init__(core, max_turns if max_turns is not None else getattr(core, "max_turns", None))
        self.inner = inner

    def begin(self, seed: int) -> Begun:
        """Return the game's prompt."""
        try:
            self.inner.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ConfigError(
                f"expected a single-player textarena game, but {type(self._core).__name__} says: {error}"
            ) from error
        return self._heard(), {}

    def act(self, action: str) -> StepResult:
        """Return what the game has said since."""
        done, info = self.inner.step(action=action)
        heard = self._heard()
        if not done:
            return heard, 0.0, False, False, dict(info)
        # By player. This close() releases nothing: it returns what each has earned, and why.
        rewards, about = self._core.close()
        return heard, float(rewards[0]), True, False, dict(about[0])

    def close(self) -> None:
        """Nothing to release: textarena's ``close`` only reads the rewards."""

    def _heard(self) -> str:
        _, messages = self._core.get_observation()
        # The game's id is -1; what the player has said is in the transcript already.
        return "\n".join(text for sender, text, _ in messages if sender < 0).strip()


def make_textarena(name: str, max_turns: int | None = None, **settings: Any) -> TextEnv:
    """Return the game registered as ``name``, e.g. "GuessTheNumber-v0"; passes ``max_turns`` on if it has a limit."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if max_turns is not None and name in ENV_REGISTRY and "max_turns" in ENV_REGISTRY[name].kwargs:
        settings["max_turns"] = max_turns
    with sealed(0):  # some constructors draw random numbers
        return TextArenaEnv(textarena.make(name, **settings), max_turns)


_FOREIGN: dict[str, tuple[Callable[[Any, int | None], TextEnv], Callable[..., TextEnv], str]] = {
    "gem": (GemEnv, make_gem, "gem-llm"),
    "textarena": (TextArenaEnv, make_textarena, "textarena"),
    "openenv": (OpenEnv, make_openenv, "openenv"),
}
"""By package: the adapter of its environments, what makes one by name, and its name on PyPI."""


@checked
def as_text_env(env: Any, max_turns: Count | None = None) -> TextEnv:
    """Return ``env`` as a TextEnv: itself if it is one, else in a thin adapter for its kind.

    Kinds: gymnasium environments with ``Text`` spaces, also wrapped by ``gymnasium.make``; GEM environments;
    single-player textarena games; openenv environments and clients; and any object with ``max_turns``,
    ``reset(seed=...)`` (or ``reset()``) and ``step(action)``. ``max_turns`` overrides the environment's own limit.

    Raises:
        ConfigError: it is none of these, its spaces are not text, or no ``max_turns`` is known.
    """
    if isinstance(env, gymnasium.Env):
        while isinstance(env, OrderEnforcing | PassiveEnvChecker):  # which gymnasium.make adds to everything
            env = env.env
        if isinstance(env, TextEnv) and max_turns in (None, env.max_turns):
            return env
        return GymnasiumText(env, max_turns)
    # By the names of packages: isinstance would need each of them to be installed and imported.
    packages = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    for package, (adapter, _, _) in _FOREIGN.items():
        if package in packages:
            return adapter(env, max_turns)
    return PlainEnv(env, max_turns)


@checked
def make_env(name: Name, /, **settings: Any) -> TextEnv:
    """Return a new environment by name.

    ``agilerl/GuessTheNumber-v0`` (any id of gymnasium), ``gem:game:Mastermind-v0-easy``,
    ``textarena:GuessTheNumber-v0``, ``openenv:http://127.0.0.1:8000``, or ``module:Class`` or ``path.py:Class`` for a
    custom one, whose code is run (see :func:`agilerl.safety.custom_code.load_code`). ``settings`` are keyword arguments
    of its constructor.

    Raises:
        ConfigError: the name is unknown, its package is not installed, or it refuses the settings.
    """
    prefix, _, rest = name.partition(":")
    try:
        if prefix in _FOREIGN and rest:
            return _FOREIGN[prefix][1](rest, **settings)
        make = load_code("the environment", name, allowed=True) if names_code(name) else partial(gymnasium.make, name)
        with contained():
            return as_text_env(make(**settings))
    except AgileRLError:
        raise
    except ModuleNotFoundError as error:
        # Only if the package itself is missing; the dependency of a single game is named as it is.
        if prefix in _FOREIGN and error.name == prefix:
            raise ConfigError(
                f"{name} needs the package {_FOREIGN[prefix][2]}; see docs/environments.md for how to install it"
            ) from error
        raise ConfigError(f"{name} cannot be imported: {error}") from error
    except Exception as error:  # a third-party constructor may raise anything; report its reason
        pairs = ", ".join(f"{k}={v!r}" for k, v in settings.items()) or "no settings"
        hint = "" if names_code(name) else f" {instead(f'environments={name}') or 'A class of yours is path.py:Class.'}"
        raise ConfigError(f"{name} cannot be made with {pairs}: {type(error).__name__}: {error}{hint}") from error
