"""Successive halving: who goes on, when, and down to where."""

import math

import pytest

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import SuccessiveHalving, TruncationSelection


def exam(*means):
    return {i: Fitness.from_scores([mean, mean + 0.1, mean - 0.1]) for i, mean in enumerate(means)}


def test_the_better_half_stays_in_its_slots():
    plan = SuccessiveHalving().plan(exam(0.1, 0.9, 0.3, 0.8, 0.2), 0, 0, 5)
    assert plan.slots == (1, 2, 3)
    assert plan.deaths == (0, 4)
    assert plan.births == ()
    assert plan.reason == "halving: 5 to 3 agents"
    assert plan.verdicts == {0: "left: place 5 of 5, 0.100", 4: "left: place 4 of 5, 0.200"}


def test_sizes_go_down_to_the_floor_at_every_period():
    strategy, fitness, sizes = SuccessiveHalving(period=2, floor=2), exam(*(0.1 * i for i in range(8))), []
    for generation in range(10):
        plan = strategy.plan(fitness, generation, 0, 8)
        fitness = {i: fitness[i] for i in plan.slots}
        sizes.append(len(fitness))
    assert sizes == [8, 4, 4, 2, 2, 2, 2, 2, 2, 2]
    assert set(fitness) == {6, 7}


def test_survivors_evolve_between_the_halvings():
    strategy = SuccessiveHalving(period=2, between=TruncationSelection())
    plan = strategy.plan(exam(0.0, 0.5, 0.6, 0.9), 0, 0, 4)
    assert [(birth.child, birth.parent) for birth in plan.births] == [(4, 3)]
    assert strategy.plan(exam(0.0, 0.5, 0.6, 0.9), 1, 0, 4).slots == (2, 3)


def test_broken_agents_stop_first():
    assert SuccessiveHalving().plan(exam(math.nan, math.nan, math.nan, 0.1), 0, 0, 4).slots == (3,)
    assert SuccessiveHalving().plan(exam(math.nan, math.nan), 0, 0, 2).slots == (0, 1)


def test_impossible_settings_raise():
    with pytest.raises(ConfigError, match=r"1 or more for (period|floor), found 0"):
        SuccessiveHalving(period=0)
    with pytest.raises(ConfigError, match=r"1 or more for (period|floor), found 0"):
        SuccessiveHalving(floor=0)
