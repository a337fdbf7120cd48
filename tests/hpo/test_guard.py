"""Who has collapsed, and who takes the place of a sick agent: numbers in, numbers out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.guard import Vitals, collapsed, lost, no_better, quarantined, replaced_by_elite, stuck
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.selection import Birth, NoSelection, Plan, TruncationSelection
from agilerl.hpo.tournament import TournamentSelection

ELITE = Vitals(
    entropy=(2.0, 1.1, 0.9, 1.0), length=(9.0, 21.0, 19.0, 20.0), reward=(0.5, 0.6, 0.7, 0.6), reward_before=(0.4, 0.5)
)
NAN = float("nan")


def vitals(**changes: Any) -> Vitals:
    """Return an agent that earns less than the elite, and is in order."""
    own = {
        "entropy": ELITE.entropy,
        "length": ELITE.length,
        "reward": (0.2, 0.21, 0.2, 0.19),
        "reward_before": (0.2, 0.2),
    }
    return Vitals(**{**own, **changes})


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (vitals(), None),
        (vitals(entropy=(1.0, 0.09, 0.1, 0.09)), "collapsed: entropy 0.0933, the elite's 1"),
        (vitals(entropy=(1.0, 0.11, 0.12, 0.11)), None),  # not ten times less
        (vitals(entropy=(1.0, 21.0, 20.0, 19.0)), None),  # more is no collapse
        (vitals(length=(20.0, 4.0, 5.0, 4.0)), "collapsed: length 4.33, the elite's 20"),
        (vitals(length=(20.0, 80.0, 99.0, 85.0)), "collapsed: length 88, the elite's 20"),
        (vitals(length=(20.0, 70.0, 65.0, 66.0)), None),
        (vitals(length=(4.0, 5.0, 4.0, 4.0, 20.0, 21.0, 20.0, 19.0)), None),  # it has found back
        (vitals(reward=(0.2, 0.04, 0.05, 0.04)), "collapsed: reward 0.0433, before 0.2"),
        (vitals(reward=(0.2, 0.04, 0.05, 0.04), reward_before=()), "collapsed: reward 0.0433, before 0.2"),
        (vitals(reward=(0.05, 0.04, 0.05, 0.04), reward_before=(0.05, 0.05)), None),  # slow, not fallen
        (vitals(reward=(0.05, 0.04, 0.05, 0.04), reward_before=()), None),
        (vitals(reward=(0.9, 0.5, 0.0, 0.1), reward_before=()), None),  # not apart, with such a spread
        (vitals(reward=(0.2, -1.1, -1.0, -1.0)), "collapsed: reward -1.03, before 0.2"),
        (vitals(reward=(0.2, -1.1, -1.0, -1.0), reward_before=(-0.2,)), None),  # below zero there is no factor
        # What is odd but earns what the elite does is no collapse.
        (vitals(entropy=(0.01,) * 4, length=(2.0,) * 4, reward=ELITE.reward), None),
        # Three iterations at least, and numbers.
        (vitals(length=(1.0, 1.0)), None),
        (vitals(length=(1.0, 1.0, 1.0, NAN)), None),
        (vitals(length=(NAN, 1.0, 1.0, 1.0)), "collapsed: length 1, the elite's 20"),
        (vitals(length=(1.0,) * 4, reward=(NAN,) * 4), None),
        (vitals(length=(1.0,) * 4, reward=()), None),
        (
            vitals(entropy=(0.0,) * 4, length=(200.0,) * 4),
            "collapsed: entropy 0, the elite's 1; length 200, the elite's 20",
        ),
    ],
)
def test_collapse(own: Vitals, reason: str | None) -> None:
    found = collapsed({3: own, 5: ELITE}, elite=5)
    assert found == ({} if reason is None else {3: reason})


def test_the_elite_never_collapses_and_needs_iterations_itself() -> None:
    assert collapsed({3: vitals(length=(1.0,) * 4), 5: ELITE}, elite=3) == {}
    short = Vitals(entropy=(1.0, 1.0), length=(20.0, 20.0), reward=(0.6, 0.6))
    assert collapsed({3: vitals(length=(1.0,) * 4), 5: short}, elite=5) == {}


def test_noise_alone_collapses_nobody() -> None:
    """2,000 generations of 4 agents that are alike but for their noise, and of ones that learn at different speeds."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        population = {}
        for index in range(4):
            speed, n = rng.uniform(0, 0.1), 6
            trend = 0.2 + speed * np.arange(n)
            population[index] = Vitals(
                entropy=tuple(np.exp(rng.normal(-trend, 0.5))),
                length=tuple(np.exp(rng.normal(2.5, 0.3, n))),
                reward=tuple(rng.binomial(64, np.clip(trend, 0, 1)) / 64),
                reward_before=tuple(rng.binomial(64, 0.2, n) / 64),
            )
        assert collapsed(population, elite=int(rng.integers(4))) == {}


