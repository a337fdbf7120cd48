"""Episodes with tools: calls are answered, answers are graded, and the seed decides the rest."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.data import Completion
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.episode_task import Episode, EpisodeLimits, EpisodeTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.prompts import ChatFormat
from agilerl.envs.tools import Tool, ToolCall, ToolEnv
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.rewards import exact_match
from tests.envs.tools.family_tokenizers import FAMILIES, encoded, hermes, llama, mistral, typed, without_tools
from tutorials.tools import response_templates
from tutorials.tools.calculator import calculator

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(10)]


def broken(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


def hang() -> None:
    """Wait."""
    time.sleep(0.3)


def long(count: int) -> str:
    """Say a lot."""
    return "a" * count


def repeat(text: str) -> str:
    """Say it again."""
    return text


def made(**settings: Any) -> ToolEnv:
    tools = [calculator, broken, Tool(hang, timeout=0.05), long, repeat]
    return ToolEnv(ROWS, tools, **{"grader": exact_match, "parser": "text", "max_result_chars": 200, **settings})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_call_is_answered_and_an_answer_graded() -> None:
    env = made()
    _, info = env.reset(seed=9)
    assert info == {"split": "train", "index": 3}
    observation, reward, terminated, truncated, info = env.step(call("calculator", expression="2 * 21"))
    assert (observation, reward, terminated, truncated) == ("42", 0.0, False, False)
    assert info == {"tool_calls": 1, "tool_errors": 0, "tool_truncated": 0}
    right = env._row["answer"]
    observation, reward, terminated, truncated, info = env.step(f"It is <answer>{right}</answer>")
    assert (observation, reward, terminated, truncated, info["success"]) == ("", 1.0, True, False, True)
    env.reset(seed=9)
    _, reward, terminated, _, info = env.step("no idea")
    assert (reward, terminated, info["success"], info["tool_calls"]) == (0.0, True, False, 0)
    with pytest.raises(EnvError, match="is over"):
        env.step("1")
    with pytest.raises(EnvError, match="has not begun"):
        made().step("1")


@pytest.mark.parametrize(
    ("action", "said", "kind"),
    [
        (call("calculater", expression="1"), "unknown tool 'calculater'; did you mean 'calculator'?", "unknown_tool"),
        (call("calculator", expresion="1"), "expected calculator(expression: string)", "bad_arguments"),
        (call("calculator"), "argument 'expression' is missing", "bad_arguments"),
        (call("calculator", expression="9**9**9"), "too large", "raised"),
        (call("broken", text="oh"), "Error: broken raised RuntimeError: oh", "raised"),
        (call("hang"), "took longer than 0.05 seconds", "timeout"),
        ("<tool_call>{calculator}</tool_call>", "which is no JSON", "malformed"),
        ("<tool_call>", "expected </tool_call>", "malformed"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_counted(action: str, said: str, kind: str) -> None:
    env = made()
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(action)
    assert said in observation
    assert observation.startswith("Error: ")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"tool_calls": 1, "tool_errors": 1, "tool_truncated": 0, f"tool_errors/{kind}": 1}
    _, _, terminated, _, info = env.step("5")
    assert terminated
    assert info["tool_errors"] == 1


def test_counts_are_of_one_episode() -> None:
    env = made()
    for _ in range(2):
        env.reset(seed=0)
        assert env.step(call("nothing"))[4]["tool_errors"] == 1


def test_long_results_are_cut_and_say_so() -> None:
    env = made()
    env.reset(seed=0)
    assert env.step(call("long", count=200))[0] == "a" * 200
    observation, *_, info = env.step(call("long", count=230))
    assert observation == "a" * 200 + "... [cut: 30 more characters]"
    assert info["tool_truncated"] == 1


def test_several_calls_of_one_turn() -> None:
    env = made()
    env.reset(seed=0)
    observation, *_, info = env.step(call("calculator", expression="1+1") + " and " + call("repeat", text="x"))
    assert observation == "calculator: 2\nrepeat: x"
    observation, *_, info = env.step(call("repeat", text="x") * 6)
    assert observation.splitlines()[3:5] == [
        "repeat: x",
        "repeat: Error: at most 4 calls are made in one turn; this one was not",
    ]
    assert (info["tool_calls"], info["tool_errors/too_many"]) == (8, 2)


def test_a_call_in_the_last_turn_is_no_answer() -> None:
    env = made(max_turns=2)
    env.reset(seed=0)
    assert env.step(call("repeat", text="x"))[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step(call("repeat", text="x"))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["success"], info["tool_calls"]) == (False, 1)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_without_a_seed_episodes_follow_one_another() -> None:
    env, other = made(), made()
    assert env.reset() == other.reset(seed=0)
    assert env.reset() == other.reset(seed=1)
    other.reset(seed=8)
    assert env.reset(seed=8) != env.reset()
    assert env.reset() == other.reset(seed=10)


def test_splits_are_those_of_episode_task() -> None:
    task = ReasoningGymTask("chain_sum", exam_prompts=5, test_prompts=7)
    env = ToolEnv(task, [calculator], parser="text")
    episodes = EpisodeTask(lambda: env, exam_episodes=20, test_episodes=20)
    for split in ("train", "exam", "test"):
        panel = {task.row(split, i)["question"] for i in range(task.panel_size(split))}
        for index in range(20):
            observation, info = env.reset(seed=episodes.episode_seed(split, index))
            assert info["split"] == split
            assert split == "train" or observation[-1]["content"] in panel


def test_a_split_without_rows() -> None:
    env = ToolEnv(DatasetTask(ROWS[:5], ROWS[5:], reward_fn=exact_match), [calculator], parser="text")
    env.reset(seed=1)
    with pytest.raises(EnvError, match=r"seed 2 .*test split"):
        env.reset(seed=2)


# -- what the model sees ----------------------------------------------------------------------------------------------


def test_the_system_message_tells_of_the_tools_where_the_template_does_not() -> None:
    env = made(system_prompt="Be brief.")
    env.bind(without_tools())
    observation, _ = env.reset(seed=0)
    assert [m["role"] for m in observation] == ["system", "user"]
    system = observation[0]["content"]
    assert system.startswith("Be brief.\n\nYou may call these tools. To call a tool, write <tool_call>")
    assert "calculator(expression: string) - Work out an arithmetic expression" in system
    assert env.tools == ()
    silent = made(announce="none")
    silent.bind(hermes())
    assert isinstance(silent.reset(seed=0)[0], str)
    assert silent.tools == ()


def test_the_template_tells_of_the_tools_where_it_can() -> None:
    env = made(parser=None, system_prompt="Be brief.")
    env.bind(hermes())
    assert [t["function"]["name"] for t in env.tools] == ["calculator", "broken", "hang", "long", "repeat"]
    assert env.reset(seed=0)[0][0] == {"role": "system", "content": "Be brief."}
    env = made(parser=None, announce="system")
    env.bind(hermes())
    assert env.tools == ()
    assert "calculator(expression" in env.reset(seed=0)[0][0]["content"]


def test_a_system_message_of_the_task_is_joined() -> None:
    template = [{"role": "system", "content": "You are Ada."}, {"role": "user", "content": "{question}"}]
    task = DatasetTask(ROWS, ROWS, reward_fn=exact_match, conversation_template=template)
    env = ToolEnv(task, [calculator], parser="text", system_prompt="Be brief.", announce="none")
    observation, _ = env.reset(seed=0)
    assert [m["role"] for m in observation] == ["system", "user"]
    assert observation[0]["content"] == "Be brief.\n\nYou are Ada."


WRITTEN = {
    "hermes": '<tool_call>{"name": "repeat", "arguments": {"text": "T"}}</tool_call><|im_end|>',
    "llama": '{"name": "repeat", "parameters": {"text": "T"}}<|eot_id|>',
    "mistral_list": '[TOOL_CALLS][{"name": "repeat", "arguments": {"text": "T"}}]</s>',
    "mistral": '[TOOL_CALLS]repeat[CALL_ID]abcdefghi[ARGS]{"text": "T"}</s>',
}
BETWEEN = {
    "hermes": "\n<|im_start|>user\n<tool_response>T</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|start_header_id|>ipython<|end_header_id|>\n\nT<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_list": "[TOOL_RESULTS]T[/TOOL_RESULTS]",
    "mistral": "[TOOL_RESULTS]T[/TOOL_RESULTS]",
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_results_are_tool_messages_in_the_transcript_of_each_family(family: str) -> None:
    tokenizer = FAMILIES[family]()
    env = made(parser=None)
    env.bind(tokenizer)
    episode = Episode(env, ChatFormat(tokenizer, tools=env.tools), EpisodeLimits(context_length=5000))
    episode.begin(0)
    said = encoded(tokenizer, WRITTEN[family])
    before = episode.prompt_ids
    assert "Work out an arithmetic" in tokenizer.decode(before)
    episode.act(Completion(said, [0.0] * len(said), "stop"), tokenizer.decode(said, skip_special_tokens=True))
    after = episode.prompt_ids
    assert after[: len(before) + len(said)] == before + said
    assert tokenizer.decode(after[len(before) + len(said) :]) == BETWEEN[family]
    answer = encoded(tokenizer, env._row["answer"] + tokenizer.eos_token)
    assert episode.act(Completion(answer, [0.0] * len(answer), "stop"), env._row["answer"]) == 1.0
    assert episode.done


def test_a_typed_call_is_an_answer() -> None:
    tokenizer = hermes()
    env = made(parser=None)
    env.bind(tokenizer)
    text = call("repeat", text="T")
    env.reset(seed=0)
    assert env.step_ids(text, typed(tokenizer, text))[2]
    env.reset(seed=0)
    assert not env.step_ids(text, encoded(tokenizer, text))[2]
    env.reset(seed=0)
    assert not env.step(text)[2]  # a person who types a tag means the token


@pytest.mark.parametrize(
    ("tokenizer", "roles"),
    [
        (hermes(), ["tool", "tool"]),
        (llama(), ["tool", "tool"]),
        (mistral(), ["tool", "tool"]),
        (without_tools(), "user"),
    ],
    ids=["hermes", "llama", "mistral", "without_tools"],
)
def test_results_go_to_the_user_where_the_template_has_no_tools(tokenizer: Any, roles: Any) -> None:
    env = made()
    env.bind(tokenizer)
    env.reset(seed=0)
    observation = env.step(call("repeat", text="x") + call("nothing"))[0]
    found = "user" if isinstance(observation, str) else [m["role"] for m in observation]
    assert found == roles
    if found != "user":
        assert [m["name"] for m in observation] == ["repeat", "nothing"]
        assert all(len(m["tool_call_id"]) == 9 for m in observation)


@pytest.mark.parametrize("tag", ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>"])
def test_a_result_cannot_speak_for_others(tag: str) -> None:
    tokenizer = hermes()
    env = made(parser=None)
    env.bind(tokenizer)
    env.reset(seed=0)
    opening, inside, closing = re.fullmatch(r"(<\w+>)(.*)(</\w+>)", call("repeat", text=f"x{tag}y")).groups()
    ids = encoded(tokenizer, opening) + typed(tokenizer, inside) + encoded(tokenizer, closing)
    (message,) = env.step_ids("", ids)[0]
    assert message["content"] == f"x{tag[0]} {tag[1:]}y"
    assert not set(encoded(tokenizer, message["content"])) & set(tokenizer.get_added_vocab().values())


# -- settings ---------------------------------------------------------------------------------------------------------


def test_binding_again_changes_nothing() -> None:
    tokenizer = hermes()
    env = made(parser=None)
    env.bind(tokenizer)
    env.reset(seed=0)
    env.step(call("repeat", text="x"))
    env.bind(tokenizer)
    assert env.step("3")[4]["tool_calls"] == 1


def test_a_parser_of_its_own() -> None:
    class Shouted:
        family = "shouted"
        tags = ("!",)
        instruction = "Shout"

        def parse(self, token_ids: Any, text: str) -> list[Any]:
            return [ToolCall("repeat", {"text": text})] if text.endswith("!") else []

    env = made(parser=response_templates.LLAMA)
    env.bind(without_tools())
    env.reset(seed=0)
    assert env.step('<|python_tag|>{"name": "repeat", "parameters": {"text": "x"}}<|eom_id|>')[0] == "x"
    env = made(parser=Shouted())
    env.bind(without_tools())
    env.reset(seed=0)
    assert env.step("hey!")[0] == "hey "  # the tag may not come back


def test_tools_and_tasks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="found: none"):
        ToolEnv(ROWS, [], grader=exact_match)
    with pytest.raises(ConfigError, match="found: calculator, calculator"):
        ToolEnv(ROWS, [calculator, calculator], grader=exact_match)
    with pytest.raises(ConfigError, match="grades its own answers"):
        ToolEnv(ReasoningGymTask("chain_sum"), [calculator], grader=exact_match)
    prefill = [{"role": "user", "content": "{question}"}, {"role": "assistant", "content": "It is"}]
    with pytest.raises(ConfigError, match="found a prefill"):
        ToolEnv(
            DatasetTask(ROWS, ROWS, reward_fn=exact_match, conversation_template=prefill), [calculator], parser="text"
        )
    env = made(parser=None)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="expected bind"):
        env.step("1")
    with pytest.raises(ConfigError, match='parser="text"'):
        env.bind(without_tools())


def test_an_answer_without_a_grade_raises() -> None:
    env = made(grader=lambda completion, answer: None)
    env.reset(seed=0)
    with pytest.raises(RewardError, match="grade the answer '1'"):
        env.step("1")


ENV = made(parser=None, max_turns=3)
TOKENIZER = hermes()
ENV.bind(TOKENIZER)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=20), min_size=3, max_size=3))
def test_no_completion_breaks_an_episode(turns: list[list[int]]) -> None:
    ENV.reset(seed=0)
    for number, ids in enumerate(turns, 1):
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        observation, reward, terminated, truncated, info = ENV.step_ids(text, ids)
        assert reward in (0.0, 1.0)
        assert info["tool_calls"] >= info["tool_errors"] >= 0
        if terminated or truncated:
            assert "success" in info
            break
        assert number < 3
        assert ENV.observation_space.contains(observation)


# -- tools that share a state: TRL's environment_factory --------------------------------------------------------------


class Counter:
    """TRL's example of an environment, with a reward of its own."""

    count = 0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, goal: int, **row: Any) -> str:
        self.count, self.goal = 0, goal
        return f" Goal: {goal}"

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: how much to add.
        """
        self.count += step
        return self.count

    def stall(self) -> None:
        """Wait."""
        time.sleep(0.3)

    @property
    def never(self) -> None:
        raise AssertionError("properties are not read")


class Rewarded(Counter):
    async def get_reward(self) -> float:
        return float(self.count)


def reached(completions: list[str], environments: list[Counter], **columns: Any) -> list[float]:
    """A reward function of TRL."""
    return [float(one.count == one.goal) for one in environments]


def only_state(environments: list[Counter]) -> list[float]:
    return [0.5 for _ in environments]


COUNTING = [{"prompt": [{"role": "user", "content": f"Count to {n}."}], "goal": n} for n in range(2, 8)]


def counting(factory: Any = Counter, **settings: Any) -> ToolEnv:
    given = {"grader": reached, "parser": "text", "timeout": 0.05, **settings}
    return ToolEnv(COUNTING, environment_factory=factory, **given)


def test_the_methods_of_an_environment_are_tools_that_share_its_state() -> None:
    env, other = counting(), counting()
    for seed in (0, 3):  # the state begins again
        observation, _ = env.reset(seed=seed)
        other.reset(seed=seed)
        goal = env._row["goal"]
        assert observation[-1]["content"] == f"Count to {goal}. Goal: {goal}"
        assert env.step(call("increment", step=1))[0] == "1"
        assert other.step(call("increment", step=40))[0] == "40"
        assert env.step(call("increment", step=goal - 1))[0] == str(goal)
        _, reward, terminated, _, info = env.step("Done.")
        assert (reward, terminated, info["success"]) == (1.0, True, True)
        assert other.step("Done.")[1] == 0.0
    assert "increment(step: integer)" in counting(announce="system").reset(seed=0)[0][0]["content"]


def test_an_environment_may_reward_itself_alone_or_beside_graders() -> None:
    for grader, expected in ((None, 2.0), (reached, 2.0 + 1.0), ([reached, (only_state, 2)], 2.0 + 1.0 + 1.0)):
        env = counting(Rewarded, grader=grader)
        env.reset(seed=0)
        env.step(call("increment", step=2))
        assert env.step("Done.")[1] == expected


def test_the_last_turn_is_graded_by_the_state() -> None:
    env = counting(max_turns=2)
    env.reset(seed=0)
    env.step(call("increment", step=2))
    _, reward, terminated, truncated, info = env.step(call("increment", step=2))
    assert (reward, terminated, truncated, info["success"]) == (1.0, False, True, True)


def test_a_call_that_hangs_keeps_its_environment_to_itself() -> None:
    env = counting()
    before, count = env._environment, Counter.made
    env.reset(seed=0)
    env.step(call("increment", step=1))
    assert env._environment is before
    assert "took longer" in env.step(call("stall"))[0]
    env.reset(seed=0)
    assert env._environment is not before
    assert Counter.made == count + 1
    assert env.step(call("increment", step=1))[0] == "1"


def test_an_environment_that_cannot_be_used_is_told_in_a_sentence() -> None:
    class Asking(Counter):
        def reset(self, level: int) -> None:  # type: ignore[override]
            """Ask for a column that the rows lack."""

    class Saying(Counter):
        def reset(self) -> Any:  # type: ignore[override]
            return 3

    with pytest.raises(ConfigError, match=r"object with reset\(\), found"):
        counting(lambda: 3)
    with pytest.raises(ConfigError, match="at least one tool"):
        ToolEnv(ROWS, grader=exact_match)
    with pytest.raises(ConfigError, match="expected a grader"):
        counting(grader=None)
    with pytest.raises(EnvError, match=r"Asking.reset asks for level, found only answer, goal, prompt, question"):
        counting(Asking).reset(seed=0)
    with pytest.raises(EnvError, match=r"Saying.reset to return text or None, found"):
        counting(Saying).reset(seed=0)
