"""A game for a small instruction-tuned model, which learns how it is played from an example in the conversation."""

from typing import Any

from agilerl.envs import GuessTheNumber


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
