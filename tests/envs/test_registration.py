import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agilerl.envs  # noqa: F401
from agilerl.envs import ENVIRONMENTS, GridNavigation, GuessTheNumber, TextEnv

GAMES = {
    "agilerl/GuessTheNumber-v0": GuessTheNumber,
    "agilerl/GridNavigation-v0": GridNavigation,
}


@pytest.mark.parametrize("name", GAMES)
def test_gymnasium_makes_them_and_finds_nothing_wrong(name):
    env = gymnasium.make(name)
    assert isinstance(env.unwrapped, GAMES[name])
    check_env(env.unwrapped)  # warnings are errors here
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space


def test_all_are_registered_and_settings_reach_them():
    assert set(GAMES) <= set(ENVIRONMENTS) <= set(gymnasium.registry)
    assert gymnasium.make("agilerl/GuessTheNumber-v0", max_number=5).reset(seed=0)[0] == "1-5"
    assert issubclass(GridNavigation, TextEnv)
