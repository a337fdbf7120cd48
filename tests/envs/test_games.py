import math

import numpy as np
import pytest

from agilerl.envs import GuessTheNumber, Mastermind, TicTacToe
from agilerl.envs.games import _codes, _guesses_needed, _pegs
from agilerl.errors import ConfigError, EnvError
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
    return lambda env: rng.choice(env.legal_actions())


GAMES = [
    GuessTheNumber,
    lambda: GuessTheNumber(20, max_turns=3),
    Mastermind,
    lambda: Mastermind(3, 4, max_turns=3),
    TicTacToe,
    lambda: TicTacToe(begins="O"),
    lambda: TicTacToe("minimax"),
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


@pytest.mark.parametrize("make", [GuessTheNumber, Mastermind, TicTacToe])
def test_order_of_calls_and_seeds(make):
    env = make()
    with pytest.raises(EnvError, match="has not begun"):
        env.step("1")
    for seed in (-1, 1.5, "0", True):
        with pytest.raises(ConfigError, match=r"0 or more.* for seed"):
            env.reset(seed=seed)
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


def test_numbers_are_uniform():
    env = GuessTheNumber(4, max_turns=1)
    found = [play(env, seed, lambda _: "2")[1] for seed in range(2000)]
    assert sum(found) / 2000 == pytest.approx(0.25, abs=0.04)


def test_the_embedded_model_can_read_and_say_everything():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    for env in (
        GuessTheNumber(),
        GuessTheNumber(style="hint"),
        GuessTheNumber(style="verbose"),
        Mastermind(),
        TicTacToe(),
    ):
        for text in [*play(env, 3, best)[0], *env.legal_actions()]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= 9 or env.observation_space.max_length > 9


# -- mastermind -------------------------------------------------------------------------------------------------------


def naive_pegs(guess, code):
    """Strike out what agrees, then look for each digit left among the code's."""
    exact = [a == b for a, b in zip(guess, code)]
    rest = [b for b, same in zip(code, exact) if not same]
    other = 0
    for digit, same in zip(guess, exact):
        if not same and digit in rest:
            rest.remove(digit)
            other += 1
    return 10 * sum(exact) + other


def test_pegs_agree_with_striking_out():
    codes = _codes(3, 4)
    assert len(codes) == 64
    assert _pegs(3, 4).tolist() == [[naive_pegs(guess, code) for code in codes] for guess in codes]


def test_minimax_needs_what_knuth_found():
    # The Computer as Master Mind (1976): at most 5 guesses, 5801 / 1296 = 4.476 on average.
    needed = _guesses_needed(4, 6)
    assert max(needed) == 5
    assert sum(needed) == 5801


def test_answers_and_illegal_guesses():
    env = Mastermind()
    assert env.reset(seed=0)[0] == "2x4"
    code = env._codes[env._code]
    a, b = code
    others = [d for d in "1234" if d not in code]
    assert env.step(f"I guess\n{others[0]} {others[1]}")[0] == "00"
    assert env.step(others[0])[::4] == ("?", {"valid": False})
    assert env.step(others[0] + "5")[::4] == ("?", {"valid": False})
    assert env.step("")[:3] == ("x", 0.0, True)
    env.reset(seed=0)
    assert env.step(b + a)[0] == ("02" if a != b else "=")
    env = Mastermind(verbose=True)
    assert "from 1 to 4" in env.reset(seed=0)[0]
    assert env.step(others[0] * 2)[0] == "Right place: 0. Another place: 0. Guesses left: 3."
    assert env.step(code) == (f"{code} is right.", 1.0, True, False, {"valid": True, "success": True})


# -- tic-tac-toe ------------------------------------------------------------------------------------------------------


def test_perfect_play_never_loses_and_draws_against_perfect_play():
    assert {play(TicTacToe("minimax"), seed, best)[1] for seed in range(50)} == {0.5}
    assert TicTacToe("minimax").best_return == 0.5


def test_random_games_end_as_is_known():
    # Of random games the first player wins 58.49 % and draws 12.70 %: 0.5849 + 0.1270 / 2 = 0.6484.
    first, second = TicTacToe(begins="X").random_return, TicTacToe(begins="O").random_return
    assert first == pytest.approx(0.6484, abs=1e-4)
    assert first + second == pytest.approx(1.0)


def test_both_begin_and_boards_differ():
    boards = [TicTacToe().reset(seed=seed)[0] for seed in range(100)]
    assert 25 < boards.count("123456789") < 75
    assert {board.count("O") for board in boards} == {0, 1}
    assert len(set(boards)) == 10
    assert {TicTacToe(begins="O").reset(seed=seed)[0].count("O") for seed in range(5)} == {1}


def test_moves_and_what_is_none():
    env = TicTacToe(begins="X")
    env.reset(seed=0)
    after, reward, over, _, info = env.step("the middle: 5")
    assert (after[4], after.count("O"), reward, over, info) == ("X", 1, 0.0, False, {"valid": True})
    for action in ("5", "0", "12", "", "X"):
        assert env.step(action)[::4] == (after, {"valid": False})
    verbose = TicTacToe(begins="X", verbose=True)
    assert verbose.reset(seed=0)[0].endswith("1 2 3\n4 5 6\n7 8 9")
    assert verbose.step("0")[0] == "1 2 3\n4 5 6\n7 8 9\nThat is not the number of a free cell."


def test_wins_and_losses_are_seen():
    env = TicTacToe(begins="X", verbose=True)
    ends = {}
    for seed in range(60):
        seen, reward, _ = play(env, seed, lambda env: env.legal_actions()[0])
        ends.setdefault(reward, seen[-1])
    assert ends[1.0].endswith("You win.")
    assert ends[0.0].endswith("You lose.")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GuessTheNumber(1), "2 or more and .* for max_number, found 1"),
        (lambda: GuessTheNumber(9.0), "max_number, found 9.0"),
        (lambda: GuessTheNumber(9, max_turns=0), "max_turns, found 0"),
        (lambda: GuessTheNumber(style="short"), "'range', 'hint', 'verbose' for style, found 'short'"),
        (lambda: Mastermind(length=7), "of 1 or more and at most 6 for length"),
        (lambda: Mastermind(digits=True), "digits"),
        (lambda: Mastermind(5, 5), "at most 1296 codes, found 5 \\*\\* 5 = 3125"),
        (lambda: TicTacToe("me"), "opponent, found 'me'"),
        (lambda: TicTacToe(begins="Y"), "'X', 'O', 'seed'"),
        (lambda: TicTacToe(max_turns=4), "of 5 or more"),
    ],
)
def test_settings_are_checked(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
