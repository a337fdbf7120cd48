import random
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete, Text
from gymnasium.wrappers import TimeLimit, TransformObservation

from agilerl.envs import GuessTheNumber, TextEnv
from agilerl.envs.adapters import AnyText, as_text_env, make_env
from agilerl.envs.adapters.base import GymnasiumText
from agilerl.envs.check import check_env
from agilerl.errors import ConfigError, EnvError
from agilerl.streams import stream


class Counting:
    """The documented protocol and no more: say the number after the one you see."""

    max_turns = 3
    system_prompt = "Count."

    def __init__(self, start=0):
        self.start = start
        self.closed = False

    def reset(self, seed=None):
        self.number = self.start + int(stream(seed, "counting").integers(10))
        return str(self.number), {"start": self.number}

    def step(self, action):
        right = action == str(self.number + 1)
        self.number += 1
        return str(self.number), float(right), False, False, {}

    def close(self):
        self.closed = True


class Echo(gymnasium.Env):
    """A gymnasium environment of text."""

    observation_space = Text(10, min_length=0, charset="0123456789")
    action_space = Text(10, charset="0123456789")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return str(self.np_random.integers(1000)), {}

    def step(self, action):
        return "1", 1.0, action == "9", False, {}


class Discreet(Echo):
    action_space = Discrete(3)


def steps(env, seed, actions):
    """Return the first observation and all five-tuples."""
    found = [env.reset(seed=seed)[0]]
    for action in actions:
        found.append(env.step(action))
        if found[-1][2] or found[-1][3]:
            break
    return found


# -- plain classes ----------------------------------------------------------------------------------------------------


def test_a_plain_class_becomes_an_environment():
    inner = Counting()
    env = as_text_env(inner)
    assert isinstance(env, TextEnv)
    assert (env.max_turns, env.system_prompt, env.tools) == (3, "Count.", ())
    first, info = env.reset(seed=3)
    assert info == {"start": int(first)}
    assert env.step(str(int(first) + 1)) == (str(int(first) + 1), 1.0, False, False, {})
    env.step("x")
    assert env.step("x")[2:4] == (False, True)  # Counting itself never ends
    with pytest.raises(EnvError, match="of Counting "):
        env.step("x")
    env.close()
    assert inner.closed
    assert check_env(Counting) == []
    assert "PlainEnv(Counting, max_turns=3)" in repr(env)


def test_a_generator_is_built_only_for_what_draws_globally(monkeypatch):
    monkeypatch.setattr("agilerl.envs.adapters.base.stream", None)
    env = as_text_env(Counting())
    assert steps(env, 0, ["x"])[1:]


def test_the_argument_wins_over_what_the_class_says():
    env = as_text_env(Counting(), max_turns=1)
    assert steps(env, 0, ["x", "x"])[1:] == [(env.inner.number and str(env.inner.number), 0.0, False, True, {})]


def test_episodes_without_a_seed_count_on():
    env = as_text_env(Counting())
    assert [env.reset()[0] for _ in range(3)] == [env.reset(seed=seed)[0] for seed in range(3)]


class NoLimit(Counting):
    max_turns = None


class NeedsMore(Counting):
    def reset(self, more):
        return "", {}


class NoAction(Counting):
    def step(self):
        return "", 0.0, True, False, {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (NoLimit(), r"NoLimit: expected a whole number for max_turns, found None; .*as_text_env\(..., max_turns=...\)"),
        (NeedsMore(), r"NeedsMore, whose reset does not fit.* 'more'"),
        (NoAction(), r"NoAction, whose step does not fit"),
        (Counting, r"Counting.*whose reset does not fit: missing a required argument: 'self'"),
        (3, r"found 3, whose reset does not fit: .*no attribute 'reset'"),
        (Discreet(), r"Discreet is Discrete\(3\)"),
        (Echo(), r"Echo: expected .* for max_turns"),
    ],
)
def test_what_is_no_environment_is_said(given, words):
    with pytest.raises(ConfigError, match=words):
        as_text_env(given)


# -- gymnasium --------------------------------------------------------------------------------------------------------


