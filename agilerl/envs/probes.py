"""Probe environments: the smallest problems with a known best return, to check that learning works at all.

Questions and answers are digits. Training, exam and test share the tiny spaces on purpose: a probe tests whether an
algorithm learns, not whether a model generalises.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from agilerl.checks.arguments import Count, Hint, Name, Seed, Whole, Within, checked
from agilerl.envs.adapters.base import AnyText
from agilerl.envs.core import Row, Split, Task
from agilerl.envs.text_env import Begun, Options, StepResult, TextEnv
from agilerl.errors import ConfigError
from agilerl.streams import stream

Digit = Annotated[int, Within(least=0, most=9)]


class _DigitProbe(Task):
    """Questions of ``digits`` digits; reward 1.0 for exactly the right digit, else 0.0; the best mean reward is 1.0."""

    digits = 1

    @checked
    def __init__(self, seed: Seed = 42) -> None:
        self.seed = seed
        self.exam_prompts = self.test_prompts = 10**self.digits

    def target(self, question: str) -> int:
        """Return the right digit."""
        return sum(map(int, question)) % 3 + 1

    def row(self, split: Split, index: int) -> Row:
        """Return a random question in training; exam and test hold every question once."""
        self.check_index(split, index)
        number = int(stream(self.seed, "probe", index).integers(10**self.digits)) if split == "train" else index
        question = f"{number:0{self.digits}d}"
        return {"question": question, "answer": str(self.target(question))}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return 1.0 if the completion is the answer, else 0.0."""
        return float(completion.strip() == row["answer"])


class ConstantTarget(_DigitProbe):
    """One digit in; the answer is always ``target``. Solved by shifting probability mass, without reading."""

    name = "probe:constant"

    @checked
    def __init__(self, target: Digit = 3, seed: Seed = 42) -> None:
        super().__init__(seed)
        self._target = target

    def target(self, question: str) -> int:
        """Return the constant."""
        return self._target


class ConditionalTarget(_DigitProbe):
    """One digit d in; the answer is (d mod 3) + 1."""

    name = "probe:conditional"


class MultiInputConditional(_DigitProbe):
    """Two digits in; the answer is ((d1 + d2) mod 3) + 1. Needs attention to both."""

    name = "probe:multi_input"
    digits = 2


class GridNavigation(TextEnv):
    """Walk along ``size`` cells: 1 left, 2 stay, 3 right; return 1.0 for standing on the goal at the end.

    Observations are two digits: position and goal, each 1 to ``size``. The only reward comes with the last turn, so
    earlier turns learn by credit alone. Any other action stays (``info["valid"]`` is False).
    ``max_turns`` is at least ``size - 1``, so every goal can be reached and the best mean return is 1.0.
    """

    best_return = 1.0

    @checked
    def __init__(self, size: Annotated[int, Within(least=2, most=9)] = 4, max_turns: Count | None = None) -> None:
        self.size = size
        self.max_turns = size - 1 if max_turns is None else max_turns
        if self.max_turns < size - 1:
            raise ConfigError(
                f"expected max_turns to be at least {size - 1}, so that every goal can be reached, found {max_turns}"
            )
        self.observation_space = Text(2, min_length=2, charset="123456789"[:size])
        self.action_space = Text(1, charset="123")

    @checked
    def reset(self, *, seed: Whole | None = None, options: Options = None) -> Begun:
        """Place agent and goal on two different cells, by ``seed`` (0 if not given). There are no options."""
        seed = self._begin_episode(seed or 0)
        gymnasium.Env.reset(self, seed=seed)  # gymnasium's check_env inspects its generator; it is not used
        cells = stream(seed, "grid_navigation").choice(self.size, size=2, replace=False)
        self._position, self._goal = (int(cell) + 1 for cell in cells)
        return f"{self._position}{self._goal}", {"best_return": self.best_return}

    @checked
    def step(self, action: str) -> StepResult:
        """Move by the first character of ``action``; ends after ``max_turns`` turns."""
        self._count_turn()
        move = {"1": -1, "2": 0, "3": 1}.get(action.strip()[:1])
        self._position = min(max(self._position + (move or 0), 1), self.size)
        self._running = self._turn < self.max_turns
        reward = float(not self._running and self._position == self._goal)
        return f"{self._position}{self._goal}", reward, not self._running, False, {"valid": move is not None}

    @staticmethod
    def best_action(observation: str) -> str:
        """Return an optimal action for an observation."""
        position, goal = int(observation[0]), int(observation[1])
        return "2" if position == goal else "3" if goal > position else "1"


# -- the same problems as AgileRL writes them: five-tuple environments that pay 1 and -1 ------------------------------


class _DigitEnv(TextEnv):
    """One question whose answer must contain a digit: 1.0 if it does, else -1.0."""

    def __init__(self, seed: int) -> None:
        self.max_turns, self.seed = 1, seed
        self.observation_space = self.action_space = AnyText()

    @checked
    def reset(self, *, seed: Whole | None = None, options: Options = None) -> Begun:
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
        grid_size: Annotated[int, Within(least=2, most=10)] = 4,
        max_turns: Count = 5,
        step_cost: float = -0.1,
        seed: Seed = 42,
    ) -> None:
        self.grid_size, self.max_turns, self.step_cost, self.seed = grid_size, max_turns, step_cost, seed
        self.observation_space, self.action_space = Text(2, charset="0123456789"[:grid_size]), AnyText()

    @checked
    def reset(self, *, seed: Whole | None = None, options: Options = None) -> Begun:
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
