"""Environments and tokens for tests of episodes: short, exact, sometimes broken."""

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Text

from agilerl.data import Completion
from agilerl.envs.text_env import TextEnv


class Echo(TextEnv):
    """Repeats each action; pays ``seed % 10 + turn``; ends after ``length`` actions."""

    observation_space = Text(100)
    action_space = Text(100)

    def __init__(self, length: int = 3, max_turns: int = 10, system_prompt: str | None = None) -> None:
        self.length, self.max_turns, self.system_prompt = length, max_turns, system_prompt
        self.turn = self.seed = 0
        self.heard: list[tuple[str, list[int]]] = []

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn, self.seed, self.heard = 0, seed or 0, []
        return f"start{self.seed}", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn == self.length
        return f"echo:{action}", float(self.seed % 10 + self.turn), over, False, {"success": True} if over else {}

    def step_ids(self, action: str, token_ids: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.heard.append((action, list(token_ids)))
        return self.step(action)


def said(tokenizer: Any, text: str, *, ended: bool = True) -> Completion:
    """Return a completion of a text, with a log-prob for each token that tells its place."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"]) + ([tokenizer.eos_token_id] if ended else [])
    return Completion(ids, [-0.5 - i for i in range(len(ids))], "stop" if ended else "length")
