"""Every environment that comes with the package, made as the laws of agilerl.envs.contract want it made."""

from functools import partial

from agilerl.envs import GridNavigation, GuessTheNumber, Mastermind, TicTacToe

BUILT_IN = {
    "guess_the_number": GuessTheNumber,
    "guess_the_number hint": partial(GuessTheNumber, 20, style="hint"),
    "guess_the_number verbose": partial(GuessTheNumber, 100, style="verbose"),
    "mastermind": Mastermind,
    "mastermind verbose": partial(Mastermind, 3, 4, verbose=True),
    "tic_tac_toe": TicTacToe,
    "tic_tac_toe minimax": partial(TicTacToe, "minimax", verbose=True),
    "grid_navigation": GridNavigation,
}
