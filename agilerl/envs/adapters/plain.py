"""A plain Python class with the documented protocol."""

import inspect
from typing import Any

from agilerl.envs.adapters.base import Adapter
from agilerl.envs.text_env import StepResult
from agilerl.errors import ConfigError


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
        self.action_space = getattr(inner, "action_space", self.action_space)
        self.observation_space = getattr(inner, "observation_space", self.observation_space)

    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return what ``inner.reset`` returns."""
        begun: tuple[Any, dict[str, Any]] = self.inner.reset(seed=seed)
        return begun

    def act(self, action: str) -> StepResult:
        """Return what ``inner.step`` returns."""
        result: StepResult = self.inner.step(action)
        return result


def _described(thing: Any) -> str:
    return f"the class {thing.__name__} itself" if isinstance(thing, type) else f"an object of {type(thing).__name__}"
