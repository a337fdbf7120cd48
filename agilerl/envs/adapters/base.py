"""Environments that are not TextEnvs, and spaces that hold any text."""

import inspect
import warnings
from contextlib import nullcontext
from functools import cache
from typing import Annotated, Any

import gymnasium
from gymnasium.spaces import Space, Text

from agilerl.checks.arguments import Count, Hint, described, taken
from agilerl.envs.text_env import Begun, ResetOptions, StepResult, TextEnv
from agilerl.errors import ConfigError, EnvError
from agilerl.streams import sealed, stream


class AnyText(Space[str]):
    """Every string; for environments that do not declare their spaces.

    Samples are one to three small integers, inserted into ``form`` at "{}".
    """

    is_np_flattenable = False  # there is no longest string

    def __init__(self, form: str = "{}") -> None:
        super().__init__(dtype=str)
        self.form = form

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string."""
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return numbers, up to 4 half of the time and up to 20 otherwise, in this space's form."""
        limit, count = (5, 21)[int(self.np_random.integers(2))], int(self.np_random.integers(1, 4))
        numbers = self.np_random.integers(limit, size=count)
        return self.form.replace("{}", " ".join(map(str, numbers)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


_Turns = Annotated[Count, Hint("set it in the environment or pass as_text_env(..., max_turns=...)")]


class Adapter(TextEnv):
    """Another library's environment ``inner`` as a TextEnv; truncates episodes after ``max_turns``.

    Without a seed, ``reset`` uses the last seed plus one, starting at 0.
    """

    action_form = "{}"
    """How an action is written around numbers."""
    draws_globally = False
    """Whether ``inner`` draws from the global random generators.

    Then each call finds them seeded by the episode's seed and the turn and restores them afterwards, so episodes are
    pure functions of seed and actions, and no other code's draws change. Such environments run one at a time, whatever
    the number of threads.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``; raises ConfigError if neither it nor the argument limits the number of turns."""
        declared = getattr(inner, "max_turns", None) if max_turns is None else max_turns
        self.inner, self.max_turns = inner, taken(_Turns, declared, type(inner).__name__, "max_turns")
        self.system_prompt = getattr(inner, "system_prompt", None)
        self.tools = getattr(inner, "tools", ())
        self.observation_space, self.action_space = AnyText(), AnyText(self.action_form)
        self._closed = False

    def begin(self, seed: int) -> Begun:
        """Begin the inner episode with ``seed``; return the first observation and info."""
        return self.inner.reset(seed=seed)  # type: ignore[no-any-return]

    def act(self, action: str) -> StepResult:
        """Pass an action to the inner environment."""
        return self.inner.step(action)  # type: ignore[no-any-return]

    def reset(self, *, seed: int | None = None, options: ResetOptions = None) -> Begun:
        """Begin an episode. ``options`` are not passed on."""
        if self._closed:
            raise EnvError(f"this environment ({type(self.inner).__name__}) was closed; make a new one")
        seed = self._begin_episode(seed)
        with sealed(seed) if self.draws_globally else nullcontext():
            return self.begin(seed)

    def step(self, action: str) -> StepResult:
        """Take a turn; raises EnvError if the episode has not begun, or is over."""
        self._count_turn()
        key = max(self._seed, 0), "sealed_adapter", self._turn - 1
        with sealed(int(stream(*key).integers(2**32))) if self.draws_globally else nullcontext():
            result = self.act(action)
        if not isinstance(result, tuple) or len(result) != 5:
            return result  # malformed results are reported by the caller, not repaired here
        observation, reward, terminated, truncated, info = result
        # A game that ends in its last turn has terminated; it has not run out of turns.
        truncated = truncated or (self._turn >= self.max_turns and not terminated)
        self._running = not (terminated or truncated)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the inner environment if it has ``close``; ``reset`` raises EnvError afterwards."""
        # Passed on once: a second close() is harmless here, but not in every library.
        first, self._running, self._closed = not self._closed, False, True
        if first and (close := getattr(self.inner, "close", None)) is not None:
            close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.inner).__name__}, max_turns={self.max_turns})"


class PlainEnv(Adapter):
    """Any object with ``max_turns``, ``reset(seed=...)``, ``step(str)``; optional ``close``, ``system_prompt``, spaces.

    ``reset`` returns (observation, info), ``step`` returns (observation, reward, terminated, truncated, info). A
    ``reset()`` that takes no seed finds the global generators of Python and numpy seeded, so episodes that draw from
    these are functions of the seed; with a generator of its own, equal seeds give different episodes.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``; raises ConfigError if ``reset(seed=...)``, ``step(action)`` or a turn limit is missing."""
        method = "reset"
        try:
            reset = inspect.signature(inner.reset)
            takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in reset.parameters.values())
            reset.bind(**({"seed": 0} if takes_seed else {}))
            method = "step"
            inspect.signature(inner.step).bind("")
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"expected an environment with reset(seed=...) and step(action), found {described(inner)}, whose "
                f"{method} does not fit: {error}"
            ) from error
        self.draws_globally = not takes_seed
        if self.draws_globally:
            _warn_of_no_seed(type(inner).__name__)
        super().__init__(inner, max_turns)
        self.action_space = getattr(inner, "action_space", self.action_space)
        self.observation_space = getattr(inner, "observation_space", self.observation_space)

    def begin(self, seed: int) -> Begun:
        """Return what ``inner.reset`` returns."""
        return self.inner.reset() if self.draws_globally else super().begin(seed)


@cache  # once a process for each class
def _warn_of_no_seed(name: str) -> None:
    warnings.warn(
        f"{name}.reset() takes no seed: Python's and numpy's global generators are seeded for it instead; if it draws "
        "from one of its own, give reset a seed=None parameter, or the episodes of a group are different problems",
        stacklevel=4,
    )


class GymnasiumText(Adapter):
    """A gymnasium environment with ``Text`` spaces, or a TextEnv in wrappers.

    ``max_turns`` is the argument, or the environment's attribute, or ``max_episode_steps`` of its registration. Actions
    are passed on unchanged, even those outside the action space: the environment decides what they lead to.
    """

    def __init__(self, inner: gymnasium.Env[Any, Any], max_turns: int | None = None) -> None:
        """Wrap ``inner``; raises ConfigError if it is not of text, has no turn limit, or needs the sampled tokens."""
        core, name = inner.unwrapped, type(inner.unwrapped).__name__
        if isinstance(core, TextEnv) and type(core).step_ids is not TextEnv.step_ids:
            raise ConfigError(
                f"{name} reads the sampled tokens, which gymnasium's wrappers do not pass on; give it without wrappers"
            )
        for what, space in (("observation", inner.observation_space), ("action", inner.action_space)):
            if not isinstance(core, TextEnv) and not isinstance(space, Text | AnyText):
                raise ConfigError(
                    f"expected a gymnasium environment with text spaces, but the {what} space of {name} is {space}; "
                    "write a wrapper that turns it into gymnasium.spaces.Text"
                )
        limit = inner.spec.max_episode_steps if inner.spec is not None else None
        # The unwrapped environment has the limit and the name; calls go through the wrappers.
        super().__init__(core, max_turns if max_turns is not None else getattr(core, "max_turns", limit))
        self.inner = inner
        self.observation_space, self.action_space = inner.observation_space, inner.action_space

    def bind(self, tokenizer: Any) -> None:
        """Pass the tokenizer on to a TextEnv."""
        if isinstance(self.inner.unwrapped, TextEnv):
            self.inner.unwrapped.bind(tokenizer)
