"""Tic-tac-toe against an opponent whose moves are drawn from the seed."""

from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args

from gymnasium.spaces import Text

from agilerl.arguments import checked
from agilerl.envs.games.game import PROSE, Game, Turn, last_number, whole
from agilerl.errors import ConfigError

Opponent = Literal["random", "minimax"]
"""``random`` moves anywhere; ``minimax`` never loses, and chooses randomly among equally good moves."""

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
        max_turns: int = 9,
        verbose: bool = False,
    ) -> None:
        if opponent not in get_args(Opponent):
            raise ConfigError(f"expected the opponent {' or '.join(get_args(Opponent))}, found {opponent!r}")
        if begins not in ("X", "O", "seed"):
            raise ConfigError(f"expected X, O or seed as who begins, found {begins!r}")
        self.opponent, self.begins, self.verbose = opponent, begins, verbose
        compact = Text(9, min_length=9, charset="XO" + EMPTY)
        super().__init__(
            whole(max_turns, "max_turns", 5, 10_000),
            Text(500, charset=PROSE) if verbose else compact,
            Text(1, charset=EMPTY),
        )
        firsts = ["X", "O"] if begins == "seed" else [begins]
        self.best_return = sum(_value(EMPTY, first, opponent, "best") for first in firsts) / len(firsts)
        self.random_return = sum(_value(EMPTY, first, opponent, "random") for first in firsts) / len(firsts)
        self._board = EMPTY

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
        cell = last_number(action) or ""
        if cell not in self.legal_actions():
            return Turn(self._told("That is not the number of a free cell."), False)
        self._board = self._board.replace(cell, "X")
        if not _over(self._board):
            self._reply()
        if not _over(self._board):
            return Turn(self._told("Your move."), True)
        score = SCORES[_winner(self._board)]
        return Turn(self._told({1.0: "You win.", 0.5: "A draw.", 0.0: "You lose."}[score]), True, score)

    def legal_actions(self) -> Sequence[str]:
        """Return the numbers of the free cells."""
        return _free(self._board)

    def best_action(self) -> str:
        """Return the move with the best mean return against this opponent."""
        return max(
            _free(self._board), key=lambda cell: _value(self._board.replace(cell, "X"), "O", self.opponent, "best")
        )

    def _reply(self) -> None:
        moves = _replies(self._board, self.opponent)
        move = moves[self.draws(1 + sum(cell == "O" for cell in self._board)).integers(len(moves))]
        self._board = self._board.replace(move, "O")

    def _told(self, sentence: str) -> str:
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
    worth = {cell: _minimax(board.replace(cell, "O"), "X") for cell in moves}
    return tuple(cell for cell in moves if worth[cell] == min(worth.values()))


@cache
def _minimax(board: str, turn: str) -> float:
    """Return the score of X if both play perfectly."""
    if _over(board):
        return SCORES[_winner(board)]
    other, best = ("O", max) if turn == "X" else ("X", min)
    return best(_minimax(board.replace(cell, turn), other) for cell in _free(board))


@cache
def _value(board: str, turn: str, opponent: Opponent, play: Literal["best", "random"]) -> float:
    """Return the mean score of X against an opponent, if X plays the best move or a random one."""
    if _over(board):
        return SCORES[_winner(board)]
    if turn == "O":
        moves = _replies(board, opponent)
        return sum(_value(board.replace(move, "O"), "X", opponent, play) for move in moves) / len(moves)
    values = [_value(board.replace(cell, "X"), "O", opponent, play) for cell in _free(board)]
    return max(values) if play == "best" else sum(values) / len(values)
