import math

import numpy as np
import pytest

from agilerl.envs import GuessTheNumber
from agilerl.errors import EnvError
from agilerl.models.tiny import tiny_model_path


def play(env, seed, policy):
    """Return the observations, the reward and the last info of a game."""
    observation, _ = env.reset(seed=seed)
    seen, rewards, over = [observation], [], False
    while not over:
        observation, reward, over, truncated, info = env.step(policy(env))
        assert not truncated
        seen.append(observation)
        rewards.append(reward)
    assert rewards[:-1] == [0.0] * (len(rewards) - 1)
    assert len(rewards) <= env.max_turns
    assert info["success"] is (rewards[-1] == 1.0)
    return seen, rewards[-1], info


def best(env):
    return env.best_action()


def anything(rng):
    return lambda env: str(rng.integers(1, env.max_number + 1))


GAMES = [
    GuessTheNumber,
    lambda: GuessTheNumber(20, max_turns=3),
]


@pytest.mark.parametrize("make", GAMES)
def test_returns_of_best_and_random_play_are_as_stated(make):
    env, count, rng = make(), 600, np.random.default_rng(0)
    best_return = sum(play(env, seed, best)[1] for seed in range(count)) / count
    random_return = sum(play(env, seed, anything(rng))[1] for seed in range(count)) / count
    error = 4 * 0.5 / math.sqrt(count)
    assert best_return == pytest.approx(env.best_return, abs=0 if env.best_return == 1.0 else error)
    assert random_return == pytest.approx(env.random_return, abs=error)
    assert env.reset(seed=0)[1] == {"best_return": env.best_return, "random_return": env.random_return}


@pytest.mark.parametrize("make", GAMES)
def test_a_game_is_a_function_of_the_seed_and_resets_count_on(make):
    env, other = make(), make()
    games = [play(env, seed, best) for seed in range(10)]
    assert [play(other, seed, best) for seed in reversed(range(10))] == games[::-1]
    assert len({str(game) for game in games}) > 1
    env.reset(seed=4)
    assert env.reset()[0] == other.reset(seed=5)[0]


def test_order_of_calls_and_seeds():
    env = GuessTheNumber()
    with pytest.raises(EnvError, match="has not begun"):
        env.step("1")
    play(env, 0, best)
    with pytest.raises(EnvError, match="is over"):
        env.step("1")
    assert env.reset(seed=2**70)[0]  # of any size


# -- guess the number -------------------------------------------------------------------------------------------------


def test_halving_finds_every_number_and_one_guess_less_does_not():
    for most in (2, 9, 15, 16, 100):
        env = GuessTheNumber(most)
        assert env.max_turns == math.floor(math.log2(most)) + 1
        assert env.best_return == 1.0
        assert GuessTheNumber(most, max_turns=env.max_turns - 1).best_return < 1.0
    # Three guesses settle 7 of 9 numbers: 2 ** 3 - 1.
    assert GuessTheNumber(9, max_turns=3).best_return == pytest.approx(7 / 9)
    assert GuessTheNumber(9).random_return == pytest.approx(1 - (8 / 9) ** 4)
    assert GuessTheNumber(3, max_turns=10_000).best_return == 1.0


def of_number(number, **settings):
    """Return a game of 1 to 9 in which the number is known."""
    for seed in range(1000):
        env = GuessTheNumber(9, **settings)
        env.reset(seed=seed)
        if env.step(str(number))[1] == 1.0:
            assert env.reset(seed=seed)[0]
            return env
    raise AssertionError("no such game")


@pytest.mark.parametrize(
    ("style", "answers"),
    [("range", ["6-9", "6-9", "6-7", "="]), ("hint", ["h", "?", "l", "="])],
)
def test_hints_of_the_compact_styles(style, answers):
    env = of_number(7, style=style)
    assert [env.step(guess)[0] for guess in ("5", "none", "8", "7")] == answers


def test_the_last_guess_shows_that_none_is_left():
    env = of_number(7)
    steps = [env.step(guess) for guess in ("1", "1", "1", "1")]
    assert [step[0] for step in steps] == ["2-9", "2-9", "2-9", "x"]
    assert [step[2] for step in steps] == [False, False, False, True]
    assert steps[-1][1] == 0.0
    assert steps[-1][4] == {"valid": True, "success": False}


def test_verbose_sentences():
    env = of_number(7, style="verbose", max_turns=3)
    assert env.reset(seed=0)[0].startswith("I have chosen a whole number from 1 to 9. Find it in at most 3 guesses.")
    env = of_number(7, style="verbose", max_turns=3)
    assert env.step("5? I take 3")[0] == "It is higher than 3. Guesses left: 2."
    assert env.step("ten")[0] == (
        "That is not a guess: I need a whole number from 1 to 9 as the last number of your answer. Guesses left: 1."
    )
    assert env.step("Then 8.")[0] == "It is lower than 8. No guess is left."


@pytest.mark.parametrize("action", ["", "0", "10", "x", "9" * 5000, "٣", "-", "seven"])
def test_what_is_no_guess_costs_a_turn_and_tells_nothing(action):
    env = of_number(7)
    assert env.step(action) == ("1-9", 0.0, False, False, {"valid": False})
    assert env.best_action() == "5"


@pytest.mark.parametrize("action", ["7", " 7\n", "07", "first 3, no: 7", "7."])
def test_the_last_run_of_digits_is_the_guess(action):
    assert of_number(7).step(action)[1] == 1.0


def test_the_embedded_model_can_read_and_say_everything():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    for style in ("range", "hint", "verbose"):
        env = GuessTheNumber(style=style)
        for text in [*play(env, 3, best)[0], *map(str, range(1, env.max_number + 1))]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= 9 or env.observation_space.max_length > 9
