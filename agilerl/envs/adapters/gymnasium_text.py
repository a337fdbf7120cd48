"""A gymnasium environment whose observations and actions are text."""

from typing import Any

import gymnasium
from gymnasium.spaces import Text
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from agilerl.envs.adapters.base import Adapter, AnyText
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError


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
