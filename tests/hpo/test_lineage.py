"""The family a run leaves behind, told from its records."""

import json
import math

import pytest

from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.lineage import (
    birth_record,
    event_record,
    family_tree,
    fitness_record,
    mutation_record,
    winning_lineage,
)
from agilerl.hpo.mutation import Change, Mutation
from agilerl.hpo.schedule import hyperparameter_schedule


def exam(agent, generation, trained):
    tokens = {"generated": 10 * trained, "trained": trained, "evaluated": 5}
    return fitness_record(agent, generation, generation + 1, Fitness(0.5, 0.1, 8), tokens)


def moved(agent, generation, gene, old, new, kind="hyperparameters"):
    return mutation_record(Mutation(agent, kind, (Change(gene, old, new),)), generation)


def story():
    """0 -> 2 -> 3: 2 is cloned off 0 in generation 1, mutates at birth and again in 2; 3 is cloned off 2 in 3."""
    lines = [
        birth_record(0, None, 0, 0, {"lr": 1e-5, "beta": 0.1}),
        birth_record(1, None, 0, 0, {"lr": 1e-3, "beta": 0.1}),
        exam(0, 0, 100),
        exam(1, 0, 90),
        event_record("elite", 0, 0),
        moved(0, 0, "lr", 1e-5, 2e-5),
        exam(0, 1, 200),
        exam(1, 1, 190),
        event_record("elite", 0, 1),
        event_record("death", 1, 1, reason="truncation"),
        birth_record(2, 0, 1, 2, {"lr": 2e-5, "beta": 0.1}),
        moved(2, 1, "lr", 2e-5, 8e-5),
        # The parent's own mutation of the generation in which it was cloned is not inherited.
        moved(0, 1, "beta", 0.1, 0.9),
        mutation_record(Mutation(0, "rank"), 1),
        exam(0, 2, 300),
        exam(2, 2, 310),
        moved(2, 2, "beta", 0.1, 0.2),
        mutation_record(Mutation(0), 2),
        mutation_record(Mutation(2, "rank"), 2),
        exam(0, 3, 400),
        exam(2, 3, 420),
        birth_record(3, 2, 3, 4, {"lr": 8e-5, "beta": 0.2}),
        moved(2, 3, "lr", 8e-5, 1e-7),
        exam(2, 4, 500),
        exam(3, 4, 530),
        event_record("elite", 3, 4),
    ]
    return [json.loads(json.dumps(line, allow_nan=False)) for line in lines]


def test_records_have_the_documented_lines():
    assert story()[0] == {
        "event": "birth",
        "agent": 0,
        "parent": None,
        "generation": 0,
        "step": 0,
        "hyperparameters": {"lr": 1e-5, "beta": 0.1},
    }
    broken = fitness_record(3, 1, 2, Fitness(math.nan, math.nan, 8), {"trained": 7})
    assert broken == {
        "event": "fitness",
        "agent": 3,
        "generation": 1,
        "step": 2,
        "mean": None,
        "stderr": None,
        "n": 8,
        "tokens": {"trained": 7},
    }
    line = moved(2, 1, "lr", 2e-5, 8e-5)
    assert (line["event"], line["kind"]) == ("mutation", "hyperparameters")
    assert line["changes"] == [{"gene": "lr", "old": 2e-5, "new": 8e-5}]
    assert event_record("death", 1, 1, reason="why") == {"event": "death", "agent": 1, "generation": 1, "reason": "why"}
    assert event_record("elite", 1, 4) == {"event": "elite", "agent": 1, "generation": 4}


def test_family_tree():
    lives = family_tree(story())
    assert list(lives) == [0, 1, 2, 3]
    assert [lives[i].parent for i in lives] == [None, None, 0, 2]
    assert [lives[i].children for i in lives] == [[2], [], [3], []]
    assert (lives[1].died, lives[1].reason) == (1, "truncation")
    assert lives[0].died is None
    assert lives[0].elite_in == [0, 1]
    assert [one.generation for one in lives[2].exams] == [2, 3, 4]
    assert len(lives[0].mutations) == 3  # "none" is no mutation


def test_winning_lineage_from_the_founder():
    line = winning_lineage(story(), 3)
    assert [(a.agent, a.parent, a.from_generation, a.to_generation, a.from_step, a.to_step) for a in line] == [
        (0, None, 0, 1, 0, 2),
        (2, 0, 1, 3, 2, 4),
        (3, 2, 3, None, 4, None),
    ]
    assert [a.hyperparameters for a in line] == [
        {"lr": 1e-5, "beta": 0.1},
        {"lr": 8e-5, "beta": 0.1},
        {"lr": 8e-5, "beta": 0.2},
    ]
    assert [a.final_hyperparameters for a in line] == [
        {"lr": 2e-5, "beta": 0.1},
        {"lr": 8e-5, "beta": 0.2},
        {"lr": 8e-5, "beta": 0.2},
    ]


def test_schedule_follows_the_ancestors():
    schedule = hyperparameter_schedule(story(), 3)
    assert schedule == {
        "schema_version": 1,
        "agent": 3,
        "ancestors": [0, 2, 3],
        "unit": "trained tokens",
        "total_tokens": 530,
        "genes": {
            "lr": [
                {"tokens": 0, "value": 1e-5},
                {"tokens": 100, "value": 2e-5},
                {"tokens": 200, "value": 8e-5},
            ],
            "beta": [{"tokens": 0, "value": 0.1}, {"tokens": 310, "value": 0.2}],
        },
        "not_replayed": [{"tokens": 310, "kind": "rank", "agent": 2}],
    }
    assert json.loads(json.dumps(schedule)) == schedule


def test_schedule_of_a_founder_and_of_a_fresh_child():
    assert hyperparameter_schedule(story(), 1)["genes"]["lr"] == [{"tokens": 0, "value": 1e-3}]
    fresh = [*story(), birth_record(4, 3, 4, 5, {"lr": 8e-5, "beta": 0.2}), moved(4, 4, "lr", 8e-5, 1e-6)]
    schedule = hyperparameter_schedule(fresh, 4)
    assert schedule["genes"]["lr"][-1] == {"tokens": 530, "value": 1e-6}
    assert schedule["total_tokens"] == 530


@pytest.mark.parametrize(
    "line",
    [
        {"event": "birth", "agent": 0, "parent": None, "generation": 0, "step": 0, "hyperparameters": {}},
        {"event": "birth", "agent": 9, "parent": 7, "generation": 0, "step": 0, "hyperparameters": {}},
        {"event": "death", "agent": 8, "generation": 1, "reason": "x"},
        {"event": "wedding", "agent": 0},
        {"agent": 0},
    ],
)
def test_damaged_records_are_named(line):
    with pytest.raises(CheckpointError, match="invalid line"):
        family_tree([*story(), line])


def test_unknown_agents_and_missing_exams_are_errors():
    with pytest.raises(CheckpointError, match="no agent 12"):
        winning_lineage(story(), 12)
    without = [line for line in story() if not (line["event"] == "fitness" and line["generation"] == 1)]
    with pytest.raises(CheckpointError, match="agent 0 in generation 1"):
        hyperparameter_schedule(without, 3)


def test_token_counts_that_start_again_are_an_error():
    # A clone continues its parent's count; a schedule from counts that fall would be wrong, silently.
    restarted = [exam(2, 3, 20) if line == exam(2, 3, 420) else line for line in story()]
    with pytest.raises(CheckpointError, match="falls from 200 to 20"):
        hyperparameter_schedule(restarted, 3)
