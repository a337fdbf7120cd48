"""Games in text with known values of perfect and of random play; each episode draws from its own generator."""

import re
import string
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from agilerl.checks.arguments import Whole, Within, checked
from agilerl.envs.text_env import Begun, Options, StepResult, TextEnv
from agilerl.errors import ConfigError
from agilerl.streams import stream

PROSE = string.ascii_letters + string.digits + string.punctuation + " \n"
"""The characters of verbose observations."""
Turns = Annotated[int, Within(least=1, most=10_000)]


class Turn(NamedTuple):
    """The result of one action."""

    observation: str
    valid: bool
    """False for an illegal action, which costs its turn and changes nothing."""
    score: float | None = None
    """Reward in [0, 1] if the game ends here; None while it continues."""


class Game(TextEnv):
    """A single-player game; its only reward, in [0, 1], comes with the last turn.

    An illegal action raises nothing: it costs its turn, changes nothing, and ``info["valid"]`` is False.
    When ``max_turns`` actions are used up the game is over with reward 0 (``terminated``: the limit is a rule of the
    game). ``info`` of ``reset`` holds ``best_return`` and ``random_return``; of the last step also ``success``.
    """

    name: str
    """Purpose of the random stream; the same seed and settings give the same game."""
    best_return: float
    """Mean return of perfect play over all seeds."""
    random_return: float
    """Mean return of play that draws uniformly from ``legal_actions``."""

    def __init__(self, max_turns: int, compact: Text, actions: Text, verbose: bool) -> None:
        self.max_turns, self.verbose = max_turns, verbose
        self.observation_space = Text(500, charset=PROSE) if verbose else compact
        self.action_space = actions

    @abstractmethod
    def begin(self) -> str:
        """Set up the game from ``draws()`` and return the first observation."""

    @abstractmethod
    def play(self, action: str) -> Turn:
        """Apply the rules to an action, which may be any text."""

    @abstractmethod
    def legal_actions(self) -> Sequence[str]:
        """Return the actions that the rules allow now."""

    @abstractmethod
    def best_action(self) -> str:
        """Return an action of perfect play, using only what the player has been told."""

    @checked
    def reset(self, *, seed: Whole | None = None, options: Options = None) -> Begun:
        """Begin the game of ``seed``; without a seed, use the last one plus one (0 at first). There are no options."""
        # gymnasium's check_env inspects its generator; games do not use it.
        gymnasium.Env.reset(self, seed=self._begin_episode(seed))
        return self.begin(), {"best_return": self.best_return, "random_return": self.random_return}

    @checked
    def step(self, action: str) -> StepResult:
        """Take a turn; raises EnvError if the game has not begun, or is over."""
        self._count_turn()
        turn = self.play(action)
        over = turn.score is not None or not self.turns_left
        self._running = not over
        score = turn.score or 0.0
        info: dict[str, Any] = {"valid": turn.valid} | ({"success": score == 1.0} if over else {})
        return turn.observation, score, over, False, info

    def draws(self, *key: int) -> np.random.Generator:
        """Return this episode's generator for ``key``."""
        return stream(self._seed, self.name, *key)

    @property
    def turns_left(self) -> int:
        """Actions left before the game is over."""
        return self.max_turns - self._turn

    def _answer(self, hint: str, sentence: str) -> str:
        """Return the observation after a guess that does not end the game by itself."""
        left = self.turns_left
        if self.verbose:
            return f"{sentence} Guesses left: {left}." if left else f"{sentence} No guess is left."
        return hint if left else "x"


