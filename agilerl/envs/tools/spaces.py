"""The space of observations that are text or messages."""

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Space

__all__ = ["Conversation"]


class Conversation(Space[Any]):
    """Any text, and any list of messages ``{"role": ..., "content": ...}`` that is not empty."""

    @property
    def is_np_flattenable(self) -> bool:
        """False: there is no longest conversation."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is text or messages."""
        if isinstance(x, str):
            return True
        return (
            isinstance(x, list)
            and len(x) > 0
            and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in x)
            and all(isinstance(m.get("content"), str) for m in x)
        )

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a number from 0 to 99 as text."""
        return str(int(self.np_random.integers(100)))

    def __repr__(self) -> str:
        return "Conversation()"
