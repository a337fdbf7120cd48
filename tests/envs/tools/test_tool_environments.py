"""The registered environments with tools can be solved with their tools, and the format wrapper adds its bonus."""

import json
from typing import Any

import gymnasium
import pytest

from agilerl.envs import register_environments
from agilerl.envs.adapters import as_text_env
from agilerl.envs.check import check_env
from agilerl.envs.probes import GridNavigation
from agilerl.envs.tools import FormatRewardWrapper, PythonTool, ToolEnv, calculator_env, search_env
from agilerl.errors import ConfigError
from tests.envs.tools.family_tokenizers import encoded, hermes

PRIMES = """
a, b = {numbers}
print(sum(n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range(a, b + 1)))
"""


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_environments()


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def question(observation: Any) -> str:
    return observation[-1]["content"]


def calculation(asked: str) -> str:
    return called("calculator", expression=asked.split(":")[1].rstrip("= "))


def program(asked: str) -> str:
    words = asked.split()
    return called("python", code=PRIMES.format(numbers=f"{words[8]}, {words[10]}"))


@pytest.mark.parametrize(
    ("name", "call"),
    [("agilerl/Calculator-v0", calculation), ("agilerl/Python-v0", program)],
    ids=["calculator", "python"],
)
@pytest.mark.processes
def test_a_tool_solves_what_it_is_for(name: str, call: Any) -> None:
    env = as_text_env(gymnasium.make(name, parser="text"))
    assert isinstance(env, ToolEnv)
    for seed in range(3):
        result = env.step(call(question(env.reset(seed=seed)[0])))[0]
        _, reward, terminated, _, info = env.step(f"<answer>{result}</answer>")
        assert (reward, terminated, info["success"], info["tool_errors"]) == (1.0, True, True, 0)


def test_search_finds_the_answers() -> None:
    env = as_text_env(gymnasium.make("agilerl/Search-v0", parser="text", topk=1))
    for seed in range(30):
        asked = question(env.reset(seed=seed)[0])
        words = env.step(called("search", query=asked))[0].replace(".", "").split()
        answers = [words[8], words[13], words[17], words[-1]]  # river, founder, year, goods
        place = next(i for i, part in enumerate(("lie on", "Who", "year", "known for")) if part in asked)
        assert env.step(answers[place])[1] == 1.0


@pytest.mark.parametrize("make", [calculator_env, search_env])
def test_environments_keep_the_protocol(make: Any) -> None:
    assert check_env(lambda: make(parser="text")) == []
    assert check_env(make, hermes()) == []


@pytest.mark.processes
def test_a_program_says_how_it_ended() -> None:
    tool = PythonTool(timeout=1.0)
    assert tool.call({"code": "print(1)\nprint(2)"}).text == "1\n2"
    assert tool.call({"code": "x = 1"}).text == "(nothing was printed)"
    assert "ZeroDivisionError" in tool.call({"code": "print('a')\n1 / 0"}).text
    assert tool.call({"code": "while True: pass"}).text == "(stopped after 1 seconds)"
    assert tool.call({"code": "import sys; sys.exit(3)"}).text == "(ended with status 3)"
    assert tool.call({"program": "1"}).error == "bad_arguments"
    assert tool.schema["function"]["name"] == "python"


# -- the bonus for the form -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<answer>{right}</answer>", 1.0),
        ("<answer>no</answer>", 0.1),
        ("well, <answer>no</answer> it is", 0.1),
        ("no", 0.0),
        ("<answer>no", 0.0),
        ("</answer>no<answer>", 0.0),
    ],
)
def test_a_wrong_answer_in_the_right_form_gets_the_bonus(answer: str, reward: float) -> None:
    env = FormatRewardWrapper(calculator_env(parser="text"))
    env.reset(seed=0)
    right = env.unwrapped._row["answer"]
    assert env.step(called("calculator", expression="1") + "<answer>1</answer>")[1] == 0.0
    assert env.step(answer.format(right=right))[1] == reward


def test_no_bonus_for_an_episode_that_was_cut() -> None:
    env = FormatRewardWrapper(calculator_env(parser="text", max_turns=2), format_bonus=0.5)
    env.reset(seed=0)
    for _ in range(2):
        _, reward, terminated, truncated, _ = env.step(called("calculator", expression="1") + "<answer>1</answer>")
        assert reward == 0.0
    assert (terminated, truncated) == (False, True)


def test_the_wrapper_passes_tokens_and_tools_on() -> None:
    tokenizer = hermes()
    env = FormatRewardWrapper(calculator_env(), 0.2)
    env.bind(tokenizer)
    assert [tool["function"]["name"] for tool in env.tools] == ["calculator"]
    assert env.max_turns == 4
    assert isinstance(env.unwrapped, ToolEnv)
    assert as_text_env(env) is env
    assert env.reset(seed=4) == env.env.reset(seed=4)
    text = called("calculator", expression="2+3")
    assert env.step_ids(text, encoded(tokenizer, text))[0][0]["content"] == "5"
    text = "<answer>x</answer>"
    assert env.step_ids(text, encoded(tokenizer, text))[1] == 0.2
    env.close()


def test_plain_environments_can_be_wrapped() -> None:
    class Correct:
        max_turns = 1

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "x", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {"correct": "right" in action}

        def close(self) -> None: ...

    env = FormatRewardWrapper(Correct())
    for said, reward in (("right", 1.0), ("wrong", 1.1)):
        env.reset(seed=0)
        assert env.step(f"<answer>{said}</answer>")[1] == reward
    assert FormatRewardWrapper(GridNavigation()).max_turns == 3
    with pytest.raises(ConfigError, match="0 or more for format_bonus"):
        FormatRewardWrapper(Correct(), -0.1)
