"""Reward functions written for TRL, and TRL's own, are called as TRL calls them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agilerl import GRPO, Population, Runtime
from agilerl.config.manifest import load_manifest
from agilerl.envs import DatasetTask
from agilerl.envs.core import grade_completions
from agilerl.errors import RewardError
from agilerl.rewards import (
    BaseGrader,
    CombinedGrader,
    Overlong,
    ThreadedGrader,
    call_grader,
)
from agilerl.rewards.grader import GradedRow, TrainerState
from agilerl.training.tasks import task

trl = pytest.importorskip("trl.rewards", reason="TRL is not installed; make setup installs it")

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1/3?"}]
CONVERSATIONS = [{"prompt": ASKED, "solution": r"\frac{1}{3}", "completion_ids": [1] * n} for n in (50, 70, 90)]
TEXTS_ONLY = [{**row, "prompt": "1/3?"} for row in CONVERSATIONS]
TEXTS = [r"<think>a</think>\boxed{\frac{1}{3}}", r"<think>a</think>\boxed{\frac12}", "no"]


def said(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def as_trl_calls(function: Any, rows: list[dict[str, Any]]) -> list[float | None]:
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    scores: list[float | None] = function(prompts=[ASKED] * len(rows), completions=said(TEXTS), **columns)
    return scores


PARAMS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {"reasoning_delimiters": ["</think>"]},
    "get_cosine_scaled_reward": {"max_len": 100, "min_value_wrong": -2.0},
    "think_format_reward": {},
    "get_repetition_penalty_reward": {"ngram_size": 2, "max_penalty": -0.5},
    "get_soft_overlong_punishment": {"max_completion_len": 80, "soft_punish_cache": 20},
}


@pytest.mark.parametrize("name", PARAMS)
def test_trl_functions_say_what_they_say(name: str) -> None:
    function = getattr(trl, name)
    function = function(**PARAMS[name]) if name.startswith("get_") else partial(function, **PARAMS[name])
    found = as_trl_calls(function, CONVERSATIONS)
    for rows in (CONVERSATIONS, TEXTS_ONLY):
        assert call_grader(function, TEXTS, rows) == found
    if name != "get_repetition_penalty_reward":
        assert len(set(found)) > 1


def test_ours_of_equal_meaning() -> None:
    theirs = trl.get_soft_overlong_punishment(80, 20)
    rows = [{"question": "", "completion_ids": [0] * n} for n in range(90)]
    assert call_grader(Overlong(80, 20), [""] * 90, rows) == pytest.approx(call_grader(theirs, [""] * 90, rows))


# -- custom functions -------------------------------------------------------------------------------------------------


def length(completions: Any, **kwargs: Any) -> list[float]:
    """TRL's first example for conversations."""
    return [float(len(completion[0]["content"])) for completion in completions]


def test_conversations_come_as_messages() -> None:
    seen: list[Any] = []

    def record(prompts: Any, completions: Any, completion_ids: Any, solution: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, solution))
        return [0.0] * len(completions)

    call_grader(record, TEXTS, CONVERSATIONS, ["1/3?"] * 3)
    call_grader(record, TEXTS, TEXTS_ONLY, ["1/3?"] * 3)
    ids, solutions = [[1] * n for n in (50, 70, 90)], [r"\frac{1}{3}"] * 3
    assert seen == [([ASKED] * 3, said(TEXTS), ids, solutions), (["1/3?"] * 3, TEXTS, ids, solutions)]
    assert call_grader(length, TEXTS, CONVERSATIONS) == [float(len(text)) for text in TEXTS]
    assert call_grader(ThreadedGrader(length), TEXTS, CONVERSATIONS) == [float(len(text)) for text in TEXTS]


