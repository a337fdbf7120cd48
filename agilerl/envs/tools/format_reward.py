"""AgileRL's bonus for an answer in the right form."""

from collections.abc import Sequence
from typing import Any

import gymnasium

from agilerl.checks.arguments import NotNegative, checked
from agilerl.envs.adapters import as_text_env
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.rewards.grader import CLOSE, OPEN


class FormatRewardWrapper(gymnasium.Wrapper[Any, Any, Any, Any], TextEnv):  # type: ignore[misc]
    """Adds ``format_bonus`` to the last reward of an episode whose answer is in ``<answer>`` tags but wrong.

    A right answer (``info["success"]`` or ``info["correct"]``) gets no bonus, so the best return is unchanged.
    Truncated episodes get none.
    """

    env: TextEnv

    @checked
    def __init__(self, env: Any, format_bonus: NotNegative = 0.1) -> None:
        """Wrap a TextEnv, or any environment that ``as_text_env`` turns into one."""
        super().__init__(as_text_env(env))
        self.format_bonus = format_bonus
        self._read()

    def bind(self, tokenizer: Any) -> None:
        """Bind the wrapped environment."""
        self.env.bind(tokenizer)
        self._read()

    def _read(self) -> None:
        """Copy the attributes of the wrapped environment; binding may change them."""
        self.max_turns, self.system_prompt, self.tools = self.env.max_turns, self.env.system_prompt, self.env.tools

    def step(self, action: str) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._paid(action, self.env.step(action))

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._paid(action, self.env.step_ids(action, token_ids))

    def _paid(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        solved = info.get("success", info.get("correct", False))
        if terminated and not solved and 0 <= action.find(OPEN) < action.rfind(CLOSE):
            reward += self.format_bonus
        return observation, reward, terminated, truncated, info
