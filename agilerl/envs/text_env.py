"""The multi-turn protocol: gymnasium's five-tuple over text or chat messages."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Space

from agilerl.envs.core import Message

Observation = str | list[Message]
"""Text, which becomes a message of the user, or the messages themselves (role ``user``, ``tool`` or ``system``)."""

StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""Observation, reward of this turn, terminated, truncated, info."""


class TextEnv(gymnasium.Env[Any, Any]):
    """An episode of text: a pure function of the seed and of the actions.

    Subclasses give ``reset`` and ``step``. Episodes end by ``terminated`` or ``truncated``, and after ``max_turns``
    actions at the latest. Environments written elsewhere become one with :func:`agilerl.envs.adapters.as_text_env`.
    """

    max_turns: int = 1
    """Most actions of one episode, 1 or more."""
    system_prompt: str | None = None
    """Put before the first observation as a message of the system."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas (``{"type": "function", "function": {...}}``) that are given to the chat template."""
    observation_space: Space[Any]
    action_space: Space[Any]

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of a seed of 0 or more; return the first observation and info."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Take an action, the text of one completion, and return what it led to."""

    def bind(self, tokenizer: Any) -> None:
        """Learn the policy's tokenizer; called once, before the first ``reset``."""

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take an action given as the text and as the tokens that were sampled, the end token included.

        Environments for which typed text and special tokens differ (tool calls) override it; it is what rollouts call.
        """
        return self.step(action)
