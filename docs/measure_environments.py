"""Measure the table of docs/environments.md: ``python docs/measure_environments.py``."""

from collections.abc import Callable, Iterator

import numpy as np

from agilerl.envs import GridNavigation, GuessTheNumber, Mastermind, TextEnv, TicTacToe
from agilerl.envs.games import Game

EPISODES = 2000
GAMES: dict[str, Callable[[], Game]] = {
    "`agilerl/GuessTheNumber-v0`": GuessTheNumber,
    "... `max_number=100`": lambda: GuessTheNumber(100),
    "`agilerl/Mastermind-v0`": Mastermind,
    "... `length=3, digits=6`": lambda: Mastermind(3, 6),
    "`agilerl/TicTacToe-v0`": TicTacToe,
    '... `opponent="minimax"`': lambda: TicTacToe("minimax"),
}


def episode_return(env: TextEnv, seed: int, policy: Callable[[str], str]) -> float:
    """Play one episode."""
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy(str(observation)))
        total, over = total + reward, terminated or truncated
    return total


def mean_returns(env: TextEnv, best: Callable[[str], str], legal: Callable[[], list[str]]) -> tuple[float, float]:
    """Return the mean return of perfect and of random play over the seeds 0 to EPISODES - 1."""
    draws = np.random.default_rng(0)
    perfect = [episode_return(env, seed, best) for seed in range(EPISODES)]
    random = [episode_return(env, seed, lambda _: str(draws.choice(legal()))) for seed in range(EPISODES)]
    return sum(perfect) / EPISODES, sum(random) / EPISODES


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| id | most turns | perfect play | random play | random, exactly |"
    yield "| --- | --- | --- | --- | --- |"
    for name, make in GAMES.items():
        env = make()
        perfect, random = mean_returns(
            env, lambda _, env=env: env.best_action(), lambda env=env: [*env.legal_actions()]
        )
        yield f"| {name} | {env.max_turns} | {perfect:.3f} | {random:.3f} | {env.random_return:.3f} |"
    grid = GridNavigation()
    perfect, random = mean_returns(grid, grid.best_action, lambda: ["1", "2", "3"])
    yield f"| `agilerl/GridNavigation-v0` | {grid.max_turns} | {perfect:.3f} | {random:.3f} | |"


if __name__ == "__main__":
    print("\n".join(table()))
