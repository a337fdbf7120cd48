"""check_env names each fault, and only that one."""

import random
import time
import types
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Text

from agilerl.envs import GuessTheNumber, TextEnv, check
from agilerl.envs.check import check_env
from agilerl.streams import stream
from agilerl.utils.probe_envs_llm import ConstantTargetEnv, GridNavigationEnv
from tests.envs.conftest import TEMPLATE, make_tokenizer


class Sound(TextEnv):
    """Nothing is wrong with it: three turns, each pays for repeating the last digit."""

    max_turns = 3
    observation_space = Text(20, charset="0123456789")
    action_space = Text(3, charset="0123456789")

    def reset(self, *, seed=None, options=None):
        self.turn, self.seed = 0, seed or 0
        return self.observe(), {}

    def observe(self):
        return str(stream(self.seed, "sound", self.turn).integers(1000))

    def step(self, action):
        if self.turn == self.max_turns:
            raise RuntimeError("over")
        right = float(action[-1:] == self.observe()[-1])
        self.turn += 1
        return self.observe(), right, self.turn == self.max_turns, False, {}


def changed(**methods):
    """Return a Sound environment with other attributes."""
    return type("Changed", (Sound,), methods)


def step_with(**changes):
    """Return a ``step`` whose five-tuple has some entries replaced."""
    names = ("observation", "reward", "terminated", "truncated", "info")

    def step(self, action):
        return tuple(changes.get(name, value) for name, value in zip(names, Sound.step(self, action)))

    return step


def fails(*_, **__):
    raise KeyError("lost")


def no_digits(self, action):
    int(action)
    return Sound.step(self, action)


def forgets_to_begin(self, *, seed=None, options=None):
    self.turn = getattr(self, "turn", 0) % 2
    self.seed = seed or 0
    return self.observe(), {}


def sleeps(self, action):
    time.sleep(0.06)
    return Sound.step(self, action)


class Counter(Sound):
    made: ClassVar[int] = 0

    def __init__(self):
        Counter.made += 1
        self.number = Counter.made

    def observe(self):
        return str(1000 * self.number + self.seed)


FAULTS = [
    (changed(max_turns=0), "max-turns", "1 or more, found 0"),
    (changed(max_turns=2.0), "max-turns", "found 2.0"),
    (changed(reset=fails), "reset-raises", r"reset\(seed=0\) failed: KeyError: 'lost'"),
    (changed(reset=lambda self, **_: "a"), "reset-shape", r"\(observation, info\), found a str: 'a'"),
    (changed(reset=lambda self, **_: (7, {})), "observation", r"observation of reset .* text, .* found a int: 7"),
    (changed(reset=lambda self, **_: ("7", None)), "info", r"info of reset .* dict, found a NoneType"),
    (changed(system_prompt=["x"]), "system-prompt", "text or None, found a list of 1"),
    (changed(observation_space=None), "no-space", "expected an observation_space"),
    (changed(observation_space=Text(1, charset="a")), "outside-space", "observation of reset .*Text"),
    (changed(step=step_with(observation="seven")), "outside-space", "observation of step .* found 'seven'"),
    (changed(step=lambda self, action: ("1", 0.0, False)), "step-shape", "found a tuple of 3"),
    (changed(step=fails), "step-raises", "failed in turn 1: KeyError"),
    (changed(step=step_with(observation=None)), "observation", "observation of step to be text"),
    (changed(step=step_with(reward=float("nan"))), "reward", "finite float, found nan"),
    (changed(step=step_with(reward="1")), "reward", "found '1'"),
    (changed(step=step_with(reward=None)), "reward", "found None"),
    (changed(step=step_with(reward=True)), "reward", "found True"),
    (changed(step=step_with(terminated=0)), "flag", r"terminated .* True or False, found 0"),
    (changed(step=step_with(truncated="no")), "flag", r"truncated .* True or False"),
    (changed(step=step_with(info=[])), "info", "info of step to be a dict"),
    (changed(step=step_with(terminated=False)), "never-ends", "max_turns = 3 actions"),
    (changed(observe=lambda self: str(random.randint(0, 10**6))), "not-pure", "seed 0 differs when it is played again"),
    (changed(reset=forgets_to_begin), "not-pure", "function of seed and actions"),
    (Counter, "not-pure", r"new instance: turn 0 gave"),
    (changed(observe=lambda self: "1"), "same-episodes", "seeds 0 to 7"),
    (changed(step=no_digits), "odd-action", r"step\(''\) failed: ValueError"),
    (changed(max_turns=1, step=sleeps), "slow", r"a step takes 0\.1 s"),
    (changed(close=fails), "close-raises", "close.*KeyError"),
]


