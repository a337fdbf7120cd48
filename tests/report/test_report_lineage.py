import math
from itertools import pairwise

import pytest
from small_run import birth, fitness, train, write_run

from agilerl.hpo.fitness import Fitness
from agilerl.report.load import load_run


@pytest.fixture
def family_of_four(tmp_path):
    """Founders 0 and 1; 2 and 3 are children of 0; 4 is a child of 3 and wins."""
    lineage = [
        birth(0, None, 0, lr=1e-3),
        birth(1, None, 0, lr=1e-5),
        fitness(0, 0, 0.6),
        fitness(1, 0, 0.3),
        {"event": "death", "agent": 1, "generation": 0, "reason": "not selected"},
        birth(2, 0, 1, lr=1e-3),
        fitness(0, 1, 0.65),
        fitness(2, 1, 0.5),
        birth(3, 0, 2, lr=1e-3),
        {"event": "mutation", "agent": 3, "generation": 2, "changes": [{"gene": "lr", "old": 1e-3, "new": 5e-3}]},
        fitness(0, 2, 0.66),
        fitness(3, 2, 0.7),
        birth(4, 3, 3, lr=5e-3),
        fitness(3, 3, 0.75),
        fitness(4, 3, 0.8),
        {"event": "elite", "agent": 4, "generation": 3},
    ]
    return load_run(write_run(tmp_path / "run", lineage=lineage))


def test_the_winning_lineage_goes_back_to_the_founder(family_of_four):
    family = family_of_four.family
    assert family.winner == 4
    assert family.line == [0, 3, 4]
    assert family.line_nodes() == [(0, 0), (0, 1), (3, 2), (4, 3)]


def test_the_summary_decides_who_won(tmp_path):
    lineage = [birth(i, None, 0) for i in range(3)] + [fitness(i, 0, 0.5 + i / 10) for i in range(3)]
    elite = [{"event": "elite", "agent": 1, "generation": 0}]
    winners = [
        load_run(write_run(tmp_path / str(i), lineage=found, summary=summary)).family.winner
        for i, (found, summary) in enumerate(
            [(lineage + elite, {"elite": {"index": 0}}), (lineage + elite, None), (lineage, None), ([], None)]
        )
    ]
    assert winners == [0, 1, 2, None]


@pytest.mark.parametrize("name", ["whole", "other", "unfinished"])
def test_rows_never_collide_and_none_is_wasted(runs, name):
    run = load_run(runs[name])
    family = run.family
    places = [(family.rows[agent], generation) for agent, span in family.spans.items() for generation in span]
    assert len(set(places)) == len(places)
    assert family.height == run.info["config"]["training"]["pop_size"]
    for parent, child in pairwise(family.line):
        assert run.agents[child].parent == parent


def test_a_value_is_followed_through_birth_and_mutation(family_of_four):
    agent = family_of_four.agents[3]
    assert [agent.values(generation)["lr"] for generation in (1, 2)] == [1e-3, 5e-3]
    assert agent.values() == agent.first_values() == {"lr": 5e-3}


def test_an_agent_born_and_never_examined_comes_after_its_parent(tmp_path):
    lineage = [birth(0, None, 0), fitness(0, 0, 0.5), birth(1, 0, 0)]
    family = load_run(write_run(tmp_path / "run", lineage=lineage)).family
    assert family.spans == {0: [0], 1: [1]}


def test_metrics_alone_make_a_family(tmp_path):
    metrics = [train(0, 1), train(5, 1), {"kind": "eval", "agent": 5, "generation": 0, "step": 1}]
    metrics[-1] |= {"eval/reward_mean": 0.4, "eval/stderr": 0.1, "eval/n": 9}
    run = load_run(write_run(tmp_path / "run", metrics=metrics))
    assert run.agents[5].exams[0].score == Fitness(0.4, 0.1, 9)
    assert run.family.winner == 5


def test_a_circle_of_parents_ends(tmp_path):
    lineage = [birth(0, 1, 0), birth(1, 0, 0), birth(2, 2, 0), fitness(1, 0, 0.5)]
    assert load_run(write_run(tmp_path / "run", lineage=lineage)).family.line == [0, 1]


def test_a_line_written_twice_counts_once(tmp_path):
    metrics = [train(0, 1, reward=0.1), train(0, 2, reward=0.2), train(0, 1, reward=0.3)]
    lineage = [birth(0, None, 0), fitness(0, 0, 0.5), fitness(0, 0, 0.6)]
    run = load_run(write_run(tmp_path / "run", metrics=metrics, lineage=lineage))
    assert [line["reward"] for line in run.agents[0].train] == [0.3, 0.2]
    assert [exam.score.mean for exam in run.agents[0].exams] == [0.6]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Fitness(0.9, math.sqrt(0.09 / 400), 400), True),
        (Fitness(0.9, math.sqrt(0.09 / 399), 400), True),
        (Fitness(1.0, 0.0, 400), True),
        (Fitness(0.9, 0.005, 400), False),
        (Fitness(1.5, 0.01, 400), False),
        (Fitness(math.nan, math.nan, 400), False),
        (Fitness(0.9, 0.015, 0), False),
    ],
)
def test_an_accuracy_is_told_by_its_error(score, expected):
    assert score.is_accuracy is expected