def test_a_text_env_is_itself_also_out_of_gymnasium_make():
    env = GuessTheNumber()
    assert as_text_env(env) is env
    assert as_text_env(env, max_turns=4) is env
    made = gymnasium.make("agilerl/GuessTheNumber-v0", max_number=5)
    assert as_text_env(made) is made.unwrapped
    assert as_text_env(env, max_turns=2).max_turns == 2


def test_wrappers_of_the_user_stay():
    wrapped = TransformObservation(GuessTheNumber(style="verbose"), lambda text: f"> {text}", None)
    env = as_text_env(wrapped)
    assert isinstance(env, GymnasiumText)
    assert env.max_turns == 4
    assert steps(env, 0, ["1"])[0].startswith("> I have chosen")
    short = as_text_env(TimeLimit(GuessTheNumber(style="hint"), 2))
    assert [step[3] for step in steps(short, 3, ["1", "1", "1"])[1:]] == [False, True]


def test_any_gymnasium_environment_of_text():
    env = as_text_env(Echo(), max_turns=5)
    assert env.observation_space is Echo.observation_space
    assert steps(env, 7, ["1", "9"]) == [
        env.reset(seed=7)[0],
        ("1", 1.0, False, False, {}),
        ("1", 1.0, True, False, {}),
    ]
    assert len(steps(env, 7, ["1"] * 9)) == 1 + 5
    gymnasium.register("agilerl-tests/Echo-v0", entry_point=Echo, max_episode_steps=3)
    assert as_text_env(gymnasium.make("agilerl-tests/Echo-v0")).max_turns == 3


def test_wrappers_hide_the_sampled_tokens():
    class ByTokens(GuessTheNumber):
        def step_ids(self, action, token_ids):
            return self.step(action)

    assert as_text_env(ByTokens())
    with pytest.raises(ConfigError, match="reads the sampled tokens"):
        as_text_env(TimeLimit(ByTokens(), 3))


def test_any_text_holds_text_only():
    space = AnyText("[{}]")
    assert "" in space
    assert "\U0001f642" in space
    assert 3 not in space
    space.seed(0)
    sample = space.sample()
    assert sample[0] + sample[-1] == "[]"
    assert all(0 <= int(number) <= 20 for number in sample[1:-1].split())


# -- names ------------------------------------------------------------------------------------------------------------


