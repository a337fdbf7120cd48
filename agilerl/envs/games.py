"""A game in text with known values of perfect and of random play; each episode draws from its own generator."""

import re
import string
from typing import Annotated, Literal

import gymnasium
from gymnasium.spaces import Text
from pydantic import Field

from agilerl.checks.arguments import Whole, checked
from agilerl.envs.text_env import Begun, ResetOptions, StepResult, TextEnv
from agilerl.streams import stream

Style = Literal["range", "hint", "verbose"]
"""How observations look: ``range`` "3-5" (what is still possible), ``hint`` "h" or "l", ``verbose`` sentences."""


class GuessTheNumber(TextEnv):
    """Find a number from 1 to ``max_number``; each guess is answered by "higher" or "lower".

    Reward 1 for the right guess, 0 if ``max_turns`` guesses were not enough (``terminated``: the limit is a rule of the
    game); it comes with the last turn. The number is uniform over seeds. By default there are as many guesses as
    halving the range needs in the worst case, floor(log2 N) + 1, so perfect play always wins and the best mean return
    is 1.0. ``info`` of ``reset`` holds ``best_return`` and ``random_return``; of the last step also ``success``.

    The guess is the last run of digits in the action. One without digits, or outside 1 to ``max_number``, costs its
    turn, changes nothing, and ``info["valid"]`` is False. First observation of the styles ``range`` and ``hint``:
    "1-9". Then ``range`` shows what all hints so far leave possible, so one observation says all there is to know;
    ``hint`` says "h" (the number is higher), "l" (lower) or "?" (not valid), and the player must remember. A finished
    game shows "=" (right) or "x" (no guess left).
    """

    @checked
    def __init__(
        self,
        max_number: Annotated[int, Field(ge=2, le=10**6)] = 9,
        max_turns: Annotated[int, Field(ge=1, le=10_000)] | None = None,
        style: Style = "range",
    ) -> None:
        self.max_number, self.style, self.verbose = max_number, style, style == "verbose"
        self.max_turns = max_number.bit_length() if max_turns is None else max_turns  # floor(log2 N) + 1, exactly
        digits, charset = len(str(max_number)), "0123456789"
        prose = string.ascii_letters + string.digits + string.punctuation + " \n"
        compact = Text(2 * digits + 1, charset=charset + "-hl?=x")
        self.observation_space = Text(500, charset=prose) if self.verbose else compact
        self.action_space = Text(digits, charset=charset)
        # t guesses that halve the range tell 2**t - 1 numbers apart.
        self.best_return = min(max_number, 2**self.max_turns - 1) / max_number
        # Guesses are drawn with replacement, whatever the hints say.
        self.random_return = 1.0 - (1.0 - 1.0 / max_number) ** self.max_turns

    @checked
    def reset(self, *, seed: Whole | None = None, options: ResetOptions = None) -> Begun:
        """Begin the game of ``seed``; without a seed, use the last one plus one (0 at first). There are no options."""
        # gymnasium's check_env inspects its generator; the game does not use it.
        gymnasium.Env.reset(self, seed=self._begin_episode(seed))
        return self.begin(), {"best_return": self.best_return, "random_return": self.random_return}

    @checked
    def step(self, action: str) -> StepResult:
        """Take a turn; raises EnvError if the game has not begun, or is over."""
        self._count_turn()
        observation, valid, won = self._play(action)
        over = won or not self.turns_left
        self._running = not over
        return observation, float(won), over, False, {"valid": valid} | ({"success": won} if over else {})

    def begin(self) -> str:
        """Draw the number, and return the first observation."""
        self._number = int(stream(self._seed, "guess_the_number").integers(self.max_number)) + 1
        self._low, self._high = 1, self.max_number
        if not self.verbose:
            return f"1-{self.max_number}"
        return (
            f"I have chosen a whole number from 1 to {self.max_number}. Find it in at most {self.max_turns} guesses. "
            "After each guess I say whether my number is higher or lower. Answer with your guess as the last number."
        )

    @property
    def turns_left(self) -> int:
        """Actions left before the game is over."""
        return self.max_turns - self._turn

    def best_action(self) -> str:
        """Return the middle of what is still possible."""
        return str((self._low + self._high) // 2)

    def _play(self, action: str) -> tuple[str, bool, bool]:
        """Compare a guess with the number: the observation, whether it is a guess, and whether it is right."""
        # Any run of ASCII digits: reasoning may precede the answer.
        digits = ["", *re.findall(r"[0-9]+", action)][-1].lstrip("0")
        # int() refuses very long runs of digits; their length alone shows that they are out of range.
        guess = int(digits) if digits and len(digits) <= len(str(self.max_number)) else 0
        if not 1 <= guess <= self.max_number:
            need = f"a whole number from 1 to {self.max_number} as the last number of your answer"
            return self._answer("?", f"That is not a guess: I need {need}."), False, False
        if guess == self._number:
            return f"{guess} is right." if self.verbose else "=", True, True
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return self._answer("h", f"It is higher than {guess}."), True, False
        self._high = min(self._high, guess - 1)
        return self._answer("l", f"It is lower than {guess}."), True, False

    def _answer(self, hint: str, sentence: str) -> str:
        """Return the observation after a guess that does not end the game by itself."""
        left = self.turns_left
        if self.verbose:
            return f"{sentence} Guesses left: {left}." if left else f"{sentence} No guess is left."
        if not left:
            return "x"
        return f"{self._low}-{self._high}" if self.style == "range" else hint
