"""What the games share: turn counting, a generator per episode, text spaces, reference returns."""

import re
import string
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError, EnvError
from agilerl.streams import stream

PROSE = string.ascii_letters + string.digits + string.punctuation + " \n"
"""The characters of verbose observations."""


class Turn(NamedTuple):
    """The result of one action."""

    observation: str
    valid: bool
    """False for an illegal action, which costs its turn and changes nothing."""
    score: float | None = None
    """Reward in [0, 1] if the game ends here; None while it continues."""


class Game(TextEnv):
    """A single-player game; its only reward, in [0, 1], comes with the last turn.

    An illegal action raises nothing: it costs its turn, changes nothing, and ``info["valid"]`` is False.
    When ``max_turns`` actions are used up the game is over with reward 0 (``terminated``: the limit is a rule of the
    game). ``info`` of ``reset`` holds ``best_return`` and ``random_return``; of the last step also ``success``.
    """

    name: str
    """Purpose of the random stream; the same seed and settings give the same game."""
    best_return: float
    """Mean return of perfect play over all seeds."""
    random_return: float
    """Mean return of play that draws uniformly from ``legal_actions``."""

    def __init__(self, max_turns: int, observation_space: Text, action_space: Text) -> None:
        self.max_turns = whole(max_turns, "max_turns", 1, 10_000)
        self.observation_space, self.action_space = observation_space, action_space
        self._seed = -1
        self._turn = 0
        self._running = False

    @abstractmethod
    def begin(self) -> str:
        """Set up the game from ``draws()`` and return the first observation."""

    @abstractmethod
    def play(self, action: str) -> Turn:
        """Apply the rules to an action, which may be any text."""

    @abstractmethod
    def legal_actions(self) -> Sequence[str]:
        """Return the actions that the rules allow now."""

    @abstractmethod
    def best_action(self) -> str:
        """Return an action of perfect play, using only what the player has been told."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the game of ``seed``; without a seed, use the last one plus one (0 at first). There are no options.

        Raises:
            EnvError: the seed is not a whole number of 0 or more.
        """
        seed = self._seed + 1 if seed is None else seed
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise EnvError(f"expected a whole number of 0 or more as the seed of {type(self).__name__}, found {seed!r}")
        self._seed, self._turn, self._running = int(seed), 0, True
        gymnasium.Env.reset(self, seed=self._seed)  # gymnasium's check_env inspects its generator; games do not use it
        return self.begin(), {"best_return": self.best_return, "random_return": self.random_return}

    def step(self, action: str) -> StepResult:
        """Take a turn.

        Raises:
            EnvError: the game has not begun, or is over.
        """
        if not self._running:
            raise EnvError(
                f"expected reset() before step(): the game of {type(self).__name__} has not begun, or is over"
            )
        self._turn += 1
        turn = self.play(action)
        over = turn.score is not None or self._turn == self.max_turns
        self._running = not over
        score = turn.score or 0.0
        info: dict[str, Any] = {"valid": turn.valid} | ({"success": score == 1.0} if over else {})
        return turn.observation, score, over, False, info

    def draws(self, *key: int) -> np.random.Generator:
        """Return this episode's generator for ``key``."""
        return stream(self._seed, self.name, *key)

    @property
    def turns_left(self) -> int:
        """Actions left before the game is over."""
        return self.max_turns - self._turn


def last_number(action: str) -> str | None:
    """Return the last run of ASCII digits in a text, so that reasoning may precede the answer."""
    found = re.findall(r"[0-9]+", action)
    return found[-1] if found else None


def whole(value: Any, name: str, low: int, high: int) -> int:
    """Check that a setting is a whole number from ``low`` to ``high``, and return it.

    Raises:
        ConfigError: it is of another type, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"expected a whole number from {low} to {high} as {name}, found {value!r}")
    return value
