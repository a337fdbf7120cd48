import asyncio
import functools

import numpy as np
import pytest
import torch

from agilerl.errors import RewardError
from agilerl.rewards import call_grader, check_score

ROWS = [{"question": "1+1", "answer": "2", "level": 1}, {"question": "2+2", "answer": "4", "level": 9}]
TEXTS = ["2", "five"]


def per_sample(completion, answer, question):
    return float(completion == answer) + len(question) / 10


def positional_names(text, solution, problem):
    return per_sample(text, solution, problem)


def half_known_names(completion, solution, prompt):
    return per_sample(completion, solution, prompt)


def positional_only(a, b, c, /):
    return per_sample(a, b, c)


def swapped(question, completion, answer):
    return per_sample(completion, answer, question)


def keywords(*, completion, answer, question, bonus=0.0):
    return per_sample(completion, answer, question) + bonus


def everything(completion, **row):
    return per_sample(completion, row["answer"], row["question"])


def batch(prompts, completions, **columns):
    return [per_sample(c, a, p) for c, a, p in zip(completions, columns["answer"], prompts)]


def batch_named(completions, answer, question):
    return tuple(map(per_sample, completions, answer, question))


def batch_array(completions, answer, question):
    return torch.tensor(batch_named(completions, answer, question), dtype=torch.float64)


async def per_sample_async(completion, answer, question):
    await asyncio.sleep(0)
    return per_sample(completion, answer, question)


async def batch_async(prompts, completions, answer):
    await asyncio.sleep(0)
    return batch(prompts, completions, answer=answer)


class Callable:
    def __call__(self, completion, answer, question):
        return per_sample(completion, answer, question)


FORMS = [
    per_sample,
    positional_names,
    half_known_names,
    positional_only,
    swapped,
    keywords,
    everything,
    batch,
    batch_named,
    batch_array,
    per_sample_async,
    batch_async,
    Callable(),
    functools.partial(keywords, bonus=0.0),
    lambda c, a, q: per_sample(c, a, q),
]


@pytest.mark.parametrize("grader", FORMS, ids=lambda g: getattr(g, "__name__", type(g).__name__))
def test_every_signature_gives_the_same(grader):
    assert call_grader(grader, TEXTS, ROWS) == [1.3, 0.3]


def test_columns_and_prompts_are_resolved_by_name():
    def grader(completion, level, prompt):
        return len(prompt) * level + float(completion == "2")

    assert call_grader(grader, TEXTS, ROWS, ["abc", "d"]) == [4.0, 9.0]


def test_none_means_not_applicable():
    assert call_grader(lambda completion, answer, question: None, TEXTS, ROWS) == [None, None]
    assert call_grader(lambda completions: [None, 1], TEXTS, ROWS) == [None, 1.0]


def test_a_column_that_only_some_rows_have_is_none_elsewhere():
    seen = []

    def grader(completions, hint):
        seen.append(hint)
        return [0, 0]

    call_grader(grader, TEXTS, [{"answer": "1", "hint": "a"}, {"answer": "2"}])
    assert seen == [["a", None]]


def test_coroutines_run_together_also_inside_a_running_loop():
    running, most = 0, 0

    async def grader(completion, answer, question):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    async def notebook():
        return call_grader(grader, TEXTS, ROWS)

    assert asyncio.run(notebook()) == [1.0, 1.0]
    assert most == 2


def test_nothing_to_grade_calls_nothing():
    assert call_grader(lambda completions: 1 / 0, [], []) == []


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_all_kinds(value):
    score = check_score(value)
    assert score == 1.0
    assert type(score) is float


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "finite number or None, found nan"),
        (float("inf"), "finite number or None, found inf"),
        ("0.5", "found '0.5'"),
        ([0.5], "found \\[0.5\\] of type list"),
        ({}, "of type dict"),
        (1j, "of type complex"),
        (torch.ones(2), "one number"),
        ("x" * 500, r"found 'x{96}\.\.\."),
    ],
)
def test_what_is_no_score(value, sentence):
    with pytest.raises(RewardError, match=sentence):
        check_score(value)
    with pytest.raises(RewardError, match="my_reward must return"):
        call_grader(named(lambda completion, answer, question: value), TEXTS, ROWS)
    with pytest.raises(RewardError, match="my_reward must return"):
        call_grader(named(lambda completions: [1.0, value]), TEXTS, ROWS)


def named(function):
    function.__name__ = "my_reward"
    return function


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ([1.0], "found 1 of them"),
        ([1.0] * 3, "found 3 of them"),
        (1.0, "found 1.0"),
        (None, r"found None"),
        ("ab", "found 'ab'"),
        ({1: 2, 3: 4}, "of type dict"),
    ],
)
def test_a_batch_has_one_score_for_each_completion(returned, found):
    with pytest.raises(RewardError, match=f"a list of 2 numbers .*{found}"):
        call_grader(lambda completions: returned, TEXTS, ROWS)


def raises(completion, answer, question):
    raise ZeroDivisionError("no luck")


async def raises_async(completion, answer, question):
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize("grader", [raises, raises_async])
def test_a_grader_that_raises_is_named(grader):
    with pytest.raises(
        RewardError, match=f"{grader.__name__} raised ZeroDivisionError: no luck \\(test_grader.py:[0-9]+\\)"
    ) as caught:
        call_grader(grader, TEXTS, ROWS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_argument_that_no_column_gives():
    def grader(completion, target):
        return 0.0

    def batch_grader(completions, target, **rest):
        return [0.0, 0.0]

    with pytest.raises(RewardError, match="target, found only answer, completion, level, prompt, question"):
        call_grader(grader, TEXTS, ROWS)
    with pytest.raises(RewardError, match="target, found only answer, completions, level, prompts"):
        call_grader(batch_grader, TEXTS, ROWS)


def test_rows_and_completions_must_match():
    with pytest.raises(RewardError, match="found 2 rows for 1 completions"):
        call_grader(per_sample, TEXTS[:1], ROWS)
