"""Fitness of several objectives: fronts, crowding, evidence, what strategies make of them, and a front to be found."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import (
    Fitness,
    crowding_distance,
    evidence,
    non_dominated_fronts,
    pareto_front,
    probability_better,
    ranking,
)
from agilerl.hpo.knockout import KnockoutSelection, PulseSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.selection import SuccessiveHalving, TruncationSelection
from agilerl.hpo.tournament import TournamentSelection

PROPERTIES = settings(max_examples=150, deadline=None, derandomize=True, database=None)
FEW = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])
"""Few values, so that ties and duplicates are frequent."""


def exam(reward: float, **costs: float) -> Fitness:
    return Fitness(reward, 0.01, 8, costs={name: Fitness(cost, 0.01, 8) for name, cost in costs.items()})


@st.composite
def vectors(draw: Any) -> dict[int, tuple[float, ...]]:
    size = draw(st.integers(1, 4))
    indices = draw(st.lists(st.integers(0, 60), max_size=14, unique=True))
    return {index: tuple(draw(FEW) for _ in range(size)) for index in indices}


@st.composite
def exams(draw: Any) -> dict[int, Fitness]:
    indices = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True))
    values = st.one_of(FEW, st.just(math.nan)) if draw(st.booleans()) else FEW
    return {index: exam(draw(values), kl=draw(values), length=draw(FEW)) for index in indices}


# -- fronts and crowding ----------------------------------------------------------------------------------------------


def beats(a: Sequence[float], b: Sequence[float]) -> bool:
    return tuple(a) != tuple(b) and not any(x < y for x, y in zip(a, b, strict=True))


@PROPERTIES
@given(vectors())
def test_fronts_are_the_lengths_of_chains_of_dominance(points: dict[int, tuple[float, ...]]) -> None:
    # Another definition than the peeling of the code: an agent's front is the longest chain of agents above it.
    depth: dict[int, int] = {}
    for index in sorted(points, key=lambda i: sum(points[i]), reverse=True):  # who dominates has the larger sum
        depth[index] = max((depth[o] + 1 for o in depth if beats(points[o], points[index])), default=0)
    expected = [sorted(i for i in points if depth[i] == n) for n in range(max(depth.values(), default=-1) + 1)]
    assert non_dominated_fronts(points) == expected


def naive_crowding(points: dict[int, tuple[float, ...]]) -> dict[int, float]:
    """The text of the paper, for values that all differ."""
    found = dict.fromkeys(points, 0.0)
    for place in range(len(next(iter(points.values())))):
        order = sorted(points, key=lambda i: points[i][place])
        span = points[order[-1]][place] - points[order[0]][place]
        found[order[0]] = found[order[-1]] = math.inf
        for k in range(1, len(order) - 1):
            found[order[k]] += (points[order[k + 1]][place] - points[order[k - 1]][place]) / span
    return found


@PROPERTIES
@given(st.integers(3, 9), st.integers(1, 3), st.integers(0, 10_000))
def test_crowding_is_that_of_nsga_ii(count: int, size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).random((count, size))
    points = {7 * k + 1: tuple(row) for k, row in enumerate(rows)}
    assert crowding_distance(points) == pytest.approx(naive_crowding(points))
    # In shares of the range: neither units nor zero matter.
    scaled = {index: tuple(3 * x - 5 for x in point) for index, point in points.items()}
    assert crowding_distance(scaled) == pytest.approx(crowding_distance(points))


def test_of_equal_ends_the_oldest_is_far_and_copies_are_crowded() -> None:
    points = {4: (0.9, -2.0), 2: (0.9, -2.0), 3: (0.9, -2.0), 7: (0.5, -1.0)}
    distance = crowding_distance(points)
    assert distance[2] == distance[7] == math.inf
    assert max(distance[3], distance[4]) < math.inf
    assert crowding_distance({1: (0.5, -1.0), 0: (0.5, -1.0)}) == {0: 0.0, 1: 0.0}
    assert crowding_distance({}) == {}


@PROPERTIES
@given(exams())
def test_the_first_in_a_ranking_is_the_best_mean_on_the_front(fitness: dict[int, Fitness]) -> None:
    ranked = ranking(fitness)
    finite = {i: f for i, f in fitness.items() if f.is_finite}
    assert sorted(ranked) == sorted(fitness)
    assert ranked[len(finite) :] == sorted(set(fitness) - set(finite))
    assert ranking(dict(reversed(fitness.items()))) == ranked
    front = [i for i in finite if not any(beats(o.vector, finite[i].vector) for o in finite.values())]
    assert sorted(pareto_front(fitness)) == sorted(front)
    assert set(ranked[: len(front)]) == set(front)
    if finite:
        assert ranked[0] in front
        assert fitness[ranked[0]].mean == max(f.mean for f in finite.values())


def test_one_objective_is_ranked_by_its_mean_alone() -> None:
    fitness = {0: Fitness(0.5), 1: Fitness(0.9), 2: Fitness(math.nan), 3: Fitness(0.9)}
    assert ranking(fitness) == [1, 3, 0, 2]
    assert pareto_front(fitness) == [1, 3]
    # A vector by hand: 1 and 2 dominate 0, which is between 3 and nothing.
    mixed = {
        0: exam(0.5, kl=0.5),
        1: exam(0.9, kl=0.4),
        2: exam(0.6, kl=0.1),
        3: exam(0.5, kl=0.6),
        4: exam(0.7, kl=0.2),
    }
    assert ranking(mixed) == [1, 2, 4, 0, 3]


def test_objectives_that_differ_between_agents_are_refused() -> None:
    with pytest.raises(ConfigError, match="same objectives"):
        ranking({0: exam(0.5, kl=0.5), 1: Fitness(0.4)})
    assert ranking({0: exam(0.5, kl=0.5), 1: Fitness(math.nan)}) == [0, 1]  # such as of a sick agent


def test_a_cost_that_is_not_finite_ranks_last_and_states_keep_everything() -> None:
    broken = exam(1.0, kl=math.nan, length=2.0)
    assert not broken.is_finite
    assert ranking({0: broken, 1: exam(0.1, kl=3.0, length=9.0)}) == [1, 0]
    whole = Fitness.from_scores([1.0, 0.0])
    vector = replace(whole, costs={"kl": Fitness.from_scores([0.1, 0.3])})
    assert Fitness.from_state(json.loads(json.dumps(vector.state()))) == vector
    assert vector.to_dict()["costs"] == {"kl": {"mean": pytest.approx(0.2), "stderr": pytest.approx(0.1), "n": 2}}
    assert set(whole.state()) == {"mean", "stderr", "n", "scores"}
    assert set(whole.to_dict()) == {"mean", "stderr", "n"}


# -- evidence: what a gate asks ---------------------------------------------------------------------------------------


def measured(reward: Sequence[float], **costs: Sequence[float]) -> Fitness:
    found = {name: Fitness.from_scores(list(values)) for name, values in costs.items()}
    return replace(Fitness.from_scores(list(reward)), costs=found)


def test_evidence_of_one_objective_is_the_paired_test() -> None:
    a, b = Fitness.from_scores([1, 1, 1, 0, 1, 1.0]), Fitness.from_scores([0, 1, 0, 0, 1, 0.0])
    found = evidence(a, b, 0.8)
    assert (found.probability, found.needed, found.is_enough) == (probability_better(a, b), 0.8, True)
    assert str(found) == f"P = {found.probability:.3f} >= 0.8"
    tie = evidence(a, a, 0.5)
    assert not tie.is_enough
    assert str(tie) == "P = 0.500 < 0.5"


def test_a_trade_off_is_no_evidence_and_dominance_is() -> None:
    rng = np.random.default_rng(3)
    level = rng.random(64)
    base = measured(level, kl=level + 1, length=level + 9)
    better = measured(level + 0.1, kl=level + 1, length=level + 9)
    traded = measured(level + 0.1, kl=level + 1.5, length=level + 9)
    cheaper = measured(level, kl=level + 0.5, length=level + 9)
    for one, enough in ((better, True), (cheaper, True), (traded, False)):
        assert evidence(one, base, 0.8).is_enough is enough
        assert not evidence(base, one, 0.8).is_enough
    # What decides is named: three objectives ask 1 - 0.2 / 3 of one of them.
    assert str(evidence(better, base, 0.8)) == "P = 1.000 >= 0.933 in reward"
    assert "but worse in kl with P = 1.000" in str(evidence(traded, base, 0.8))
    assert evidence(cheaper, base, 0.8).about == "kl"


@pytest.mark.parametrize("names", [("kl",), ("kl", "length")])
def test_noise_alone_passes_a_gate_at_most_as_often_as_it_says(names: tuple[str, ...]) -> None:
    rng, passed, trials = np.random.default_rng(0), 0, 1500
    for _ in range(trials):
        a, b = (measured(rng.normal(size=32), **{n: rng.normal(size=32) for n in names}) for _ in range(2))
        passed += evidence(a, b, 0.8).is_enough
    assert 0.02 < passed / trials < 0.2


# -- strategies -------------------------------------------------------------------------------------------------------


def level_exam(reward: float, kl: float) -> Fitness:
    level = np.random.default_rng(1).random(48)
    return measured(level + reward, kl=level + kl)


TRADING = {
    0: level_exam(0.2, 0.5),  # dominated by 2
    1: level_exam(0.9, 0.9),
    2: level_exam(0.5, 0.2),
    3: level_exam(0.1, 0.8),  # dominated by 0, 2
}


def test_halving_and_knockout_keep_the_front() -> None:
    assert SuccessiveHalving(floor=2).plan(TRADING, 0, 1, 4).slots == (1, 2)
    plan = KnockoutSelection(4, floor=2).plan(TRADING, 0, 1, 4)
    assert (plan.slots, plan.elite) == ((1, 2), 1)
    assert plan.verdicts[0].startswith("left: agent 2 is better with P = 1.000 >= 0.9 in")
    # Agent 0, which the last one only trades with, is kept.
    kept = KnockoutSelection(4, floor=2).plan({**TRADING, 0: level_exam(0.7, 0.5)}, 0, 1, 4)
    assert set(kept.slots) == {0, 1}
    assert "worse in reward" in kept.verdicts[0]


def test_truncation_replaces_what_is_dominated_and_keeps_what_trades() -> None:
    dominated = TruncationSelection(0.25, 0.8).plan(TRADING, 0, 1, 4)
    assert dominated.deaths == ()  # the only donor, 1, has the worse KL
    fitness = {**TRADING, 1: level_exam(0.9, 0.1)}
    assert TruncationSelection(0.25, 0.8).plan(fitness, 0, 1, 4).deaths == (3,)


def test_a_gated_tournament_keeps_what_trades() -> None:
    pair = {0: level_exam(0.9, 0.9), 1: level_exam(0.2, 0.1)}
    for gate, deaths in ((None, True), (0.8, False)):
        plans = [TournamentSelection(2, True, 2, gate=gate).plan(pair, g, 1, 2) for g in range(8)]
        assert any(plan.deaths for plan in plans) is deaths
        assert {plan.elite for plan in plans} == {0}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(PulseSelection(), "pulses"), (MultiFrequencySelection(4), "multi_frequency"), (KnockoutSelection(2), "pulses")],
)
def test_strategies_of_one_number_refuse_by_name(strategy: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy {name} compares"):
        strategy.plan(TRADING, 0, 1, 4)
