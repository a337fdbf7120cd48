"""A bonus for the documented form of the answer, so that a model learns to answer at all before it answers right."""

from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.arguments import NotNegative, checked
from agilerl.envs.adapters import as_text_env
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.rewards.functions import CLOSE, OPEN


class FormatRewardWrapper(TextEnv):
    """Adds ``format_bonus`` to the last reward of an episode whose answer is in ``<answer>`` tags but not right.

    A right answer (``info["success"]`` or ``info["correct"]``) gets no bonus: the best return stays what it was.
    Nothing is added where the episode was cut off.
    """

    @checked
    def __init__(self, env: Any, format_bonus: NotNegative = 0.1) -> None:
        """Wrap a TextEnv, or any environment that ``as_text_env`` turns into one.

        Raises:
            ConfigError: the bonus is no number of 0 or more.
        """
        self.env: TextEnv = as_text_env(env)
        self.format_bonus = format_bonus
        self._read()

    @property
    def unwrapped(self) -> TextEnv:
        """The environment inside."""
        return self.env.unwrapped  # type: ignore[return-value]

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of the environment inside."""
        return self.env.reset(seed=seed, options=options)

    def bind(self, tokenizer: Any) -> None:
        """Bind the environment inside."""
        self.env.bind(tokenizer)
        self._read()

    def step(self, action: str) -> StepResult:
        """Take a step and add the bonus where it is due."""
        return self._rewarded(action, self.env.step(action))

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take a step and add the bonus where it is due."""
        return self._rewarded(action, self.env.step_ids(action, token_ids))

    def close(self) -> None:
        """Close the environment inside."""
        self.env.close()

    def _read(self) -> None:
        """Show what the environment inside shows; binding may change it."""
        self.max_turns, self.system_prompt, self.tools = self.env.max_turns, self.env.system_prompt, self.env.tools
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def _rewarded(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        solved = info.get("success", info.get("correct", False))
        if terminated and not solved and 0 <= action.find(OPEN) < action.rfind(CLOSE):
            reward += self.format_bonus
        return observation, reward, terminated, truncated, info
