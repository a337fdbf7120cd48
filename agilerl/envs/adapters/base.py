"""Environments that are not TextEnvs: turn counting, consecutive seeds, spaces that hold any text."""

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any

import gymnasium
from gymnasium.spaces import Space, Text
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError, EnvError
from agilerl.streams import sealed, stream


class AnyText(Space[str]):
    """Every string; for environments that do not declare their spaces.

    Samples are one to three small integers, inserted into ``form`` at "{}".
    """

    def __init__(self, form: str = "{}") -> None:
        super().__init__(dtype=str)
        self.form = form

    @property
    def is_np_flattenable(self) -> bool:
        """False: there is no longest string."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string."""
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return numbers, up to 4 half of the time and up to 20 otherwise, in this space's form."""
        limit, count = (5, 21)[int(self.np_random.integers(2))], int(self.np_random.integers(1, 4))
        numbers = self.np_random.integers(limit, size=count)
        return self.form.replace("{}", " ".join(map(str, numbers)))

    def __repr__(self) -> str:
        return "AnyText()"


class Adapter(TextEnv):
    """Another library's environment ``inner`` as a TextEnv; truncates episodes after ``max_turns``.

    Without a seed, ``reset`` uses the last seed plus one, starting at 0.
    """

    def __init__(self, inner: Any, max_turns: int | None) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: neither ``inner`` nor the argument limits the number of turns.
        """
        declared = getattr(inner, "max_turns", None) if max_turns is None else max_turns
        if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
            raise ConfigError(
                f"expected max_turns (the most actions in one episode) of {type(inner).__name__} to be a whole number "
                f"of 1 or more, found {declared!r}; set it in the environment or pass as_text_env(..., max_turns=...)"
            )
        self.inner, self.max_turns = inner, declared
        self.system_prompt = getattr(inner, "system_prompt", None)
        self.tools = getattr(inner, "tools", ())
        self.observation_space = self.action_space = AnyText()
        self._seed, self._turn = -1, 0
        self._running = self._closed = False

    @abstractmethod
    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begin the inner episode with ``seed``; return the first observation and info."""

    @abstractmethod
    def act(self, action: str) -> StepResult:
        """Pass an action to the inner environment."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. ``options`` are not passed on."""
        if self._closed:
            raise EnvError(f"this environment ({type(self.inner).__name__}) was closed; make a new one")
        self._seed = self._seed + 1 if seed is None else seed
        self._turn, self._running = 0, True
        return self.begin(self._seed)

    def step(self, action: str) -> StepResult:
        """Take a turn.

        Raises:
            EnvError: the episode has not begun, or is over.
        """
        if not self._running:
            raise EnvError(
                f"expected reset() before step(): the episode of {type(self.inner).__name__} has not begun, or is over"
            )
        self._turn += 1
        result = self.act(action)
        if not isinstance(result, tuple) or len(result) != 5:
            return result  # malformed results are reported by the caller, not repaired here
        observation, reward, terminated, truncated, info = result
        truncated = truncated or (self._turn >= self.max_turns and not terminated)
        self._running = not (terminated or truncated)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the inner environment if it has ``close``; ``reset`` raises EnvError afterwards."""
        if self._closed:
            return
        self._running, self._closed = False, True
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.inner).__name__}, max_turns={self.max_turns})"


class SealedAdapter(Adapter):
    """An adapter for an environment that draws from the global random generators.

    Each call finds them seeded by the episode's seed and the turn and restores them afterwards, so episodes are pure
    functions of seed and actions, and no other code's draws change. Such environments run one at a time, whatever the
    number of threads.
    """

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. ``options`` are not passed on."""
        with sealed(self._seed + 1 if seed is None else seed):  # the seed that super().reset will choose
            return super().reset(seed=seed, options=options)

    def step(self, action: str) -> StepResult:
        """Take a turn; raises as any adapter does."""
        draws = stream(max(self._seed, 0), "sealed_adapter", self._turn)
        with sealed(int(draws.integers(2**32))):
            return super().step(action)


# -- a plain Python class with the documented protocol ----------------------------------------------------------------


