"""A bonus for the documented answer format, so that a model learns to answer before it answers correctly."""

from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.arguments import NotNegative, checked
from agilerl.envs.adapters import as_text_env
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.rewards.functions import CLOSE, OPEN


class FormatRewardWrapper(TextEnv):
    """Adds ``format_bonus`` to the last reward of an episode whose answer is in ``<answer>`` tags but wrong.

    A right answer (``info["success"]`` or ``info["correct"]``) gets no bonus, so the best return is unchanged.
    Truncated episodes get none.
    """

    @checked
    def __init__(self, env: Any, format_bonus: NotNegative = 0.1) -> None:
        """Wrap a TextEnv, or any environment that ``as_text_env`` turns into one.

        Raises:
            ConfigError: the bonus is not a number of 0 or more.
        """
        self.env: TextEnv = as_text_env(env)
        self.format_bonus = format_bonus
        self._read()

    @property
    def unwrapped(self) -> TextEnv:
        """The wrapped environment."""
        return self.env.unwrapped  # type: ignore[return-value]

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of the wrapped environment."""
        return self.env.reset(seed=seed, options=options)

    def bind(self, tokenizer: Any) -> None:
        """Bind the wrapped environment."""
        self.env.bind(tokenizer)
        self._read()

    def step(self, action: str) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._rewarded(action, self.env.step(action))

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._rewarded(action, self.env.step_ids(action, token_ids))

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def _read(self) -> None:
        """Copy the attributes of the wrapped environment; binding may change them."""
        self.max_turns, self.system_prompt, self.tools = self.env.max_turns, self.env.system_prompt, self.env.tools
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def _rewarded(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        solved = info.get("success", info.get("correct", False))
        if terminated and not solved and 0 <= action.find(OPEN) < action.rfind(CLOSE):
            reward += self.format_bonus
        return observation, reward, terminated, truncated, info
