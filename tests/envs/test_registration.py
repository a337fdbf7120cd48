import gymnasium
from gymnasium.utils.env_checker import check_env

import agilerl.envs  # noqa: F401
from agilerl.envs import ENVIRONMENTS, GuessTheNumber


def test_gymnasium_makes_the_game_and_finds_nothing_wrong():
    env = gymnasium.make("agilerl/GuessTheNumber-v0")
    assert isinstance(env.unwrapped, GuessTheNumber)
    check_env(env.unwrapped)  # warnings are errors here
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space


def test_all_are_registered_and_settings_reach_them():
    assert set(ENVIRONMENTS) <= set(gymnasium.registry)
    assert gymnasium.make("agilerl/GuessTheNumber-v0", max_number=5).reset(seed=0)[0] == "1-5"
