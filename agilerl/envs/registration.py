"""Ids under which ``gymnasium.make`` finds the built-in environments."""

import gymnasium

__all__ = ["ENVIRONMENTS", "register_environments"]

ENVIRONMENTS = {
    "agilerl/GuessTheNumber-v0": "agilerl.envs.games.guess_the_number:GuessTheNumber",
    "agilerl/Mastermind-v0": "agilerl.envs.games.mastermind:Mastermind",
    "agilerl/TicTacToe-v0": "agilerl.envs.games.tic_tac_toe:TicTacToe",
    "agilerl/GridNavigation-v0": "agilerl.envs.probes:GridNavigation",
    "agilerl/Calculator-v0": "agilerl.envs.tools.environments:calculator_env",
    "agilerl/Python-v0": "agilerl.envs.tools.environments:python_env",
    "agilerl/Search-v0": "agilerl.envs.tools.environments:search_env",
}


def register_environments() -> None:
    """Tell gymnasium the ids; importing ``agilerl.envs`` does."""
    for name, entry_point in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point)
