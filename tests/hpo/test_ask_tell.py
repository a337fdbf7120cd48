"""The search for other trainers: who is asked to train what, what comes of exams, and the same again from a state."""

import json
from typing import Any

import numpy as np
import pytest

from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.evolution import Assignment, Evolution
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.parameters import Gene
from agilerl.hpo.strategies import SETTINGS, LRSchedule

GENES = {"lr": Gene("lr", "float", min=1e-6, max=1e-1), "depth": Gene("depth", "int", min=1, max=8)}
VALUES = {"lr": 1e-3, "depth": 4}


def made(strategy: Any = "knockout", **settings: Any) -> Evolution:
    return Evolution(VALUES, GENES, strategy=strategy, seed=7, **settings)


def solved(right: int, of: int = 40) -> list[float]:
    return [1.0] * right + [0.0] * (of - right)


def run(evolution: Evolution, first: int, last: int, of: int = 12) -> list[Any]:
    """Tell exams that favour a learning rate of 3e-3, and return what was asked and decided."""
    seen: list[Any] = []
    for turn in range(first, last):
        asked = evolution.ask()
        rng = np.random.default_rng(turn)
        bar = rng.random(60)
        exams = {
            one.member: [
                float(b < 0.2 + 0.05 * turn - 0.2 * abs(np.log10(float(one.hyperparameters["lr"]) / 3e-3))) for b in bar
            ]
            for one in asked
        }
        told = evolution.tell(exams, (turn + 1) / of)
        seen.append((asked, told.plan.to_dict(), [change.to_dict() for change in told.mutations], told.keep))
    return seen


def test_founders_are_the_configuration_and_others_around_it() -> None:
    asked = made().ask()
    assert [one.member for one in asked] == [0, 1, 2, 3]
    assert asked[0] == Assignment(0, VALUES)
    assert all(1e-4 <= one.hyperparameters["lr"] <= 3e-3 and one.parent is None for one in asked)
    assert len({one.hyperparameters["lr"] for one in asked}) == 4
    assert made().ask() == asked
    # A strategy that keeps its agents has the whole range.
    assert max(one.hyperparameters["lr"] for one in made("none", size=16).ask()) > 1e-2


def test_the_knockout_halves_and_a_challenger_begins_with_its_parents_weights() -> None:
    evolution = made()
    told = evolution.tell({0: solved(20), 1: solved(2), 2: solved(30), 3: solved(1)}, 0.1)
    assert told.plan.deaths == (1, 3)
    assert told.keep == 2
    assert [one.member for one in evolution.ask()] == [0, 2]
    assert evolution.tell({0: solved(20), 2: solved(35)}, 0.2).plan.deaths == (0,)
    evolution.tell({2: solved(36)}, 0.3)
    parent, child = evolution.ask()
    assert (parent.member, parent.parent) == (2, None)
    assert (child.member, child.parent, child.from_best) == (4, 2, False)
    assert child.hyperparameters["lr"] == pytest.approx(3 * parent.hyperparameters["lr"])


def test_the_guard_brings_the_kept_copy_back() -> None:
    evolution = made("pulses", size=1)
    assert evolution.tell({0: solved(38)}, 0.5).keep == 0
    told = evolution.tell({0: solved(4)}, 0.6)
    assert told.keep is None
    (back,) = evolution.ask()
    assert (back.member, back.parent, back.from_best) == (1, 0, True)
    assert back.hyperparameters["lr"] == pytest.approx(4e-4)


@pytest.mark.parametrize("strategy", SETTINGS)
def test_from_its_state_a_search_decides_the_same(strategy: str) -> None:
    whole = run(made(strategy), 0, 12)
    for cut in (1, 4, 7):
        begun = made(strategy)
        run(begun, 0, cut)
        state = json.loads(json.dumps(begun.state()))
        again = made(strategy)
        again.load_state(state)
        assert run(again, cut, 12) == whole[cut:]


def test_learning_rates_anneal_where_the_strategy_ends_with_one_agent() -> None:
    assert made().factor(0.8) == pytest.approx(0.5)
    assert made("tournament").factor(0.8) == 1
    assert made("tournament", schedule=LRSchedule("linear", decay=1.0)).factor(0.25) == pytest.approx(0.75)


def test_exams_may_be_means_alone_and_a_broken_member_leaves() -> None:
    evolution = made("knockout", size=2)
    told = evolution.tell({0: Fitness(float("nan")), 1: Fitness(0.5)}, 0.1)
    assert (told.plan.deaths, told.keep) == ((0,), 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: made().tell({0: [1.0]}, 0.1), r"\[0, 1, 2, 3\]"),
        (lambda: made("knokout"), "knockout"),
        (lambda: made(settings={"tournament_size": 2}), "tournament_size"),
        (lambda: Evolution({"lr": 1.0, "depth": 4}, GENES), "lr"),
        (lambda: Evolution({"lr": 1e-3}, GENES), "depth"),
        (lambda: made().factor(1.5), "1.5"),
        (lambda: made(object(), settings={"period": 2}), "object"),
        (lambda: made(object()), "object with plan"),
        (lambda: made(settings={"pulses": {"evry": 2}}), "evry"),
        (lambda: made(settings={"pulses": 3}), "found 3"),
        (lambda: made("halving", settings={"between": "tournament"}), "between"),
    ],
)
def test_mistakes_are_named(wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        wrong()


@pytest.mark.parametrize(
    "change", [{"version": 9}, {"members": [{"index": 0}]}, {"members": [{"index": 0, "values": {"lr": 5.0}}]}]
)
def test_what_is_no_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    evolution = made()
    before = evolution.state()
    with pytest.raises(CheckpointError):
        evolution.load_state({**before, **change})
    assert evolution.state() == before