@pytest.mark.parametrize(
    ("broken", "code", "words"), FAULTS, ids=[f"{code}-{i}" for i, (_, code, _) in enumerate(FAULTS)]
)
def test_each_fault_is_named(broken, code, words, monkeypatch):
    monkeypatch.setattr(check, "SLOW", 0.05)
    findings = check_env(broken)
    assert {finding.code for finding in findings} == {code}
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(str(findings[0]))
    levels = {"same-episodes": "warning", "slow": "warning"}
    assert {finding.level for finding in findings} == {levels.get(code, "error")}
    assert str(findings[0]) == f"{findings[0].level}: {findings[0].sentence} [{code}]"


def test_nothing_is_wrong_with_a_sound_one():
    assert check_env(Sound) == check_env(Sound()) == check_env(lambda: Sound()) == []
    assert check_env(changed(step=step_with(truncated=np.False_, reward=np.float32(0.5)))) == []
    assert check_env(GuessTheNumber) == check_env(gymnasium.make("agilerl/GuessTheNumber-v0")) == []
    for ours in (
        partial(GuessTheNumber, 20, style="hint"),
        partial(GuessTheNumber, 100, style="verbose"),
        GridNavigationEnv,
    ):
        assert [finding for finding in check_env(ours) if finding.level == "error"] == []


@pytest.mark.parametrize("make", [GuessTheNumber, ConstantTargetEnv, GridNavigationEnv])
def test_episodes_of_two_instances_do_not_disturb_each_other(make):
    def episode(envs):
        """Play both at the same time, turn by turn, with the same action."""
        seen = [[env.reset(seed=seed)[0]] for seed, env in envs]
        for turn in range(envs[0][1].max_turns):
            for steps, (_, env) in zip(seen, envs):
                if len(steps) == turn + 1 and (turn == 0 or not steps[-1][2]):
                    steps.append(env.step("123"[turn % 3]))
        return seen

    together = episode([(0, make()), (1, make())])
    assert together == [*episode([(0, make())]), *episode([(1, make())])]


def test_a_step_after_the_end_should_raise():
    def step(self, action):
        self.turn = min(self.turn, 2)
        return Sound.step(self, action)

    assert [finding.code for finding in check_env(changed(step=step))] == ["step-after-end"]


@pytest.mark.parametrize("kept", ["secret", "nested", "generator"])
def test_a_secret_that_no_random_action_finds_is_no_reason_to_warn(kept):
    """All that is said depends on whether the one right word is guessed."""

    class Secret:
        max_turns = 2

        def reset(self, seed=None):
            self.turn, self.seed, self.draws = 0, seed, random.Random(seed)
            if kept != "generator":
                word = "".join(self.draws.choices("abcdefgh", k=8))
                self.secret = word if kept == "secret" else {"words": [types.SimpleNamespace(word=word)]}
            return "Which word?", {}

        def step(self, action):
            self.turn += 1
            right = kept == "secret" and action == self.secret
            return "Yes" if right else "No", float(right), right or self.turn == self.max_turns, False, {}

    found = [finding.code for finding in check_env(Secret)]
    assert found == (["same-episodes"] if kept == "generator" else [])


def test_what_cannot_be_made():
    for given, words in ((3, "no attribute 'reset'"), (lambda: 1 / 0, "ZeroDivisionError"), (lambda: None, "NoneType")):
        [finding] = check_env(given)
        assert finding.code == "not-an-environment"
        assert words in finding.sentence


def test_the_tokenizer_is_checked_too(tokenizer, tokenizer_without_system_role):
    assert check_env(Sound, tokenizer) == []
    spoken = changed(system_prompt="Count.")
    assert check_env(spoken, tokenizer) == []
    [finding] = check_env(spoken, tokenizer_without_system_role)
    assert finding.code == "template"
    assert "System role not supported" in finding.sentence
    forgetful = make_tokenizer(TEMPLATE.replace("m['content'] }}", "m['content'].split('</think>')[-1].strip() }}"))
    assert [(f.level, f.code) for f in check_env(Sound, forgetful)] == [("warning", "template-rewrites")]
    assert check_env(changed(max_turns=1), forgetful) == []


def test_characters_that_the_tokenizer_does_not_know():
    from transformers import AutoTokenizer

    from agilerl.models.tiny import tiny_model_path

    tiny = AutoTokenizer.from_pretrained(tiny_model_path())
    greek = changed(observe=lambda self: "α" * (1 + self.seed % 19), observation_space=Text(20, charset="α"))
    [finding] = check_env(greek, tiny)
    assert (finding.level, finding.code) == ("warning", "unknown-characters")
    assert check_env(GuessTheNumber, tiny) == []