class PlainEnv(Adapter):
    """Any object with ``max_turns``, ``reset(seed=...)``, ``step(str)``; optional ``close``, ``system_prompt``, spaces.

    ``reset`` returns (observation, info), ``step`` returns (observation, reward, terminated, truncated, info).
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: ``reset(seed=...)``, ``step(action)`` or a turn limit is missing.
        """
        for method, call in (("reset", {"seed": 0}), ("step", None)):
            function = getattr(inner, method, None)
            shown = "reset(seed=...)" if method == "reset" else "step(action)"
            if not callable(function):
                raise ConfigError(
                    f"expected an environment with reset(seed=...) and step(action), but {type(inner).__name__} has no "
                    f"{method}; pass an environment, not {_described(inner)}"
                )
            try:
                inspect.signature(function).bind(*([""] if call is None else []), **(call or {}))
            except TypeError as error:
                raise ConfigError(f"expected {type(inner).__name__}.{shown}, but {error}") from error
        super().__init__(inner, max_turns)
        size = getattr(inner, "dataset_size", 0)
        # Environments of AgileRL 2.58 that serve the rows of a dataset are told which; equal seeds get equal rows.
        served = "row_index" in inspect.signature(inner.reset).parameters
        self._rows: int | None = int(size) if served and isinstance(size, int) and size > 0 else None
        self.action_space = getattr(inner, "action_space", self.action_space)
        self.observation_space = getattr(inner, "observation_space", self.observation_space)

    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return what ``inner.reset`` returns."""
        # Seeds of training leave the same remainder when divided by 3, so the remainder alone would miss rows.
        row = {} if self._rows is None else {"row_index": (seed + seed // self._rows) % self._rows}
        begun: tuple[Any, dict[str, Any]] = self.inner.reset(seed=seed, **row)
        return begun

    def act(self, action: str) -> StepResult:
        """Return what ``inner.step`` returns."""
        result: StepResult = self.inner.step(action)
        return result


class UnseededEnv(SealedAdapter):
    """A plain environment whose ``reset`` takes no seed.

    It finds the global generators of Python and numpy seeded, so episodes that draw from these are functions of
    the seed; with a generator of its own, equal seeds give different episodes.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        super().__init__(inner, max_turns)
        _say_unseeded(type(inner).__name__)

    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return what ``inner.reset`` returns."""
        begun: tuple[Any, dict[str, Any]] = self.inner.reset()
        return begun

    def act(self, action: str) -> StepResult:
        """Return what ``inner.step`` returns."""
        result: StepResult = self.inner.step(action)
        return result


@cache  # once a process for each class
def _say_unseeded(name: str) -> None:
    warnings.warn(
        f"{name}.reset() takes no seed: Python's and numpy's global generators are seeded for it instead; if it draws "
        "from one of its own, give reset a seed=None parameter, or the episodes of a group are different problems",
        stacklevel=4,
    )


def takes_no_seed(env: Any) -> bool:
    """Return whether ``reset`` can be called without arguments, and not with a seed."""
    try:
        signature = inspect.signature(env.reset)
        signature.bind()
    except (AttributeError, TypeError, ValueError):
        return False
    try:
        signature.bind(seed=0)
    except TypeError:
        return callable(getattr(env, "step", None)) and not isinstance(env, type)
    return False


def _described(thing: Any) -> str:
    return f"the class {thing.__name__} itself" if isinstance(thing, type) else f"an object of {type(thing).__name__}"


# -- a gymnasium environment whose observations and actions are text --------------------------------------------------


class GymnasiumText(Adapter):
    """A gymnasium environment with ``Text`` spaces, or a TextEnv in wrappers.

    ``max_turns`` is the argument, or the environment's attribute, or ``max_episode_steps`` of its registration. Actions
    are passed on unchanged, even those outside the action space: the environment decides what they lead to.
    """

    def __init__(self, inner: gymnasium.Env[Any, Any], max_turns: int | None = None) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: its spaces are not text, no turn limit is known, or wrappers hide an ``act`` that
                needs the sampled tokens.
        """
        core = inner.unwrapped
        if isinstance(core, TextEnv) and type(core).step_ids is not TextEnv.step_ids:
            raise ConfigError(
                f"{type(core).__name__} reads the sampled tokens, which gymnasium's wrappers do not pass on; give it "
                "without wrappers"
            )
        if not isinstance(core, TextEnv):
            for what, space in (("observation", inner.observation_space), ("action", inner.action_space)):
                if not isinstance(space, Text | AnyText):
                    raise ConfigError(
                        f"expected a gymnasium environment with text spaces, but the {what} space of "
                        f"{type(core).__name__} is {space}; write a wrapper that turns it into gymnasium.spaces.Text"
                    )
        limit = inner.spec.max_episode_steps if inner.spec is not None else None
        super().__init__(core, max_turns if max_turns is not None else getattr(core, "max_turns", limit))
        self.inner = inner
        self.observation_space, self.action_space = inner.observation_space, inner.action_space

    def bind(self, tokenizer: Any) -> None:
        """Pass the tokenizer on to a TextEnv."""
        if isinstance(self.inner.unwrapped, TextEnv):
            self.inner.unwrapped.bind(tokenizer)

    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return what ``inner.reset`` returns."""
        begun: tuple[Any, dict[str, Any]] = self.inner.reset(seed=seed)
        return begun

    def act(self, action: str) -> StepResult:
        """Return what ``inner.step`` returns."""
        result: Any = self.inner.step(action)
        return result  # type: ignore[no-any-return]


def without_checks(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Remove the two checking wrappers that ``gymnasium.make`` adds to everything."""
    while isinstance(env, OrderEnforcing | PassiveEnvChecker):
        env = env.env
    return env
