"""The smallest problems with a known best return, which show whether an algorithm learns at all.

Questions and answers are digits. Training, exam and test share the tiny spaces on purpose: a probe tests whether an
algorithm learns, not whether a model generalises.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agilerl.envs.core import Row, Split, Task
from agilerl.envs.text_env import Begun, ResetOptions, StepResult, TextEnv
from agilerl.streams import stream


class _DigitProbe(Task):
    """Questions of ``digits`` digits; reward 1.0 for exactly the right digit, else 0.0; the best mean reward is 1.0."""

    digits = 1

    def __init__(self, seed: int = 42) -> None:
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

    def __init__(self, target: int = 3, seed: int = 42) -> None:
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
    With ``max_turns`` of ``size - 1`` or more every goal can be reached, and the best mean return is 1.0.
    """

    best_return = 1.0

    def __init__(self, size: int = 4, max_turns: int | None = None) -> None:
        self.size = size
        self.max_turns = size - 1 if max_turns is None else max_turns
        self.observation_space = Text(2, min_length=2, charset="123456789"[:size])
        self.action_space = Text(1, charset="123")

    def reset(self, *, seed: int | None = None, options: ResetOptions = None) -> Begun:
        """Place agent and goal on two different cells, by ``seed`` (0 if not given). There are no options."""
        seed = self._begin_episode(seed or 0)
        gymnasium.Env.reset(self, seed=seed)  # gymnasium's check_env inspects its generator; it is not used
        cells = stream(seed, "grid_navigation").choice(self.size, size=2, replace=False)
        self._position, self._goal = (int(cell) + 1 for cell in cells)
        return f"{self._position}{self._goal}", {"best_return": self.best_return}

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