def test_quarantine_leaves_the_others_as_they_are() -> None:
    fitness = {0: Fitness(0.5, 0.1, 9, (0.5,) * 9), 1: Fitness(0.9, 0.1, 9)}
    found = quarantined(fitness, {1})
    assert found[0] is fitness[0]
    assert not found[1].is_finite
    assert quarantined(fitness, ()) == fitness


@pytest.mark.parametrize(
    "strategy",
    [
        TournamentSelection(2, True, 6),
        TournamentSelection(3, False, 6),
        TruncationSelection(0.25),
        MultiFrequencySelection(6, 2),
    ],
)
def test_the_place_of_a_sick_agent_goes_to_a_mutant_of_the_elite(strategy: Any) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        fitness = {i: Fitness(float(rng.uniform()), 0.01, 20) for i in range(6)}
        sick = {0, 4} if seed % 2 else {1}
        # In the last of their generations all parts of the population evolve.
        plan = replaced_by_elite(strategy.plan(quarantined(fitness, sick), 3, seed, 6), list(fitness), sick)
        assert plan.elite == max(set(fitness) - sick, key=lambda i: fitness[i].mean)
        assert not sick & {*plan.slots, *(birth.parent for birth in plan.births)}
        assert sick <= set(plan.deaths)
        parents = {birth.child: birth for birth in plan.births}
        for place in sick:
            child = plan.slots[place]
            assert parents[child].parent == plan.elite
            assert parents[child].hyperparameters_from is None
            assert child in plan.mutants


def test_plans_without_a_heir_stay_as_they_are() -> None:
    fitness = {0: Fitness(0.1), 1: Fitness(0.2), 2: Fitness(0.3)}
    kept = NoSelection().plan(quarantined(fitness, {2}), 0, 0, 3)
    assert replaced_by_elite(kept, list(fitness), {2}) == kept
    nobody = TournamentSelection(2, True, 3).plan(quarantined(fitness, {0, 1, 2}), 0, 0, 3)
    assert replaced_by_elite(nobody, list(fitness), {0, 1, 2}) == nobody
    halved = Plan(0, 1, slots=(1,), deaths=(0, 2))
    assert replaced_by_elite(halved, list(fitness), {0}) == halved
    other = Plan(0, 1, slots=(3, 1, 2), births=(Birth(3, 2, 1),), deaths=(0,), mutants=(3,))
    assert replaced_by_elite(other, list(fitness), {2}) == other


@pytest.mark.parametrize(
    ("equal", "first", "expected"),
    [
        ((0.6, 1.0), (0.6,), True),  # the first half of the generation does not count
        ((1.0, 0.9), (0.6,), False),
        ((1.0, 1.0), (0.95,), False),  # groups differed rarely: a coincidence
        ((1.0,) * 12, (0.95,), True),
        ((1.0, 1.0), (1.0,), False),  # there never was anything to learn from
        ((1.0,), (), False),
        ((), (0.6,), False),
        ((NAN, NAN), (0.6,), False),
        ((1.0, NAN, 1.0), (0.5,), True),
        ((0.9375,), (0.5625,), True),  # one group of 16 still differs
        ((0.8,) * 8, (0.6,), False),  # half as many differ, as they do while an agent learns
    ],
)
def test_an_agent_is_stuck_if_groups_differed_before_it_trained_and_none_does_now(
    equal: tuple[float, ...], first: tuple[float, ...], expected: bool
) -> None:
    assert stuck(Vitals(equal=equal, equal_first=first), 16) is expected


def test_an_agent_is_lost_if_it_is_stuck_and_earns_no_more_than_before_training() -> None:
    dull = Vitals(reward=(0.5, 0.1), equal=(0.5, 1.0), equal_first=(0.5,))
    assert lost(dull, 16, 0.1)
    assert not lost(dull, 16, 0.09)
    assert not lost(dull, 16, NAN)  # rewards before training are unknown
    assert not lost(replace(dull, equal=(0.5, 0.5)), 16, 0.1)
    assert not lost(replace(dull, reward=()), 16, 0.1)
    # Where 3 of 16 groups differed, 16 equal ones prove nothing, and a generation of 32 does.
    rare = Vitals(reward=(0.1, 0.1), equal=(1.0, 1.0), equal_first=(0.8125,))
    assert lost(rare, 16, 0.1)
    assert not stuck(rare, 16)
    assert not lost(replace(rare, equal=(0.8125, 1.0)), 16, 0.1)


@pytest.mark.parametrize(("right", "expected"), [(0, True), (1, True), (2, True), (4, False), (32, False)])
def test_one_right_answer_is_no_better_than_before_training(right: int, expected: bool) -> None:
    exam = Fitness.from_scores([1.0] * right + [0.0] * (32 - right))
    assert no_better(exam, 0.023) is expected
    assert not no_better(exam, NAN)  # rewards before training are unknown


def test_few_groups_do_not_prove_that_all_differ() -> None:
    few = Vitals(equal=(1.0,), equal_first=(0.0,))
    assert not stuck(few, 2)
    assert stuck(few, 16)
