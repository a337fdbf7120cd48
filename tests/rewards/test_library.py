"""What the graders of the package score."""

import time

import pytest

from agilerl.errors import ConfigError, RewardError
from agilerl.rewards import (
    LIBRARY,
    FormatTags,
    JsonValid,
    Overlong,
    Regex,
    Repetition,
    TokenLength,
    call_grader,
    exact_match,
    grade,
    library_grader,
)


@pytest.mark.parametrize(
    ("completion", "whole", "partial"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        (" <think>\na\n</think>\n\n<answer></answer>\n", 1.0, 1.0),
        ("well <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0),
        ("<think><answer>b</answer></think>", 0.0, 1.0),
        ("</think>a<think><answer>b</answer>", 0.0, 1.0),
        ("<think>a</think><answer>b", 0.0, 0.75),
        ("<think>a<think></think><answer>b</answer>", 0.0, 0.75),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_format_tags(completion, whole, partial):
    assert FormatTags()(completion) == whole
    assert FormatTags(partial=True)(completion) == partial


def test_format_tags_of_other_names():
    assert FormatTags(["plan"])("<plan>x</plan>") == 1.0
    assert FormatTags(("a", "b", "c"))("<a></a><b>1</b><c></c>") == 1.0


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, -1.0), (5, -0.5), (9, pytest.approx(-0.1)), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)]
)
def test_length(tokens, score):
    assert TokenLength(10)(range(tokens)) == score


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_overlong_is_that_of_dapo(tokens, score):
    assert Overlong(100, 20)(range(tokens)) == pytest.approx(score)


def test_lengths_are_of_tokens():
    rows = [{"completion_ids": [1, 2, 3]}, {"completion_ids": [1]}]
    assert call_grader(TokenLength(2), ["a", "long text of one token"], rows) == [-0.5, -0.5]
    with pytest.raises(RewardError, match="length asks for completion_ids"):
        call_grader(TokenLength(2), ["a"], [{"answer": "a"}])


@pytest.mark.parametrize(
    ("completion", "n", "score"),
    [
        ("a b c d", 3, 0.0),
        ("a b A b a b", 2, -0.6),
        ("a a a a", 1, -0.75),
        ("a a", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repetition(completion, n, score):
    assert Repetition(n)(completion) == pytest.approx(score)


def test_regex():
    assert Regex(r"\d+")("abc 7") == 1.0
    assert Regex(r"\d+")("abc") == 0.0
    assert Regex(r"\d+", full=True)("abc 7") == 0.0
    assert Regex(r"\d+", full=True)("77") == 1.0


def test_a_regex_that_backtracks_is_given_up():
    grader = Regex(r"(a|aa)+$", timeout=0.1)
    start = time.monotonic()
    grades = grade(grader, ["a" * 5000 + "!", "aa"], [{}, {}])
    assert time.monotonic() - start < 1.1
    assert grades.rewards == [None, 1.0]
    assert grades.errors == {"regex": 1}


@pytest.mark.parametrize(
    ("completion", "valid", "with_keys"),
    [
        ('{"a": 1, "b": [true, null]}', 1.0, 1.0),
        ('so <answer>\n{"a": 1, "b": 2, "c": 3}</answer>', 1.0, 1.0),
        ('{"a": 1}', 1.0, 0.0),
        ('["a", "b"]', 1.0, 0.0),
        ("7", 1.0, 0.0),
        ("NaN", 0.0, 0.0),
        ('{"a": Infinity, "b": 1}', 0.0, 0.0),
        ("{'a': 1}", 0.0, 0.0),
        ('{"a": 1,}', 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("9" * 5_000, 0.0, 0.0),
    ],
)
def test_json(completion, valid, with_keys):
    assert JsonValid()(completion) == valid
    assert JsonValid(["a", "b"])(completion) == with_keys


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("acuracy", {}, r"graders accuracy, .*, found 'acuracy'"),
        ("length", {}, r"\[\]: .*target"),
        ("length", {"goal": 3}, r"does not take the parameters \['goal'\]"),
        ("overlong", {"max_tokens": 4, "cache_tokens": 5}, "cache_tokens from 1 to max_tokens"),
        ("regex", {"pattern": "("}, "not a regular expression"),
        ("format_tags", {"tags": []}, "a list of one or more tag names"),
    ],
)
def test_settings_that_cannot_be_meant(name, params, sentence):
    with pytest.raises(ConfigError, match=sentence):
        library_grader(name, params)


def test_the_library_goes_by_the_names_of_its_graders():
    needed = {
        "judge": {"model": "m"},
        "length": {"target": 1},
        "overlong": {"max_tokens": 2, "cache_tokens": 1},
        "pairwise_judge": {"model": "m"},
        "regex": {"pattern": "x"},
        "reward_model": {"model": "m"},
    }
    for name in LIBRARY:
        assert getattr(library_grader(name, needed.get(name)), "name", exact_match.__name__) == name


def test_accuracy_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("agilerl.rewards.library.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-evolution\[math\]'"):
        library_grader("accuracy")
