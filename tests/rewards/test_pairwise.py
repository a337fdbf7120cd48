"""The judge of pairs against a real HTTP server on loopback: who meets whom, both orders, ties, failures, groups."""

import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from agilerl.algorithms import GRPO
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.errors import ConfigError, RewardError
from agilerl.population import Population
from agilerl.rewards import CombinedGrader, PairwiseJudgeGrader, call_grader, grade
from agilerl.rewards.grader import attempt_grader
from agilerl.runtime import Runtime
from tests.rewards.chat_server import ChatServer, chat, serve

ROWS = [{"question": "1+1?", "answer": "2"}] * 4


def judge(server: ChatServer, **settings: Any) -> PairwiseJudgeGrader:
    defaults: dict[str, Any] = {"base_url": server.url, "api_key_env": None, "first_wait": 0.0, "timeout": 5.0}
    return PairwiseJudgeGrader("grader-1", **{**defaults, **settings})


def shown(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the answers in the first and in the second place."""
    text = body["messages"][-1]["content"]
    return tuple(re.search(f"<answer_{x}>\n(.*)\n</answer_{x}>", text, re.S)[1] for x in "ab")  # type: ignore[return-value,index]


def longer(body: dict[str, Any], number: int) -> tuple[int, str]:
    """Prefer the longer answer."""
    a, b = map(len, shown(body))
    return 200, chat(json.dumps({"winner": "tie" if a == b else "A" if a > b else "B"}))


def test_the_score_is_the_share_of_wins_and_every_pair_is_asked_in_both_orders() -> None:
    texts = ["x", "xxx", "xx", "yy"]
    with serve(longer) as server, judge(server) as grader:
        scores = call_grader(grader, texts, ROWS)
    # by hand: x loses to all; xxx beats all; xx and yy beat x and tie
    assert scores == [0.0, 1.0, (1 + 0 + 0.5) / 3, (1 + 0 + 0.5) / 3]
    wanted = {order for two in combinations(texts, 2) for order in (two, two[::-1])}
    assert sorted(shown(body) for body in server.requests) == sorted(wanted)
    assert server.requests[0]["temperature"] == 0


def test_a_preference_for_a_place_is_cancelled() -> None:
    with serve(lambda body, number: (200, chat('{"winner": "A"}'))) as server, judge(server) as grader:
        assert call_grader(grader, ["x", "xx", "xxx"], ROWS[:3]) == [0.5, 0.5, 0.5]


def test_rounds_bound_the_pairs() -> None:
    texts = ["x" * n for n in range(1, 7)]
    with serve(longer) as server, judge(server, rounds=1) as grader:
        scores = call_grader(grader, texts, ROWS[:1] * 6)
    assert len(server.requests) == 2 * 6  # a circle of six
    assert scores == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    with serve(longer) as server, judge(server, rounds=9) as grader:
        assert call_grader(grader, texts, ROWS[:1] * 6) == [n / 5 for n in range(6)]


def test_prompts_and_groups_are_apart_and_equal_texts_cost_nothing() -> None:
    rows = [{"question": q} for q in "aabb"]
    with serve(longer) as server, judge(server) as grader:
        assert call_grader(grader, ["x", "xx", "same", "same"], rows) == [0.0, 1.0, 0.5, 0.5]
    assert len(server.requests) == 2


def test_against_the_reference_each_stands_alone() -> None:
    rows = [{"question": "q", "answer": "xx"}, {"question": "q", "answer": "xx"}, {"question": "p", "answer": "y"}]
    with serve(longer) as server, judge(server, against="reference") as grader:
        assert call_grader(grader, ["x", "xxx", "z"], rows) == [0.0, 1.0, 0.5]
    assert sorted(map(shown, server.requests))[0] == ("x", "xx")
    with pytest.raises(ConfigError, match="rounds=2"):
        PairwiseJudgeGrader("m", against="reference", rounds=2)


def test_who_is_alone_meets_the_reference_or_fails() -> None:
    with serve(longer) as server, judge(server) as grader:
        assert call_grader(grader, ["xx"], [{"question": "q", "answer": "x"}]) == [1.0]
        (outcome,) = attempt_grader(grader, ["xx"], [{"question": "q"}])
    assert isinstance(outcome, RewardError)
    assert "fitness_grader" in str(outcome)


def test_a_pair_counts_only_with_both_orders() -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
        return (400, "no") if shown(body) == ("xxx", "x") else longer(body, number)

    with serve(answer) as server, judge(server) as grader:
        grades = grade(grader, ["x", "xx", "xxx"], ROWS[:3])
        assert grades.rewards == [0.0, 0.5, 1.0]  # of the pairs (x, xx) and (xx, xxx)
        assert grades.errors == {"pairwise_judge": 0}
        both = grade(CombinedGrader([grader]), ["x", "xxx", "y", "yy"], [{"question": q} for q in "aabb"])
    assert both.rewards == [None, None, 0.0, 1.0]
    assert both.failures["pairwise_judge"] == [0, 1]
    assert "status 400" in str(both.reasons[0])


@pytest.mark.parametrize(
    ("reply", "settings", "score"),
    [
        ('{"winner": "b"} {"winner": " Tie "}', {}, 0.5),
        ("I prefer: B. No: A", {"pattern": r"\b(A|B)\b"}, 0.5),
        ('{"winner": "C"}', {}, None),
        ('{"winner": 1}', {}, None),
        ("A", {}, None),
    ],
)
def test_replies(reply: str, settings: dict[str, Any], score: float | None) -> None:
    with serve(lambda body, number: (200, chat(reply))) as server, judge(server, **settings) as grader:
        outcomes = attempt_grader(grader, ["x", "y"], ROWS[:2])
    assert [None if isinstance(o, RewardError) else o for o in outcomes] == [score, score]


def test_replies_are_cached(tmp_path: Any) -> None:
    with serve(longer) as server:
        for _ in range(2):
            with judge(server, cache=tmp_path / "pairs.jsonl") as grader:
                assert call_grader(grader, ["x", "xx"], ROWS[:2]) == [0.0, 1.0]
    assert len(server.requests) == 2


@pytest.mark.model
def test_in_a_population_an_agents_completions_meet_only_each_other() -> None:
    """With one prompt for all agents, and alone, an agent has the same rewards: groups are per agent."""

    def rewards(agents: int) -> list[list[float]]:
        runtime = Runtime.from_pretrained("embedded")
        words = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 5}, exam_prompts=4)
        with serve(longer) as server:
            task = GradedTask(words, judge(server), fitness_grader=TaskGrader(words))
            made = GRPO.population(
                agents, runtime=runtime, lr=1e-3, group_size=4, batch_size=8, max_output_tokens=8, temperature=1.5
            )
            population = Population(made, task, prompts_per_step=2)
            rollout = population.rollout()
            task.close()
        return [[t.episode_return for t in rollout.trajectories[agent.index]] for agent in made]

    together, alone = rewards(2), rewards(1)
    assert together[0] == alone[0]
    for own in together:
        for group in (own[:4], own[4:]):
            assert sum(group) == pytest.approx(2.0)  # every comparison gives away one point: 6 of them, 3 each
    assert len(set(together[0])) > 1
