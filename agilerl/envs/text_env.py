"""The multi-turn protocol: gymnasium's five-tuple over text or chat messages."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Space

from agilerl.envs.core import Message
from agilerl.errors import EnvError

Observation = str | list[Message]
"""Text, which becomes a user message, or messages (role ``user``, ``tool`` or ``system``)."""

StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""Observation, reward of this turn, terminated, truncated, info."""

RETURNED = {"reset": ("observation", "info"), "step": ("observation", "reward", "terminated", "truncated", "info")}
"""What the methods return, by name."""

Begun = tuple[Any, dict[str, Any]]
"""First observation, info."""

ResetOptions = Mapping[str, Any] | None
"""What gymnasium's ``reset`` takes besides the seed."""


class TextEnv(gymnasium.Env[Any, Any]):
    """An episode of text: a pure function of the seed and the actions.

    Subclasses implement ``reset`` and ``step``. Episodes end by ``terminated`` or ``truncated``, at the latest after
    ``max_turns`` actions. :func:`agilerl.envs.adapters.as_text_env` converts environments from other libraries.
    """

    max_turns: int = 1
    """Most actions of one episode, 1 or more."""
    system_prompt: str | None = None
    """Put before the first observation as a system message."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas (``{"type": "function", "function": {...}}``) that are passed to the chat template."""
    observation_space: Space[Any]
    action_space: Space[Any]

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: ResetOptions = None) -> Begun:
        """Begin the episode of ``seed`` (0 or more); return the first observation and info."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Take an action, the text of one completion, and return the five-tuple."""

    # A first episode without a seed has the seed 0.
    _seed, _turn, _running = -1, 0, False

    def _begin_episode(self, seed: int | None) -> int:
        """Return the seed of a new episode: the given one, or the last one plus one (0 at first)."""
        self._seed = self._seed + 1 if seed is None else seed
        self._turn, self._running = 0, True
        return self._seed

    def _count_turn(self) -> None:
        """Count a turn; raises EnvError if the episode has not begun, or is over."""
        if not self._running:
            # An adapter is called what its environment is called.
            name = type(getattr(self, "inner", self)).__name__
            raise EnvError(f"expected reset() before step(): the episode of {name} has not begun, or is over")
        self._turn += 1

    def bind(self, tokenizer: Any) -> None:
        """Set the policy's tokenizer; called once, before the first ``reset``."""

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take an action as text and as sampled tokens, end token included.

        Rollouts call this. Override it if special tokens differ from the same text typed out (tool calls).
        """
        return self.step(action)
