"""The tutorials' tools solve what they are for, and the format wrapper adds its bonus."""

import json
from typing import Any

import pytest

from agilerl.envs.adapters import as_text_env
from agilerl.envs.check import check_env
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.tools import FormatRewardWrapper, ToolEnv
from tests.envs.tools.family_tokenizers import encoded, hermes
from tests.probes import GridNavigation
from tutorials.tools.calculator import calculator
from tutorials.tools.search import TOWNS, Search, search_env


def calculator_env(**settings: Any) -> ToolEnv:
    return ToolEnv(ReasoningGymTask("chain_sum"), [calculator], **settings)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def question(observation: Any) -> str:
    return observation if isinstance(observation, str) else observation[-1]["content"]


def test_the_calculator_solves_sums() -> None:
    env = calculator_env(parser="text")
    for seed in range(3):
        asked = question(env.reset(seed=seed)[0])
        result = env.step(called("calculator", expression=asked.split(":")[1].rstrip("= ")))[0]
        _, reward, terminated, _, info = env.step(f"<answer>{result}</answer>")
        assert (reward, terminated, info["success"], info["tool_errors"]) == (1.0, True, True, 0)


def test_search_finds_the_answers() -> None:
    env = search_env(parser="text")
    for seed in range(9):
        asked = question(env.reset(seed=seed)[0])
        words = env.step(called("search", query=asked))[0].splitlines()[0].replace(".", "").split()
        answer = {"Which": words[8], "When": words[13], "What": words[-1]}[asked.split()[0]]
        assert env.step(f"<answer>{answer}</answer>")[1] == 1.0


def test_a_search_ranks_by_what_is_rare_and_keeps_the_order_of_equals() -> None:
    passages = ["The otter sleeps in the river.", "The heron waits at the river, and it is grey.", "A grey stone."]
    assert Search(passages, count=1).search("HERON!") == f"1. {passages[1]}"
    assert Search(passages, count=2).search("grey stone") == f"1. {passages[2]}\n2. {passages[1]}"
    copies = [f"{'x' * n} river" for n in range(1, 40)]
    assert Search(copies).search("river") == "1. x river\n2. xx river\n3. xxx river"
    assert {Search(passages).search(query) for query in ("whale", "", "?!")} == {"No passage has any of these words."}


def test_the_exam_asks_about_other_towns_than_training() -> None:
    env = search_env(parser="text")
    asked = {split: {question(env.reset(seed=3 * n + split)[0]) for n in range(6)} for split in range(3)}
    towns = [{town for town in TOWNS for q in asked[split] if town in q} for split in range(3)]
    assert [len(names) for names in towns] == [1, 1, 1]
    assert len(set.union(*towns)) == 3


@pytest.mark.parametrize("make", [calculator_env, search_env])
def test_environments_keep_the_protocol(make: Any) -> None:
    assert check_env(lambda: make(parser="text")) == []
    assert check_env(make, hermes()) == []


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
