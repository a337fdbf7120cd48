"""Graders combined: sums, masks, counts, names, setup and close."""

import asyncio
import os

import pytest

from agilerl.errors import ConfigError, RewardError
from agilerl.rewards import BaseGrader, CombinedGrader, call_grader, grade

TEXTS = ["a", "bb", "ccc"]
ROWS = [{"question": "q", "answer": "a", "kind": kind} for kind in ("math", "code", None)]


def length(completion):
    return float(len(completion))


def right(completion, answer, question):
    return float(completion == answer)


def math_only(completions, kind, **columns):
    return [1.0 if k == "math" else None for k in kind]


async def slowly(completion):
    await asyncio.sleep(0)
    return 10.0


def fails_on_bb(completion):
    if completion == "bb":
        raise ValueError("no b")
    return 1.0


def batch_fails_on_bb(completions):
    return [fails_on_bb(text) for text in completions]


def marks_bb(completions):
    return [ValueError("no b") if text == "bb" else 1.0 for text in completions]


def nothing(completion):
    return None


def broken(completion):
    raise KeyError("x")


def test_the_sum_is_weighted_and_over_what_applies():
    grader = CombinedGrader([length, (right, 0.5), (math_only, 2), (slowly, -0.1)])
    grades = grade(grader, TEXTS, ROWS)
    assert grades.rewards == [1 + 0.5 + 2 - 1.0, 2 - 1.0, 3 - 1.0]
    assert grades.scores == {
        "length": [1.0, 2.0, 3.0],
        "right": [1.0, 0.0, 0.0],
        "math_only": [1.0, None, None],
        "slowly": [10.0, 10.0, 10.0],
    }
    assert grades.errors == dict.fromkeys(grades.scores, 0)
    assert call_grader(grader, TEXTS, ROWS) == grades.rewards
    assert repr(grader) == "CombinedGrader(1 * length, 0.5 * right, 2 * math_only, -0.1 * slowly)"


def test_where_none_applies_there_is_no_grade():
    grader = CombinedGrader([math_only, nothing])
    assert grade(grader, TEXTS, ROWS).rewards == [1.0, None, None]
    assert grade(CombinedGrader([nothing]), TEXTS, ROWS).rewards == [None] * 3
    assert grade(grader, [], []).rewards == []


@pytest.mark.parametrize("failing", [fails_on_bb, batch_fails_on_bb, marks_bb])
def test_a_failure_masks_its_completion_and_is_counted(failing):
    """The rest of the sum would be a score that takes the failure for 0."""
    grades = grade(CombinedGrader([(length, 0.25), failing]), TEXTS, ROWS)
    assert grades.rewards == [1.25, None, 1.75]
    assert grades.scores[failing.__name__] == [1.0, None, 1.0]
    assert grades.errors == {"length": 0, failing.__name__: 1}
    assert grades.failed_at(1) == (failing.__name__,)
    assert grades.failed_at(0) == ()
    assert grades.scores_at(2) == {"length": 3.0, failing.__name__: 1.0}


def test_a_grader_that_always_fails_stops_the_run():
    with pytest.raises(RewardError, match=r"^broken .* 3 completions; .*KeyError"):
        grade(CombinedGrader([length, broken]), TEXTS, ROWS)
    with pytest.raises(RewardError, match=r"^broken raised KeyError"):
        grade(broken, TEXTS[:1], ROWS[:1])
    with pytest.raises(RewardError, match=r"3 numbers .*found 1"):
        grade(CombinedGrader({"short": lambda completions: [1.0]}), TEXTS, ROWS)


def test_weights_are_read_when_they_are_used():
    grader = CombinedGrader([length, (right, 0.5)])
    assert grade(grader, TEXTS, ROWS).rewards == [1.5, 2.0, 3.0]
    grader.weights["right"] = 2
    assert grade(grader, TEXTS, ROWS).rewards == [3.0, 2.0, 3.0]
    grader.weights = {"right": 1.0, "length": 0.0}
    assert grade(grader, TEXTS, ROWS).rewards == [1.0, 0.0, 0.0]
    assert grade(grader, TEXTS, ROWS).scores["length"] == [1.0, 2.0, 3.0], "weight 0 still logs"