def test_environments_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_counting_env.py").write_text(
        "from tests.envs.test_adapters import Counting\n\nclass Mine(Counting):\n    max_turns = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env("my_counting_env:Mine", start=100).max_turns == 7
    assert make_env(f"{tmp_path / 'my_counting_env.py'}:Mine").max_turns == 7
    assert int(make_env("my_counting_env:Mine", start=100).reset(seed=0)[0]) >= 100
    assert make_env("agilerl/GuessTheNumber-v0", max_number=5).max_number == 5


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("agilerl/Nothing-v0", {}, r"agilerl/Nothing-v0 .* NameNotFound"),
        ("agilerl.envs.games:Chess", {}, "expected Chess in agilerl.envs.games, found"),
        ("nothing_like_it:Env", {}, r"ModuleNotFoundError: No .* 'nothing_like_it'"),
        ("agilerl.envs.games:GuessTheNumber", {"most": 3}, "with most=3: TypeError"),
        ("agilerl.envs:ENVIRONMENTS", {}, "to be a function or a class"),
    ],
)
def test_names_that_make_nothing(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        make_env(name, **settings)


# -- GEM and textarena, the real packages -----------------------------------------------------------------------------


def foreign(name, **settings):
    """Make a game of another package, or skip the test where that is not installed."""
    package = name.partition(":")[0]
    pytest.importorskip(package, reason=f"the package {package} is not installed; make setup installs it")
    return make_env(name, **settings)


def halve(env, seed, form):
    """Play guess the number by its hints; return the rewards."""
    observation, _ = env.reset(seed=seed)
    low, high, rewards, over = 1, 20 if "1 and 20" in observation else 10, [], False
    while not over:
        guess = (low + high) // 2
        observation, reward, terminated, truncated, _ = env.step(form.format(guess))
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        over = terminated or truncated
        rewards.append(reward)
    return rewards


@pytest.mark.parametrize(
    ("name", "form"), [("gem:game:GuessTheNumber-v0-easy", "\\boxed{{{}}}"), ("textarena:GuessTheNumber-v0", "[{}]")]
)
def test_foreign_games_are_won_by_their_hints(name, form):
    env = foreign(name)
    games = [halve(env, seed, form) for seed in range(12)]
    assert all(game[-1] == 1.0 and set(game[:-1]) <= {0.0} for game in games)
    assert len({len(game) for game in games}) > 1


FOREIGN = {
    "gem:game:GuessTheNumber-v0-easy": ["\\boxed{3}", "\\boxed{5}", "\\boxed{8}", "\\boxed{9}"],
    "gem:game:Mastermind-v0-easy": ["\\boxed{1 2}", "\\boxed{3 4}"] * 5,
    "gem:game:Minesweeper-v0-easy": [f"\\boxed{{reveal {n // 5} {n % 5}}}" for n in range(25)],
    "gem:game:Sudoku-v0-easy": [f"\\boxed{{{n % 4 + 1} {n // 4 + 1} {n % 3 + 1}}}" for n in range(15)],
    "textarena:GuessTheNumber-v0": [f"[{n}]" for n in range(1, 11)],
    "textarena:Mastermind-v0": ["[1 2 3 4]", "[3 4 5 6]"] * 10,
    "textarena:FrozenLake-v0-random": ["[right]", "[down]", "[up]", "[left]"] * 5,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_games_are_functions_of_the_seed_and_leave_the_global_generators_alone(name):
    settings = {"max_turns": 9} if "FrozenLake" in name else {}
    env, other, actions = foreign(name, **settings), foreign(name, **settings), FOREIGN[name]
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    played = [steps(env, seed, actions) for seed in range(8)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert [steps(other, seed, actions) for seed in reversed(range(8))] == played[::-1]
    assert len({str(game) for game in played}) > 1
    assert all(isinstance(game[0], str) and game[0] for game in played)
    assert all(game[-1][2] or game[-1][3] for game in played)
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(lambda seed: steps(foreign(name, **settings), seed, actions), range(8)))
    assert threads == played


def test_observations_of_textarena_are_what_is_new():
    env = foreign("textarena:GuessTheNumber-v0")
    first, hint = (steps(env, 0, ["[1]"])[0], steps(env, 0, ["[1]"])[1][0])
    assert first.startswith("You are Player 0. You are playing Guess The Number.")
    assert hint == "The target number is higher."
    assert steps(env, 0, ["nonsense"] * 3)[-1][4]["invalid_move"]  # the second invalid move in a row ends it
    assert steps(env, 0, ["[1]"])[0] == first  # nothing is left over from the games before


def test_limits_of_textarena():
    assert foreign("textarena:GuessTheNumber-v0").max_turns == 10
    short = foreign("textarena:GuessTheNumber-v0", max_turns=3)
    assert "within 3 turns" in short.reset(seed=0)[0]
    with pytest.raises(ConfigError, match=r"FrozenLakeEnv: .*max_turns"):
        foreign("textarena:FrozenLake-v0")
    assert foreign("textarena:FrozenLake-v0", max_turns=5).max_turns == 5
    with pytest.raises(ConfigError, match="TicTacToeEnv"):
        foreign("textarena:TicTacToe-v0", max_turns=9).reset(seed=0)


def test_what_gem_says_besides_is_part_of_the_observation():
    env = foreign("gem:game:Minesweeper-v0-easy")
    first, second, *_ = [step if isinstance(step, str) else step[0] for step in steps(env, 0, ["\\boxed{reveal 0 0}"])]
    assert "current board layout" in first
    assert first.endswith("Enter your guess.")
    assert second.endswith("Enter your guess.") or "mine" in second


def test_instances_of_the_foreign_packages_are_known():
    gem = pytest.importorskip("gem", reason="gem is not installed; make setup installs it")
    textarena = pytest.importorskip("textarena", reason="textarena is not installed; make setup installs it")
    pytest.importorskip("gem.envs", reason="gem is not installed; make setup installs it")
    assert as_text_env(gem.make("game:Sudoku-v0-easy")).max_turns == 15
    assert as_text_env(textarena.make("Mastermind-v0")).max_turns == 20
    assert as_text_env(textarena.make("Mastermind-v0-raw"), max_turns=4).max_turns == 4
