"""Pairs: careless answers that are never right, and the environment that serves them."""

import pytest
import torch

from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import PreferenceTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.errors import EnvError
from agilerl.llm_envs import PreferenceGym
from tests.probes import ConditionalTarget, ConstantTarget

ROWS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(6)]


def texts(tokenizer, batch):
    return [tokenizer.decode(ids[:length]) for ids, length in zip(batch.ids, batch.lengths)]


# -- careless answers ------------------------------------------------------------------------------------------------


def test_mistakes_are_used_unless_they_are_right():
    def mistake(row, draws):
        return row["answer"] if draws.random() < 0.5 else f"{row['answer']}{int(draws.integers(10))}"

    task = PreferenceTask(ConditionalTarget(), mistake=mistake)
    rows = [task.row("train", i) for i in range(40)]
    assert all(row["rejected"] != row["answer"] for row in rows)
    assert all(row["rejected"].startswith(row["answer"]) for row in rows)
    assert len({row["rejected"] for row in rows}) > 5
    again = PreferenceTask(ConditionalTarget(), mistake=mistake)
    assert [again.row("train", i) for i in reversed(range(40))] == rows[::-1]
    assert "rejected" not in task.row("exam", 0)


def test_other_rows_answers_stand_in():
    task = PreferenceTask(ReasoningGymTask("gcd", exam_prompts=4, test_prompts=0))
    rows = [task.row("train", i) for i in range(30)]
    assert all(task.reward(row["rejected"], row) == 0.0 for row in rows)
    assert all(row["rejected"].isdigit() for row in rows)
    always_right = PreferenceTask(ConditionalTarget(), mistake=lambda row, draws: row["answer"])
    assert always_right.row("train", 0)["rejected"] in {"1", "2", "3"} - {always_right.row("train", 0)["answer"]}
    knows_nothing = PreferenceTask(ConditionalTarget(), mistake=lambda row, draws: None)
    assert knows_nothing.row("train", 5)["rejected"] != knows_nothing.row("train", 5)["answer"]


def test_answers_that_earn_as_much_are_no_mistakes():
    rows = [{"question": q, "answer": a} for q, a in (("a", "yes"), ("b", "Yes"), ("c", "no"))]
    inner = DatasetTask(
        rows, rows, reward_fn=lambda completion, answer, question: float(completion.lower() == answer.lower())
    )
    task = PreferenceTask(inner)
    assert all(task.row("train", i)["rejected"].lower() != task.row("train", i)["answer"].lower() for i in range(9))


def test_a_rejected_column_is_kept_and_equal_answers_are_reported():
    rows = [{"question": "1", "answer": "2", "rejected": "9"}]
    inner = DatasetTask(rows, rows, reward_fn=lambda completion, answer, question: 0.0)
    assert PreferenceTask(inner).row("train", 0)["rejected"] == "9"
    with pytest.raises(EnvError, match="found no wrong answer"):
        PreferenceTask(ConstantTarget()).row("train", 0)


# -- PreferenceGym ---------------------------------------------------------------------------------------------------


def test_pairs_stand_side_by_side(tokenizer):
    env = PreferenceGym(ROWS, ROWS[:3], tokenizer, data_batch_size_per_gpu=3)
    batch = env.reset()
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
    found = texts(tokenizer, batch)
    for chosen, rejected in zip(found[0::2], found[1::2]):
        left = int(chosen.removeprefix("<user>").split("+")[0])
        assert chosen == f"<user>{left}+1=<end><assistant>{left + 1}<end>"
        assert rejected == f"<user>{left}+1=<end><assistant>{left}<end>"
    assert not torch.equal(env.step().ids, batch.ids)
    with env.eval_mode():
        assert texts(tokenizer, env.reset())[0] == "<user>0+1=<end><assistant>1<end>"
