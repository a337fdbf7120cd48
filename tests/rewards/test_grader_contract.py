"""Every grader of the package keeps the contract, and the contract catches what breaks it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agilerl.errors import RewardError
from agilerl.rewards import (
    GRADER_CHECKS,
    LIBRARY,
    Accuracy,
    BaseGrader,
    CombinedGrader,
    GraderCase,
    IsolatedGrader,
    JudgeGrader,
    PairwiseJudgeGrader,
    RewardModelGrader,
    SandboxGrader,
    check_grader,
    exact_match,
    library_grader,
)
from agilerl.rewards.trl_rewards import WITH_ALGEBRA, TrlMathematics
from tests.contracts.grader_contract import GraderContract
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


def case_of(grader: Any) -> GraderCase:
    return GraderCase(grader, TEXTS, ROWS)


PLAIN: dict[str, Callable[[], Any]] = {
    "exact_match": lambda: exact_match,
    "format_tags": lambda: library_grader("format_tags"),
    "json_valid": lambda: library_grader("json_valid", {"required": ["a"]}),
    "length": lambda: library_grader("length", {"target": 4}),
    "overlong": lambda: library_grader("overlong", {"max_tokens": 8, "cache_tokens": 4}),
    "regex": lambda: library_grader("regex", {"pattern": r"\d"}),
    "repetition": lambda: library_grader("repetition", {"n": 2}),
    "trl.think_format_reward": lambda: library_grader("trl.think_format_reward"),
    "trl.get_repetition_penalty_reward": lambda: library_grader("trl.get_repetition_penalty_reward"),
    "trl.get_soft_overlong_punishment": lambda: library_grader(
        "trl.get_soft_overlong_punishment", {"max_completion_len": 8, "soft_punish_cache": 4}
    ),
    "combined": lambda: CombinedGrader([exact_match, (library_grader("repetition"), 0.5)]),
}


@pytest.mark.parametrize("name", PLAIN)
class TestLibrary(GraderContract):
    @pytest.fixture
    def case(self, name: str) -> GraderCase:
        return case_of(PLAIN[name]())


class TestAccuracy(GraderContract):
    @pytest.fixture
    def case(self) -> Iterator[GraderCase]:
        with Accuracy(timeout=20) as grader:
            yield case_of(grader)


class TestTRLMathematics(GraderContract):
    """All three are called in the same way, and the others are in ``test_trl_convention``."""

    @pytest.fixture
    def case(self) -> Iterator[GraderCase]:
        with TrlMathematics("get_cosine_scaled_reward", timeout=20, max_len=8) as grader:
            yield case_of(grader)


class TestIsolated(GraderContract):
    @pytest.fixture
    def case(self) -> Iterator[GraderCase]:
        with IsolatedGrader(hostile) as grader:
            yield case_of(grader)


class TestSandbox(GraderContract):
    @pytest.fixture
    def case(self) -> GraderCase:
        return case_of(SandboxGrader())


class TestJudge(GraderContract):
    @pytest.fixture
    def case(self) -> Iterator[GraderCase]:
        def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
            return 200, chat(json.dumps({"score": len(body["messages"][0]["content"]) % 11}))

        with serve(answer) as server:
            yield case_of(JudgeGrader("m", base_url=server.url, api_key_env=None))


class TestPairwiseJudge(GraderContract):
    @pytest.fixture
    def case(self) -> Iterator[GraderCase]:
        def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
            return 200, chat(json.dumps({"winner": "AB"[len(body["messages"][0]["content"]) % 2]}))

        with serve(answer) as server:
            judge = PairwiseJudgeGrader("m", against="reference", base_url=server.url, api_key_env=None)
            yield case_of(judge)


@pytest.mark.model
class TestRewardModel(GraderContract):
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("reward_model"), positions=2**15)

    @pytest.fixture
    def case(self, folder: Path) -> GraderCase:
        return case_of(RewardModelGrader(str(folder)))


def test_every_grader_of_the_library_is_here() -> None:
    assert set(LIBRARY) <= {*PLAIN, "accuracy", "judge", "pairwise_judge", "reward_model", "sandbox"} | {
        f"trl.{name}" for name in WITH_ALGEBRA
    }


# -- the contract catches ---------------------------------------------------------------------------------------------


def nan(completion: str) -> float:
    return float("nan")


def never(completion: str) -> None:
    return None


class Moody:
    """Scores by how often it was called."""

    name = "moody"
    calls = 0

    def __call__(self, completion: str) -> float:
        self.calls += 1
        return float(self.calls)


def by_rank(completions: list[str]) -> list[float]:
    return [float(sorted(completions).index(text)) for text in completions]


def writes(completions: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    for entry in metadata:
        entry["seen"] = True
    return [1.0] * len(completions)


def cannot_read(completion: str) -> float:
    return float(completion)


class OpensOnce(BaseGrader):
    name = "opens_once"
    opened = False

    def open(self) -> None:
        if self.opened:
            raise RewardError("expected to be opened once")
        self.opened = True

    def __call__(self, completion: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("grader", "sentence"),
    [
        (lambda completion: 1.0, "expected a name of letters"),
        (nan, "found a failure: nan must return a finite number"),
        (never, "at least one of them a number"),
        (Moody(), "the same score when graded again"),
        (by_rank, "the same score when graded alone"),
        (writes, "found them changed"),
        (cannot_read, "expected a score or None for the text ''"),
        (OpensOnce(), "expected to be opened once"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_the_contract_catches(grader: Any, sentence: str) -> None:
    rows = [{"metadata": {}}, {"metadata": {}}]
    assert sentence in " ".join(check_grader(grader, ["2", "1"], rows))


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert check_grader(exact_match, TEXTS, ROWS) == []
    assert len(GRADER_CHECKS) == 7
