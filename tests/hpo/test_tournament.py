"""Tournament selection: the documented winners, with identity kept where it can be."""

import math
from collections import Counter

import pytest
from plain_agents import population

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.tournament import TournamentSelection


def plans(size, elitism, fitness, count=400):
    selection = TournamentSelection(size, elitism, len(fitness))
    table = {i: Fitness(value) for i, value in enumerate(fitness)}
    return [selection.plan(table, 0, seed, len(fitness)) for seed in range(count)]


def parents(plan):
    """Genetic origin of each slot: survivors stand for themselves."""
    origin = {birth.child: birth.parent for birth in plan.births}
    return Counter(origin.get(index, index) for index in plan.slots)


def test_a_tournament_of_everyone_copies_the_best_everywhere():
    for plan in plans(4, True, [0.1, 0.4, 0.3, 0.2], 20):
        assert parents(plan) == {1: 4}
        assert plan.slots == (4, 1, 5, 6)
        assert plan.deaths == (0, 2, 3)
        assert plan.mutants == (4, 5, 6)
        assert set(plan.verdicts) == {0, 2, 3}
        assert plan.verdicts[3].startswith("left: won no tournament, 0.200 against 0.400 of agent 1")


def test_winners_have_the_documented_probabilities():
    # Pairs of 4 without replacement: the best wins 3 of 6, then 2, 1, 0; the elite has one place of its own besides.
    counts = sum((parents(plan) for plan in plans(2, True, [0.4, 0.3, 0.2, 0.1], 2000)), Counter())
    shares = {i: counts[i] / 2000 for i in range(4)}
    assert shares[0] == pytest.approx(1 + 3 * 3 / 6, abs=0.08)
    assert shares[1] == pytest.approx(3 * 2 / 6, abs=0.08)
    assert shares[2] == pytest.approx(3 * 1 / 6, abs=0.08)
    assert shares[3] == 0


def test_no_agent_that_won_dies():
    for plan in plans(2, True, [0.4, 0.3, 0.2, 0.1]):
        assert not {birth.parent for birth in plan.births} & set(plan.deaths)
        assert len(plan.births) == len(plan.deaths)


def test_a_tournament_of_one_is_a_lottery_over_the_finite():
    counts = sum((parents(plan) for plan in plans(1, False, [0.4, math.nan, 0.1], 600)), Counter())
    assert counts[1] == 0
    assert abs(counts[0] - counts[2]) < 200  # 1800 fair draws: standard deviation of the difference 42


def test_without_elitism_the_best_may_die():
    assert any(0 in plan.deaths for plan in plans(1, False, [0.4, 0.3, 0.2]))
    assert not any(0 in plan.deaths for plan in plans(1, True, [0.4, 0.3, 0.2]))


def test_equal_agents_favour_the_elder():
    for plan in plans(2, True, [0.5, 0.5], 20):
        assert plan.elite == 0
        assert parents(plan) == {0: 2}


def test_when_all_are_broken_nobody_changes():
    for plan in plans(2, True, [math.nan, math.inf, -math.inf], 5):
        assert (plan.slots, plan.births, plan.deaths) == ((0, 1, 2), (), ())
        assert plan.reason == "no agent has a finite fitness"


def test_select_returns_the_elite_itself_and_the_next_population():
    pop = population(0.1, 0.7, math.nan, 0.4)
    elite, after, third = TournamentSelection(2, True, 4).select(pop)
    assert third is None
    assert elite is pop[1]
    assert after[1] is elite
    assert len({agent.index for agent in after}) == 4
    assert 2 not in [agent.index for agent in after]
    assert all(agent.weights != [2.0] for agent in after)


def test_select_differs_from_one_evaluation_to_the_next():
    tournament = TournamentSelection(2, True, 8)
    after_one = [agent.weights for agent in tournament.select(population(*range(8)))[1]]
    pop = population(*range(8))
    for agent in pop:
        agent.fitness.append(agent.fitness[0])
    after_two = [agent.weights for agent in tournament.select(pop)[1]]
    assert after_one != after_two
    assert after_one == [agent.weights for agent in tournament.select(population(*range(8)))[1]]