@pytest.mark.parametrize(
    "weights", [{"length": 1.0}, {"length": 1.0, "right": float("nan")}, {"length": 1.0, "right": "1"}, {}]
)
def test_weights_that_do_not_fit(weights):
    grader = CombinedGrader([length, right])
    grader.weights = weights
    with pytest.raises(ConfigError, match=r"length, right|weight of right"):
        grade(grader, TEXTS, ROWS)


@pytest.mark.parametrize(
    ("graders", "sentence"),
    [
        ([], "at least one grader"),
        ([length, length], r"two graders .* 'length'"),
        ([(length, 1e308)], r"weight .* found 1e\+308"),
        ([(length, 10**400)], r"weight .* found 1000"),
        ([(length, "much")], r"weight .* found 'much'"),
        ([0.5], r"pairs \(grader, weight\), .* CombinedGrader, found 0.5"),
    ],
)
def test_bad_combinations(graders, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CombinedGrader(graders)


def test_a_sum_beyond_float32_is_no_grade():
    def large(completion, answer, question):
        return 3e38 if completion == "a" else 1.0

    assert TEXTS[0] == "a"
    assert grade(CombinedGrader([(large, 2), right]), TEXTS, ROWS).rewards == [None, 2.0, 2.0]


def test_names_and_combinations_inside_combinations():
    inner = CombinedGrader({"one": length, "two": (fails_on_bb, 0.5)}, name="style")
    grades = grade(CombinedGrader([right, (inner, 2)]), TEXTS, ROWS)
    assert grades.rewards == [1 + 2 * 1.5, None, 2 * 3.5]
    assert grades.scores == {
        "right": [1.0, 0.0, 0.0],
        "style": [1.5, None, 3.5],
        "style/one": [1.0, 2.0, 3.0],
        "style/two": [1.0, None, 1.0],
    }
    assert grades.errors == {"right": 0, "style": 1, "style/one": 0, "style/two": 1}


class Opened(BaseGrader):
    name = "opened"

    def __init__(self):
        self.log = []

    def open(self):
        self.log.append("open")

    def release(self):
        self.log.append("release")

    def __call__(self, completion):
        return 1.0


class SomeoneElses:
    """Has setup and close, and nothing of ours."""

    def __init__(self):
        self.log = []

    def setup(self):
        self.log.append("setup")

    def close(self):
        self.log.append("close")

    def __call__(self, completion):
        return 2.0


def test_one_grader_alone_keeps_its_name():
    def polite(completion):
        return float("please" in completion)

    assert CombinedGrader([polite]).name == "polite"
    assert CombinedGrader([polite], name="manners").name == "manners"
    assert CombinedGrader([polite, len]).name == "combined"


def test_setup_and_close_cascade_and_happen_once():
    ours, theirs = Opened(), SomeoneElses()
    grader = CombinedGrader([length, CombinedGrader([ours, theirs])])
    grader.setup()
    grader.setup()
    assert grade(grader, TEXTS, ROWS).rewards == [4.0, 5.0, 6.0]
    assert (ours.log, theirs.log) == (["open"], ["setup"])
    grader.close()
    grader.close()
    assert (ours.log, theirs.log) == (["open", "release"], ["setup", "close"])
    with grader:
        assert ours.log[-1] == "open"
    assert ours.log[-1] == "release"


def test_the_first_use_sets_up():
    ours = Opened()
    grade(CombinedGrader([ours]), TEXTS, ROWS)
    assert ours.log == ["open"]


@pytest.mark.processes
def test_a_forked_process_opens_for_itself():
    ours = Opened()
    ours.setup()
    child = os.fork()
    if child == 0:
        ours.close()  # not opened here: nothing to release
        ours.setup()
        os._exit(0 if ours.log == ["open", "open"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ours.close()
    assert ours.log == ["open", "release"]