def last_number(action: str) -> str:
    """Return the last run of ASCII digits in a text, so that reasoning may precede the answer; empty without any."""
    return str(("", *re.findall(r"[0-9]+", action))[-1])


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
    def __init__(
        self,
        max_number: Annotated[int, Within(least=2, most=10**6)] = 9,
        max_turns: Turns | None = None,
        style: Style = "range",
    ) -> None:
        self.max_number, self.style = max_number, style
        digits, charset = len(str(max_number)), "0123456789"
        super().__init__(
            max_number.bit_length() if max_turns is None else max_turns,  # floor(log2 N) + 1, exactly
            Text(2 * digits + 1, charset=charset + "-hl?=x"),
            Text(digits, charset=charset),
            style == "verbose",
        )
        # t guesses that halve the range tell 2**t - 1 numbers apart.
        self.best_return = min(max_number, 2**self.max_turns - 1) / max_number
        # Guesses are drawn with replacement, whatever the hints say.
        self.random_return = 1.0 - (1.0 - 1.0 / max_number) ** self.max_turns

    def begin(self) -> str:
        """Draw the number."""
        self._number = int(self.draws().integers(self.max_number)) + 1
        self._low, self._high = 1, self.max_number
        if not self.verbose:
            return f"1-{self.max_number}"
        return (
            f"I have chosen a whole number from 1 to {self.max_number}. Find it in at most {self.max_turns} guesses. "
            "After each guess I say whether my number is higher or lower. Answer with your guess as the last number."
        )

    def play(self, action: str) -> Turn:
        """Compare a guess with the number."""
        digits = last_number(action).lstrip("0")
        # int() refuses very long runs of digits; their length alone shows that they are out of range.
        guess = int(digits) if digits and len(digits) <= len(str(self.max_number)) else 0
        if not 1 <= guess <= self.max_number:
            need = f"a whole number from 1 to {self.max_number} as the last number of your answer"
            return Turn(self._answer("?", f"That is not a guess: I need {need}."), False)
        if guess == self._number:
            return Turn(f"{guess} is right." if self.verbose else "=", True, 1.0)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return Turn(self._answer("h", f"It is higher than {guess}."), True)
        self._high = min(self._high, guess - 1)
        return Turn(self._answer("l", f"It is lower than {guess}."), True)

    def legal_actions(self) -> Sequence[str]:
        """Return all numbers: those ruled out by hints may still be guessed, at the cost of a turn."""
        return [str(number) for number in range(1, self.max_number + 1)]

    def best_action(self) -> str:
        """Return the middle of what is still possible."""
        return str((self._low + self._high) // 2)

    def _answer(self, hint: str, sentence: str) -> str:
        return super()._answer(f"{self._low}-{self._high}" if self.style == "range" else hint, sentence)


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
    def __init__(
        self,
        length: Annotated[int, Within(least=1, most=6)] = 2,
        digits: Annotated[int, Within(least=2, most=9)] = 4,
        max_turns: Turns | None = None,
        verbose: bool = False,
    ) -> None:
        if digits**length > MOST_CODES:
            raise ConfigError(
                f"expected at most {MOST_CODES} codes, found {digits} ** {length} = {digits**length}; use fewer digits"
            )
        self.length, self.digits = length, digits
        self._codes, self._pegs = _codes(length, digits), _pegs(length, digits)
        needed = _guesses_needed(length, digits)
        super().__init__(
            max(needed) if max_turns is None else max_turns,
            Text(3, charset="0123456789?=x"),
            Text(length, min_length=length, charset="123456789"[:digits]),
            verbose,
        )
        self.best_return = sum(n <= self.max_turns for n in needed) / len(needed)
        self.random_return = 1.0 - (1.0 - 1.0 / len(self._codes)) ** self.max_turns

    def begin(self) -> str:
        """Draw the code."""
        self._code = int(self.draws().integers(len(self._codes)))
        self._possible: Sequence[int] = range(len(self._codes))
        if not self.verbose:
            return f"{self.length}x{self.digits}"
        return (
            f"I have chosen a code of {self.length} digits, each from 1 to {self.digits}; digits may repeat. Find it "
            f"in at most {self.max_turns} guesses. After each I say how many digits are right in the right place, "
            "and how many more are in the code at another place. Write your guess alone on the last line."
        )

    def play(self, action: str) -> Turn:
        """Compare a guess with the code."""
        text = re.sub(r"[^0-9]", "", (action.strip().splitlines() or [""])[-1])
        if text not in self._codes:
            need = f"{self.length} digits from 1 to {self.digits} alone on the last line"
            return Turn(self._answer("?", f"That is not a guess: I need {need}."), False)
        guess = self._codes.index(text)
        if guess == self._code:
            return Turn(f"{text} is right." if self.verbose else "=", True, 1.0)
        row = self._pegs[guess]
        pegs = row[self._code]
        self._possible = [code for code in self._possible if row[code] == pegs]
        return Turn(self._answer(f"{pegs:02d}", f"Right place: {pegs // 10}. Another place: {pegs % 10}."), True)

    def legal_actions(self) -> Sequence[str]:
        """Return all codes, including those that the answers have ruled out."""
        return self._codes

    def best_action(self) -> str:
        """Return the guess of minimax play."""
        return self._codes[_best_guess(self.length, self.digits, tuple(self._possible))]


@cache
def _codes(length: int, digits: int) -> tuple[str, ...]:
    return tuple("".join(code) for code in product("123456789"[:digits], repeat=length))


@cache
def _pegs(length: int, digits: int) -> np.ndarray:
    """Return the answer to each guess (row) for each code: ten times the right places, plus the misplaced."""
    codes = np.array([[int(digit) for digit in code] for code in _codes(length, digits)])
    exact = (codes[:, None] == codes).sum(2)  # (guesses, codes)
    counts = (codes[:, :, None] == np.arange(1, digits + 1)).sum(1)  # (codes, digits): how often a code has a digit
    # 10 * exact + (common - exact); two codes have a digit in common as often as both have it.
    table: np.ndarray = 9 * exact + np.minimum(counts[:, None], counts).sum(2)
    table.flags.writeable = False  # the cache hands one table to all games
    return table


@cache
def _best_guess(length: int, digits: int, possible: tuple[int, ...]) -> int:
    """Return the first guess with the smallest worst-case remainder, preferring possible codes."""
    # Of two codes, guessing one shows whether it is the other.
    if len(possible) <= 2:
        return possible[0]
    answers = _pegs(length, digits)[:, possible]  # (guesses, possible codes)
    kinds, guesses = 10 * length + 1, len(answers)  # answers go from 0 to 10 * length
    # Each guess counts in a range of its own, so that one call counts the answers of all.
    flat = (answers + kinds * np.arange(guesses)[:, None]).ravel()
    largest_rest = np.bincount(flat, minlength=kinds * guesses).reshape(guesses, kinds).max(1)
    unlikely = np.ones(guesses, dtype=int)
    unlikely[list(possible)] = 0
    # The worst case decides; where it is equal, a guess that may be right goes before one that cannot.
    return int(np.argmin(2 * largest_rest + unlikely))


@cache
def _guesses_needed(length: int, digits: int) -> tuple[int, ...]:
    """Return how many guesses minimax play needs for each code."""
    pegs = _pegs(length, digits)
    counts = [0] * len(pegs)
    waiting = [(np.arange(len(pegs)), 1)]
    while waiting:
        possible, used = waiting.pop()
        guess = _best_guess(length, digits, tuple(possible.tolist()))
        answers = pegs[guess, possible]
        for answer in np.unique(answers):
            # All in the right place: the guess was the code.
            if answer == 10 * length:
                counts[guess] = used
            else:
                waiting.append((possible[answers == answer], used + 1))
    return tuple(counts)


Opponent = Literal["random", "minimax"]
"""``random`` moves anywhere; ``minimax`` never loses, and chooses randomly among equally good moves."""

# A free cell shows its own number, so a move replaces one character.
EMPTY = "123456789"
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
SCORES = {"X": 1.0, "": 0.5, "O": 0.0}


class TicTacToe(Game):
    """Play X against an opponent that plays O: three in a row, column or diagonal wins.

    Reward 1 for a win, 0.5 for a draw, 0 for a loss. ``begins`` says who moves first: "X", "O", or "seed" (each in half
    of the games). The observation is the board row by row, in which a free cell shows its number: "12X45O789"; three
    lines and a sentence with ``verbose``. The move is the last run of digits in the action; anything but the number of
    a free cell is not valid, and the opponent waits. With ``max_turns`` = 9, at least four such turns are forgiven.
    """

    name = "tic_tac_toe"

    @checked
    def __init__(
        self,
        opponent: Opponent = "random",
        begins: Literal["X", "O", "seed"] = "seed",
        max_turns: Annotated[int, Within(least=5, most=10_000)] = 9,  # X may need five moves
        verbose: bool = False,
    ) -> None:
        self.opponent, self.begins = opponent, begins
        compact = Text(9, min_length=9, charset="XO" + EMPTY)
        super().__init__(max_turns, compact, Text(1, charset=EMPTY), verbose)
        firsts = "XO" if begins == "seed" else begins
        self.best_return = sum(_value(EMPTY, first, opponent, "best") for first in firsts) / len(firsts)
        self.random_return = sum(_value(EMPTY, first, opponent, "random") for first in firsts) / len(firsts)

    def begin(self) -> str:
        """Clear the board; the opponent moves if it is first."""
        self._board = EMPTY
        first = self.begins if self.begins != "seed" else "XO"[self.draws().integers(2)]
        if first == "O":
            self._reply()
        if not self.verbose:
            return self._board
        return (
            "We play tic-tac-toe. You are X, I am O. A free cell shows its number. Answer with the number of the cell "
            f"you take as the last number.\n{_drawn(self._board)}"
        )

    def play(self, action: str) -> Turn:
        """Place X, and let the opponent reply."""
        cell = last_number(action)
        if cell not in self.legal_actions():
            return Turn(self._shown("That is not the number of a free cell."), False)
        self._board = self._board.replace(cell, "X")
        if not _over(self._board):
            self._reply()
        if not _over(self._board):
            return Turn(self._shown("Your move."), True)
        winner = _winner(self._board)
        return Turn(self._shown({"X": "You win.", "": "A draw.", "O": "You lose."}[winner]), True, SCORES[winner])

    def legal_actions(self) -> Sequence[str]:
        """Return the numbers of the free cells."""
        return _free(self._board)

    def best_action(self) -> str:
        """Return the move with the best mean return against this opponent."""
        board = self._board
        return max(_free(board), key=lambda cell: _value(board.replace(cell, "X"), "O", self.opponent, "best"))

    def _reply(self) -> None:
        moves = _replies(self._board, self.opponent)
        # A stream for each reply; the one without a key decides who begins.
        move = moves[self.draws(1 + self._board.count("O")).integers(len(moves))]
        self._board = self._board.replace(move, "O")

    def _shown(self, sentence: str) -> str:
        return f"{_drawn(self._board)}\n{sentence}" if self.verbose else self._board


def _drawn(board: str) -> str:
    return "\n".join(" ".join(board[row : row + 3]) for row in (0, 3, 6))


def _free(board: str) -> list[str]:
    return [cell for cell in board if cell not in "XO"]


def _winner(board: str) -> str:
    rows = ({board[int(i)] for i in line} for line in LINES)
    return next((row.pop() for row in rows if row in ({"X"}, {"O"})), "")


def _over(board: str) -> bool:
    return bool(_winner(board)) or not _free(board)


@cache
def _replies(board: str, opponent: Opponent) -> tuple[str, ...]:
    """Return the moves that an opponent chooses from, uniformly."""
    moves = _free(board)
    if opponent == "random":
        return tuple(moves)
    worth = {cell: _value(board.replace(cell, "O"), "X", "minimax", "best") for cell in moves}
    return tuple(cell for cell in moves if worth[cell] == min(worth.values()))


@cache
def _value(board: str, turn: str, opponent: Opponent, play: Literal["best", "random"]) -> float:
    """Return the mean score of X against an opponent, if X plays the best move or a random one."""
    if _over(board):
        return SCORES[_winner(board)]
    if turn == "O":
        moves = _replies(board, opponent)
        # The mean over the replies, not the worst of them: the opponent may err.
        return sum(_value(board.replace(move, "O"), "X", opponent, play) for move in moves) / len(moves)
    values = [_value(board.replace(cell, "X"), "O", opponent, play) for cell in _free(board)]
    return max(values) if play == "best" else sum(values) / len(values)
