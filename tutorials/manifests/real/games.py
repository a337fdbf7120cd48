"""Two games for a small instruction-tuned model, which learns how to play from an example in the conversation."""

import re
from collections.abc import Sequence
from typing import Any

from agilerl.envs import GuessTheNumber
from agilerl.envs.core import Message, Row
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.tools import MalformedCall, ToolCall, ToolEnv
from agilerl.envs.tools.builtin import calculator


class Guess(GuessTheNumber):
    """Guess the number, in sentences that say all there is to know; the example wins, but not by halving the range."""

    def begin(self) -> str:
        """Draw the number."""
        return _asked(super().begin())

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin a game after the example."""
        first, info = super().reset(**options)
        example = (_asked(f"1-{self.max_number}"), "2", f"Higher. {_asked(f'3-{self.max_number}')}", "4")
        return [*_said(*example), {"role": "user", "content": f"Right. Now the next game. {first}"}], info

    def _answer(self, hint: str, sentence: str) -> str:
        word = {"h": "Higher.", "l": "Lower.", "?": "That is not a number from the range."}[hint]
        return word if self.turns_left == 0 else f"{word} {_asked(f'{self._low}-{self._high}')}"


def _asked(span: str) -> str:
    low, high = span.split("-")
    return f"Guess a number from {low} to {high}. Reply with the number alone."


def _said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


class CalcCalls:
    """Reads a completion that is nothing but ``calc(...)`` as a call of the calculator."""

    family, tags, instruction = "calc", (), "To use the calculator, write calc(...)"

    def parse(self, token_ids: Sequence[int], text: str) -> list[ToolCall | MalformedCall]:
        """Return the call, if the completion is one."""
        match = re.fullmatch(r"\s*calc\((.*)\)\s*", text)
        return [ToolCall("calculator", {"expression": match[1]})] if match else []


class Sums(ReasoningGymTask):
    """Sums and differences of reasoning_gym, after an example that is computed with the calculator."""

    def messages(self, row: Row) -> list[Message]:
        """Return the example and the question."""
        question = row["question"].replace(row["metadata"]["expression"], "12 + 34")
        return [*_said(question, "calc(12 + 34)", "46", "46"), *super().messages(row)]


def calculated(**params: Any) -> ToolEnv:
    """Return sums that the calculator may compute: a call, its result, the answer."""
    return ToolEnv(Sums("chain_sum", params), [calculator], parser=CalcCalls(), announce="none", max_turns=2)
