"""Mastermind: find a code of digits from how close each guess came."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
from gymnasium.spaces import Text

from agilerl.arguments import Count, checked
from agilerl.envs.games.game import PROSE, Game, Turn, whole
from agilerl.errors import ConfigError

MOST_CODES = 1296  # 6**4, the classic game; minimax compares all pairs of codes


class Mastermind(Game):
    """Find a code of ``length`` digits from 1 to ``digits``; each guess is answered by how close it was.

    Reward 1 for the code, 0 if ``max_turns`` guesses were not enough. Codes are uniform over seeds and may repeat a
    digit. Observations are two digits: how many digits are right in the right place, and how many more are in the code
    at another place ("10"). The first observation is the form of the code: "2x4" means two digits, each from 1 to 4.
    "?" answers an invalid guess, "x" means that no guess is left, "=" that the code is found. ``verbose`` uses
    sentences.

    The guess is the digits of the action's last line, ignoring spaces and signs between them. It is not valid with
    another number of digits, or one outside 1 to ``digits``. By default there are as many guesses as minimax play
    (Knuth, The Computer as Master Mind, 1976) needs for the hardest code, so the best mean return is 1.0; with fewer,
    ``best_return`` is that of minimax play. There are at most 1296 codes.
    """

    name = "mastermind"

    @checked
    def __init__(self, length: int = 2, digits: int = 4, max_turns: Count | None = None, verbose: bool = False) -> None:
        self.length = whole(length, "length", 1, 6)
        self.digits = whole(digits, "digits", 2, 9)
        if digits**length > MOST_CODES:
            raise ConfigError(
                f"expected at most {MOST_CODES} codes, found {digits} ** {length} = {digits**length}; use fewer digits"
            )
        self.verbose = verbose
        self._codes, self._pegs = _codes(length, digits), _pegs(length, digits)
        needed = _guesses_needed(length, digits)
        super().__init__(
            max(needed) if max_turns is None else max_turns,
            Text(500, charset=PROSE) if verbose else Text(3, charset="0123456789?=x"),
            Text(length, min_length=length, charset="123456789"[:digits]),
        )
        self.best_return = sum(n <= self.max_turns for n in needed) / len(needed)
        self.random_return = 1.0 - (1.0 - 1.0 / len(self._codes)) ** self.max_turns
        self._code = 0
        self._possible: Sequence[int] = ()

    def begin(self) -> str:
        """Draw the code."""
        self._code = int(self.draws().integers(len(self._codes)))
        self._possible = range(len(self._codes))
        if not self.verbose:
            return f"{self.length}x{self.digits}"
        return (
            f"I have chosen a code of {self.length} digits, each from 1 to {self.digits}; digits may repeat. Find it "
            f"in at most {self.max_turns} guesses. After each I say how many digits are right in the right place, "
            "and how many more are in the code at another place. Write your guess alone on the last line."
        )

    def play(self, action: str) -> Turn:
        """Compare a guess with the code."""
        lines = action.strip().splitlines()
        text = "".join(c for c in lines[-1] if c in "0123456789") if lines else ""
        if len(text) != self.length or not set(text) <= set("123456789"[: self.digits]):
            need = f"{self.length} digits from 1 to {self.digits} alone on the last line"
            return Turn(self._told("?", f"That is not a guess: I need {need}."), False)
        guess = self._codes.index(text)
        if guess == self._code:
            return Turn(f"{text} is right." if self.verbose else "=", True, 1.0)
        row = self._pegs[guess]
        answer = row[self._code]
        self._possible = [code for code in self._possible if row[code] == answer]
        return Turn(self._told(f"{answer:02d}", f"Right place: {answer // 10}. Another place: {answer % 10}."), True)

    def legal_actions(self) -> Sequence[str]:
        """Return all codes, including those that the answers have ruled out."""
        return self._codes

    def best_action(self) -> str:
        """Return the guess of minimax play."""
        return self._codes[_minimax(self.length, self.digits, tuple(self._possible))]

    def _told(self, answer: str, sentence: str) -> str:
        left = self.turns_left
        if self.verbose:
            return f"{sentence} Guesses left: {left}." if left else f"{sentence} No guess is left."
        return answer if left else "x"


@cache
def _codes(length: int, digits: int) -> tuple[str, ...]:
    return tuple("".join(code) for code in product("123456789"[:digits], repeat=length))


@cache
def _pegs(length: int, digits: int) -> np.ndarray:
    """Return the answer to each guess (row) for each code: ten times the right places, plus the misplaced."""
    codes = np.array([[int(digit) for digit in code] for code in _codes(length, digits)])
    exact = (codes[:, None] == codes).sum(2)
    counts = (codes[:, :, None] == np.arange(1, digits + 1)).sum(1)
    table: np.ndarray = 9 * exact + np.minimum(counts[:, None], counts).sum(2)
    table.flags.writeable = False
    return table


@cache
def _minimax(length: int, digits: int, possible: tuple[int, ...]) -> int:
    """Return the first guess with the smallest worst-case remainder, preferring possible codes."""
    if len(possible) <= 2:
        return possible[0]
    answers = _pegs(length, digits)[:, possible]
    kinds = 10 * length + 1
    guesses = len(answers)
    flat = (answers + kinds * np.arange(guesses)[:, None]).ravel()
    largest_rest = np.bincount(flat, minlength=kinds * guesses).reshape(guesses, kinds).max(1)
    unlikely = np.ones(guesses, dtype=int)
    unlikely[list(possible)] = 0
    return int(np.argmin(2 * largest_rest + unlikely))


@cache
def _guesses_needed(length: int, digits: int) -> tuple[int, ...]:
    """Return how many guesses minimax play needs for each code."""
    pegs = _pegs(length, digits)
    counts = [0] * len(pegs)
    waiting: list[tuple[tuple[int, ...], int]] = [(tuple(range(len(pegs))), 1)]
    while waiting:
        possible, used = waiting.pop()
        guess = _minimax(length, digits, possible)
        rests: dict[int, list[int]] = {}
        for code in possible:
            if code == guess:
                counts[code] = used
            else:
                rests.setdefault(int(pegs[guess, code]), []).append(code)
        waiting += [(tuple(rest), used + 1) for rest in rests.values()]
    return tuple(counts)
