"""What all adapters share: turn counting, consecutive seeds, spaces that hold any text."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Space

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
