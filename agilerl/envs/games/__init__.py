"""Games in text with known values of perfect and of random play."""

from agilerl.envs.games.game import Game
from agilerl.envs.games.guess_the_number import GuessTheNumber
from agilerl.envs.games.mastermind import Mastermind
from agilerl.envs.games.tic_tac_toe import TicTacToe

__all__ = ["Game", "GuessTheNumber", "Mastermind", "TicTacToe"]
