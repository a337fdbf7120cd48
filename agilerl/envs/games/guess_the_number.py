"""Guess the number: the smallest game in which the next action depends on earlier turns."""

from collections.abc import Sequence
from typing import Literal, get_args

from gymnasium.spaces import Text

from agilerl.arguments import Count, checked
from agilerl.envs.games.game import PROSE, Game, Turn, last_number, whole
from agilerl.errors import ConfigError

Style = Literal["range", "hint", "verbose"]
"""How observations look: ``range`` "3-5" (what is still possible), ``hint`` "h" or "l", ``verbose`` sentences."""


class GuessTheNumber(Game):
    """Find a number from 1 to ``max_number``; each guess is answered by "higher" or "lower".

    Reward 1 for the right guess, 0 if ``max_turns`` guesses were not enough. The number is uniform over seeds. By
    default there are as many guesses as halving the range needs in the worst case, floor(log2 N) + 1, so perfect play
    always wins and the best mean return is 1.0.

    The guess is the last run of digits in the action. It is not valid without digits, or outside 1 to ``max_number``.
    First observation of the styles ``range`` and ``hint``: "1-9". Then ``range`` shows what all hints so far leave
    possible, so one observation says all there is to know; ``hint`` says "h" (the number is higher), "l" (lower) or "?"
    (not valid), and the player must remember. A finished game shows "=" (right) or "x" (no guess left).
    """

    name = "guess_the_number"

    @checked
    def __init__(self, max_number: int = 9, max_turns: Count | None = None, style: Style = "range") -> None:
        if style not in get_args(Style):
            raise ConfigError(f"expected the style {', '.join(get_args(Style))}, found {style!r}")
        self.max_number = whole(max_number, "max_number", 2, 10**6)
        self.style = style
        digits = len(str(max_number))
        compact = Text(2 * digits + 1, charset="0123456789-hl?=x")
        super().__init__(
            max_number.bit_length() if max_turns is None else max_turns,
            Text(400, charset=PROSE) if style == "verbose" else compact,
            Text(digits, charset="0123456789"),
        )
        self.best_return = min(max_number, 2**self.max_turns - 1) / max_number
        self.random_return = 1.0 - (1.0 - 1.0 / max_number) ** self.max_turns
        self._low, self._high, self._number = 1, max_number, 1

    def begin(self) -> str:
        """Draw the number."""
        self._number = int(self.draws().integers(self.max_number)) + 1
        self._low, self._high = 1, self.max_number
        if self.style != "verbose":
            return f"1-{self.max_number}"
        return (
            f"I have chosen a whole number from 1 to {self.max_number}. Find it in at most {self.max_turns} guesses. "
            "After each guess I say whether my number is higher or lower. Answer with your guess as the last number."
        )

    def play(self, action: str) -> Turn:
        """Compare a guess with the number."""
        digits = (last_number(action) or "").lstrip("0")
        # int() refuses very long runs of digits; their length alone shows that they are out of range.
        guess = int(digits) if digits and len(digits) <= len(str(self.max_number)) else 0
        if not 1 <= guess <= self.max_number:
            return Turn(self._told("?", "That is not a guess"), False)
        if guess == self._number:
            return Turn("=" if self.style != "verbose" else f"{guess} is right.", True, 1.0)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return Turn(self._told("h", f"It is higher than {guess}"), True)
        self._high = min(self._high, guess - 1)
        return Turn(self._told("l", f"It is lower than {guess}"), True)

    def legal_actions(self) -> Sequence[str]:
        """Return all numbers: those ruled out by hints may still be guessed, at the cost of a turn."""
        return [str(number) for number in range(1, self.max_number + 1)]

    def best_action(self) -> str:
        """Return the middle of what is still possible."""
        return str((self._low + self._high) // 2)

    def _told(self, hint: str, sentence: str) -> str:
        left = self.turns_left
        if self.style == "verbose":
            what = f"a whole number from 1 to {self.max_number} as the last number of your answer"
            reason = f"{sentence}: I need {what}." if hint == "?" else f"{sentence}."
            return f"{reason} No guess is left." if left == 0 else f"{reason} Guesses left: {left}."
        if left == 0:
            return "x"
        return hint if self.style == "hint" else f"{self._low}-{self._high}"
