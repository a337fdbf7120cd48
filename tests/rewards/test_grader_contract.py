"""Every grader of the package keeps the contract of graders."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from agilerl.envs.check import ODD_TEXTS
from agilerl.rewards import (
    LIBRARY,
    Accuracy,
    CombinedGrader,
    IsolatedGrader,
    JudgeGrader,
    PairwiseJudgeGrader,
    RewardModelGrader,
    SandboxGrader,
    exact_match,
    library_grader,
)
from agilerl.rewards.grader import Mark, attempt_grader, close, grader_name, setup
from tests.rewards.chat_server import chat, serve
from tests.rewards.hostile import hostile
from tests.rewards.test_reward_model import make_model

TEXTS = ["7", "<think>so</think><answer>7</answer>", "8 8 8 8 8 8", '{"a": 7}']
ROWS = [
    {"question": "3+4", "answer": "7", "completion_ids": [1, 2, 3], "tests": ["x = 1", "assert x == 1"]},
    {"question": "3+4?", "answer": "7", "completion_ids": [1] * 9, "tests": None},
    {"question": "5+3", "answer": "8", "completion_ids": [], "tests": [{"stdin": "", "stdout": ""}]},
    {"question": "a", "answer": "7", "completion_ids": [5], "tests": "print(1)"},
]


def agree(before: Sequence[Mark], after: Sequence[Mark]) -> None:
    """The same scores, but for what a batch changes in the last digits of a model's."""
    assert [type(outcome) for outcome in before] == [type(outcome) for outcome in after]
    for one, other in zip(before, after):
        if isinstance(one, float):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


class GraderContract:
    """What every grader owes its callers; a subclass gives the fixture ``grader``."""

    def test_has_a_name(self, grader: Any) -> None:
        assert re.fullmatch(r"[\w./-]+", grader_name(grader))

    def test_scores_are_numbers(self, grader: Any) -> None:
        outcomes = attempt_grader(grader, TEXTS, ROWS)
        assert len(outcomes) == len(TEXTS)
        assert all(outcome is None or (isinstance(outcome, float) and math.isfinite(outcome)) for outcome in outcomes)
        assert any(outcome is not None for outcome in outcomes)

    def test_repeats_itself(self, grader: Any) -> None:
        agree(attempt_grader(grader, TEXTS, ROWS), attempt_grader(grader, TEXTS, ROWS))

    def test_takes_each_completion_for_itself(self, grader: Any) -> None:
        together = attempt_grader(grader, TEXTS, ROWS)
        agree(together, [attempt_grader(grader, [text], [row])[0] for text, row in zip(TEXTS, ROWS)])
        agree(together, attempt_grader(grader, TEXTS[::-1], ROWS[::-1])[::-1])

    def test_leaves_its_input_alone(self, grader: Any) -> None:
        texts, rows = list(TEXTS), copy.deepcopy(ROWS)
        attempt_grader(grader, texts, rows)
        assert (texts, rows) == (TEXTS, ROWS)

    def test_answers_odd_texts(self, grader: Any) -> None:
        """Any text that a model may generate gets a score, or None, but never a failure."""
        for text, row in zip(ODD_TEXTS, cycle(ROWS)):
            (outcome,) = attempt_grader(grader, [text], [row])
            assert outcome is None or isinstance(outcome, float), (text[:40], outcome)

    def test_opens_and_closes(self, grader: Any) -> None:
        """Again and again, and a closed grader can be used again."""
        before = attempt_grader(grader, TEXTS, ROWS)
        for _ in range(2):  # a second opening may meet what the first closing has left behind
            setup(grader)
            setup(grader)
            agree(before, attempt_grader(grader, TEXTS, ROWS))
            close(grader)
            close(grader)
        setup(grader)
        agree(before, attempt_grader(grader, TEXTS, ROWS))


PLAIN: dict[str, Callable[[], Any]] = {
    "exact_match": lambda: exact_match,
    "format_tags": lambda: library_grader("format_tags"),
    "json_valid": lambda: library_grader("json_valid", {"required": ["a"]}),
    "length": lambda: library_grader("length", {"target": 4}),
    "overlong": lambda: library_grader("overlong", {"max_tokens": 8, "cache_tokens": 4}),
    "regex": lambda: library_grader("regex", {"pattern": r"\d"}),
    "repetition": lambda: library_grader("repetition", {"n": 2}),
    "combined": lambda: CombinedGrader([exact_match, (library_grader("repetition"), 0.5)]),
}


@pytest.mark.parametrize("name", PLAIN)
class TestLibrary(GraderContract):
    @pytest.fixture
    def grader(self, name: str) -> Any:
        return PLAIN[name]()


class TestAccuracy(GraderContract):
    @pytest.fixture
    def grader(self) -> Iterator[Any]:
        with Accuracy(timeout=20) as grader:
            yield grader


class TestIsolated(GraderContract):
    @pytest.fixture
    def grader(self) -> Iterator[Any]:
        with IsolatedGrader(hostile) as grader:
            yield grader


class TestSandbox(GraderContract):
    @pytest.fixture
    def grader(self) -> Any:
        return SandboxGrader()


class TestJudge(GraderContract):
    @pytest.fixture
    def grader(self) -> Iterator[Any]:
        def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
            return 200, chat(json.dumps({"score": len(body["messages"][0]["content"]) % 11}))

        with serve(answer) as server:
            yield JudgeGrader("m", base_url=server.url, api_key_env=None)


class TestPairwiseJudge(GraderContract):
    @pytest.fixture
    def grader(self) -> Iterator[Any]:
        def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
            return 200, chat(json.dumps({"winner": "AB"[len(body["messages"][0]["content"]) % 2]}))

        with serve(answer) as server:
            judge = PairwiseJudgeGrader("m", against="reference", base_url=server.url, api_key_env=None)
            yield judge


@pytest.mark.model
class TestRewardModel(GraderContract):
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("reward_model"), positions=2**15)

    @pytest.fixture
    def grader(self, folder: Path) -> Any:
        return RewardModelGrader(str(folder))


def test_every_grader_of_the_library_is_here() -> None:
    assert set(LIBRARY) <= {*PLAIN, "accuracy", "judge", "pairwise_judge", "reward_model", "sandbox"}