def test_one_completion_at_a_time_is_text() -> None:
    def shout(completion: str, prompt: str) -> float:
        return float(len(completion) + len(prompt))

    class Own(BaseGrader):
        def __call__(self, completions: list[str]) -> list[float]:
            return [float(text.count("a")) for text in completions]

    assert call_grader(shout, TEXTS, CONVERSATIONS, ["x"] * 3) == [float(len(text) + 1) for text in TEXTS]
    assert call_grader(Own(), TEXTS, CONVERSATIONS) == [float(text.count("a")) for text in TEXTS]
    assert call_grader(CombinedGrader([Own(), length]), TEXTS[2:], CONVERSATIONS[2:]) == [2.0]


def test_prompts_alone_are_those_of_a_batch() -> None:
    def questions(prompts: Any, **kwargs: Any) -> list[float]:
        return [float(len(prompt)) for prompt in prompts]

    assert call_grader(questions, TEXTS, CONVERSATIONS) == [2.0] * 3


async def slow(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def test_the_state_of_training() -> None:
    rows = [GradedRow(row) for row in CONVERSATIONS]
    for row, step in zip(rows, (4, 9, 4)):
        row.state = TrainerState(step, step / 10)
    calls: list[int] = []

    def staged(completions: Any, trainer_state: Any) -> list[float]:
        calls.append(len(completions))
        return [trainer_state.epoch + len(c[0]["content"]) for c in completions]

    lengths = [float(len(text)) for text in TEXTS]
    assert call_grader(staged, TEXTS, rows) == [lengths[0] + 0.4, lengths[1] + 0.9, lengths[2] + 0.4]
    assert calls == [2, 1]  # one call has one state
    assert call_grader(slow, TEXTS, rows) == [4.0, 9.0, 4.0]
    assert call_grader(lambda completion, trainer_state: trainer_state.global_step, TEXTS, rows) == [4.0, 9.0, 4.0]
    with pytest.raises(RewardError, match="trainer_state"):
        call_grader(slow, TEXTS, CONVERSATIONS)  # nothing is being trained
    with pytest.raises(RewardError, match="max_steps"):
        call_grader(lambda completions, trainer_state: [trainer_state.max_steps], TEXTS[:1], rows[:1])


def test_a_population_tells_where_its_agents_are() -> None:
    seen: list[tuple[int, float | None]] = []

    def steps(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.epoch))
        assert {type(completion[0]["content"]) for completion in completions} == {str}
        assert not isinstance(kwargs.get("trainer_state"), list)
        return [float(len(c[0]["content"])) for c in completions]

    rows = [{"prompt": [{"role": "user", "content": f"Spell this word backward: {word}"}]} for word in "abcdefgh"]
    agents = GRPO.population(
        2, runtime=Runtime.from_pretrained("embedded"), group_size=2, batch_size=4, max_output_tokens=4, lr=1e-3
    )
    population = Population(agents, DatasetTask(rows[:4], rows[4:], reward_fn=steps), prompts_per_step=2)
    for _ in range(2):
        population.learn(population.rollout())
    population.evaluate()
    assert seen == [(0, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.processes
def test_trl_rewards_in_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": [{{"role": "user", "content": "{n}"}}], "solution": "{n}"}}\n' for n in range(12))
    )
    (tmp_path / "mine.py").write_text(
        "from trl.rewards import get_soft_overlong_punishment\npunishment = get_soft_overlong_punishment(4, 2)\n"
    )
    (tmp_path / "run.yaml").write_text(
        "environment: {dataset: {path: rows.jsonl, rows: 10}, eval_prompts: 2, test_prompts: 2, graders: "
        "[{name: 'trl.rewards:think_format_reward'}, {name: 'mine.py:punishment', weight: 2}, "
        "{name: 'trl.rewards:accuracy_reward', isolate: true, timeout: 60}]}"
    )
    made = task(load_manifest(tmp_path / "run.yaml"), allow_code=True)
    row = {**made.row("train", 0), "completion_ids": [1, 2, 3]}
    grades = grade_completions(made, [row], [rf"<think>a</think>\boxed{{{row['solution']}}}"])
    made.close()
    assert grades.scores == {"think_format_reward": [1.0], "punishment": [-0.5], "accuracy_reward": [1.0]}
    assert grades.rewards == [1.0]
    assert made.counts["read"] == 10
