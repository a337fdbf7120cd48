"""Probe environments: the smallest problems with a known best return, to check that learning works at all.

Five-tuple environments that pay 1 and -1, as AgileRL documents them.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from gymnasium.spaces import Text
from pydantic import Field

from agilerl.checks.arguments import Count, Hint, Name, Seed, Whole, checked
from agilerl.envs.adapters.base import AnyText
from agilerl.envs.text_env import Begun, ResetOptions, StepResult, TextEnv
from agilerl.errors import ConfigError
from agilerl.streams import stream

Digit = Annotated[int, Field(ge=0, le=9)]


class _DigitEnv(TextEnv):
    """One question whose answer must contain a digit: 1.0 if it does, else -1.0."""

    def __init__(self, seed: int) -> None:
        self.max_turns, self.seed = 1, seed
        self.observation_space = self.action_space = AnyText()

    @checked
    def reset(self, *, seed: Whole | None = None, options: ResetOptions = None) -> Begun:
        """Ask the question of ``seed`` (by default that of the constructor)."""
        seed = self._begin_episode(self.seed if seed is None else seed)
        question, self._target = self._ask(stream(seed, "digit_env"))
        return question, {"target": self._target}

    @checked
    def step(self, action: str) -> StepResult:
        """Return the reward of an answer; the episode is over."""
        self._count_turn()
        self._running = False
        right = self._target in action
        return "", 1.0 if right else -1.0, True, False, {"success": right}

    def _ask(self, draws: np.random.Generator) -> tuple[str, str]:
        """Return a question and the digit that answers it."""
        raise NotImplementedError


class ConstantTargetEnv(_DigitEnv):
    """A fixed prompt, whose answer is always ``target_digit``."""

    @checked
    def __init__(self, target_digit: Name = "3", prompt: Name = "11", seed: Seed = 42) -> None:
        super().__init__(seed)
        self.target_digit, self.prompt = target_digit, prompt

    def _ask(self, draws: np.random.Generator) -> tuple[str, str]:
        return self.prompt, self.target_digit


class ConditionalTargetEnv(_DigitEnv):
    """One of ``digits`` in; the answer is (d mod 3) + 1."""

    _shown = 1

    @checked
    def __init__(
        self,
        digits: Annotated[Sequence[Digit], Hint("pass a tuple such as (1, 2, 3)")] = (1, 2, 3),
        seed: Seed = 42,
    ) -> None:
        if not digits:
            raise ConfigError("expected at least one digit as digits, found none; pass a tuple such as (1, 2, 3)")
        super().__init__(seed)
        self.digits = digits

    def _ask(self, draws: np.random.Generator) -> tuple[str, str]:
        chosen = [self.digits[i] for i in draws.integers(len(self.digits), size=self._shown)]
        return "".join(map(str, chosen)), str(sum(chosen) % 3 + 1)


class MultiInputConditionalEnv(ConditionalTargetEnv):
    """Two of ``digits`` in; the answer is ((d1 + d2) mod 3) + 1."""

    _shown = 2


class GridNavigationEnv(TextEnv):
    """Walk along ``grid_size`` cells, counted from 0: 1 left, 2 stay, 3 right.

    The first observation is position and goal, later ones the position alone. Every step costs ``step_cost``; the goal
    pays 1.0 and ends the episode, ``max_turns`` steps without it pay -1.0.
    """

    @checked
    def __init__(
        self,
        grid_size: Annotated[int, Field(ge=2, le=10)] = 4,
        max_turns: Count = 5,
        step_cost: float = -0.1,
        seed: Seed = 42,
    ) -> None:
        self.grid_size, self.max_turns, self.step_cost, self.seed = grid_size, max_turns, step_cost, seed
        self.observation_space, self.action_space = Text(2, charset="0123456789"[:grid_size]), AnyText()

    @checked
    def reset(self, *, seed: Whole | None = None, options: ResetOptions = None) -> Begun:
        """Place agent and goal on two different cells, by ``seed`` (by default that of the constructor)."""
        draws = stream(self._begin_episode(self.seed if seed is None else seed), "grid_navigation_env")
        self.position, self.target = map(int, draws.choice(self.grid_size, size=2, replace=False))
        return f"{self.position}{self.target}", {"position": self.position, "target": self.target}

    @checked
    def step(self, action: str) -> StepResult:
        """Move by the first 1, 2 or 3 of ``action``."""
        self._count_turn()
        move = {"1": -1, "3": 1}.get(next((letter for letter in action if letter in "123"), ""), 0)
        self.position = min(max(self.position + move, 0), self.grid_size - 1)
        reached = self.position == self.target
        self._running = not reached and self._turn < self.max_turns
        reward = 1.0 if reached else self.step_cost if self._running else -1.0
        info = {} if self._running else {"success": reached}
        return str(self.position), reward, not self._running, False, info
