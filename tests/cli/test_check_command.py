"""``agilerl check``: sentences, exit codes and JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.outcome import Outcome
from tests.cli.test_start import started

Agilerl = Callable[..., Outcome]

MINE = """
import random


class Mine:
    max_turns = 2

    def __init__(self, most=9, words=()):
        self.most, self.words = most, words

    def reset(self, seed=None):
        self.turn, self.draws = 0, random.Random(seed)
        return str(self.draws.randint(1, self.most)), {}

    def step(self, action):
        self.turn += 1
        return str(self.draws.randint(1, self.most)), 0.5, self.turn == self.max_turns, False, {}


class Bad(Mine):
    def reset(self, seed=None):
        return str(random.randint(1, 10 ** 9)), {}

    def step(self, action):
        return "1", float("nan"), True, False, {}
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> None:
    (tmp_path / "my_checked_env.py").write_text(MINE, encoding="utf-8")


def test_a_sound_environment(agilerl: Agilerl) -> None:
    outcome = agilerl("check", "my_checked_env:Mine", "most=5", "words=[a, b]", "--tokenizer", "embedded")
    assert (outcome.code, outcome.output, outcome.errors) == (0, "my_checked_env:Mine: nothing wrong\n", "")
    assert agilerl("check", "agilerl/GuessTheNumber-v0", "max_number=5").code == 0


def test_a_class_in_a_file_as_a_manifest_names_it(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(MINE, encoding="utf-8")
    for name in ("elsewhere/mine.py:Mine", f"{tmp_path}/elsewhere/mine.py:Mine"):
        assert agilerl("check", name, "most=5") == Outcome(0, f"{name}: nothing wrong\n", "")
    assert agilerl("check", "elsewhere/mine.py:Bad").code == 1


def test_errors_are_sentences_and_exit_code_1(agilerl: Agilerl) -> None:
    outcome = agilerl("check", "my_checked_env:Bad")
    assert outcome.code == 1
    assert outcome.output.startswith("error: expected the reward of step to be a finite float, found nan [reward]\n")
    assert outcome.output.endswith("my_checked_env:Bad: 1 error\n")
    found = json.loads(agilerl("check", "my_checked_env:Bad", "--json").output)
    assert found["ok"] is False
    assert [finding["code"] for finding in found["findings"]] == ["reward"]


def test_warnings_alone_are_exit_code_0(agilerl: Agilerl) -> None:
    outcome = agilerl("check", "my_checked_env:Mine", "most=1")
    assert outcome.code == 0
    assert "[same-episodes]" in outcome.output
    assert outcome.output.endswith(": 1 warning\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my_checked_env:Nobody"], "expected Nobody in my_checked_env, found Mine, Bad"),
        (["my_checked_env:Mine", "least=1"], "cannot be made with least=1: TypeError"),
        (["my_checked_env:Mine", "most"], "expected key=value as a setting of the environment, found 'most'"),
        (["my_checked_env:Mine", "most=["], "the value of most cannot be read as YAML"),
        (["my_checked_env.py:Nobody"], "expected Nobody in my_checked_env.py, found Mine, Bad"),
        (["my_checked_env.py:Mine", "least=1"], "cannot be made with least=1: TypeError"),
        (["my_checked_env.py"], "expected path.py:name or module:name"),
        (["absent.py:Mine"], "cannot be loaded: FileNotFoundError"),
        (["nothing_of_that_name:Env"], "No module named 'nothing_of_that_name'"),
        (["absent.yaml"], "absent.yaml"),
        (["m.yaml", "--tokenizer", "embedded"], "--tokenizer is for environments"),
    ],
)
def test_what_cannot_be_read_is_exit_code_2(arguments: list[str], words: str, agilerl: Agilerl) -> None:
    outcome = agilerl("check", *arguments)
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.startswith("error: ")
    assert outcome.errors.count("\n") == 1
    assert words in outcome.errors


@pytest.mark.model
def test_a_manifest_is_checked_as_by_a_dry_run(agilerl: Agilerl, tmp_path: Path) -> None:
    manifest = tmp_path / "run.yaml"
    manifest.write_text("training: {pop_size: 2}\n", encoding="utf-8")
    shown = agilerl("check", "run.yaml").output
    assert re.fullmatch(r"prompt  .+\nanswer  .+, reward [01]\s+run.yaml: nothing wrong\n", shown, re.DOTALL)
    assert json.loads(agilerl("check", "run.yaml", "--json").output) == {
        "target": "run.yaml",
        "ok": True,
        "findings": [],
    }
    (tmp_path / "reward.py").write_text("def reward(completion, answer):\n    return 1 / (ord(completion[-1]) % 4)\n")
    manifest.write_text("environment: {graders: [{name: 'reward.py:reward'}]}\n", encoding="utf-8")
    found = agilerl("check", "run.yaml", "--allow-code")
    assert re.search(r"warning: \d+ of 128 answers got no grade, the first, '.{1,40}', because ", found.output)
    assert "reward raised ZeroDivisionError: division by zero (reward.py:2)" in found.output
    assert (found.code, found.output.splitlines()[-1]) == (0, "run.yaml: 1 warning")
    dry = agilerl("train", "run.yaml", "--allow-code", "--dry-run").output
    assert re.search(r"base +mean reward 0\.\d+ of (?!128)\d+ graded answers,", dry)
    manifest.write_text("training: {popsize: 2}\n", encoding="utf-8")
    checked, dry = agilerl("check", "run.yaml"), agilerl("train", "run.yaml", "--dry-run")
    assert (checked.code, checked.errors) == (2, dry.errors)
    wrong = agilerl("check", "run.yaml", "training.pop_size=-1")
    assert wrong.code == 2


@pytest.mark.processes
def test_help_is_quick_and_says_that_code_is_run(agilerl: Agilerl, tmp_path: Path) -> None:
    code, _, modules, _ = started("check", "--help", cwd=tmp_path)
    assert code == 0
    assert modules.isdisjoint({"torch", "transformers", "gymnasium", "textarena", "gem", "openenv"})
    assert "so their code runs" in " ".join(agilerl("check", "--help").output.split())
