"""Multi-frequency selection: who evolves when, and who migrates with what."""

import math

import pytest
from plain_agents import population

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.selection import Birth


def exam(*values):
    return {i: Fitness(value) for i, value in enumerate(values)}


def test_parts_evolve_at_their_own_period():
    selection = MultiFrequencySelection(12, 3, [1, 2, 6])
    evolved = []
    for generation in range(6):
        plan = selection.plan(exam(*(0.01 * i for i in range(12))), generation, 0, 12)
        evolved.append({index // 4 for index in plan.deaths})
    assert evolved == [{0}, {0, 1}, {0}, {0, 1}, {0}, {0, 1, 2}]


def test_default_ratios_and_brackets():
    selection = MultiFrequencySelection(16, 2)
    assert selection.ratios == (1, 4)
    assert selection.brackets == (2, 2, 2, 2)
    assert MultiFrequencySelection(4, 2).brackets == (1, 0, 0, 1)


def test_from_slower_to_faster_the_whole_agent_moves():
    # Fast part: 0 (winner), 1, 2 (open), 3 (loser). The best outside is 4.
    plan = MultiFrequencySelection(8, 2).plan(exam(0.5, 0.4, 0.3, 0.2, 0.9, 0.1, 0.1, 0.1), 0, 0, 8)
    assert plan.births == (Birth(8, 0), Birth(9, 4))
    assert plan.slots == (0, 1, 9, 8, 4, 5, 6, 7)
    assert plan.mutants == (8,)  # only the copy of the winner, not the migrant
    assert plan.verdicts == {
        2: "left: open for migration, 0.300 against 0.900 of agent 4, which was cloned",
        3: "left: among the worst of part 0, 0.200 against 0.500 of agent 0, which was cloned",
    }


def test_from_faster_to_slower_only_the_weights_move():
    # Both parts evolve at generation 3. Slow part: 4 (winner), 5, 6 (open), 7 (loser). The best outside is 0.
    plan = MultiFrequencySelection(8, 2).plan(exam(0.95, 0.94, 0.93, 0.2, 0.5, 0.4, 0.3, 0.2), 3, 0, 8)
    assert plan.births == (Birth(8, 0), Birth(9, 4), Birth(10, 0, hyperparameters_from=4))
    assert plan.slots == (0, 1, 2, 8, 4, 5, 10, 9)
    assert plan.mutants == (8, 9)


def test_a_migrant_must_be_better_and_each_comes_once():
    # Fast part of eight: two open places (0.3 and 0.2); the best outside have 0.9 and 0.2: the tie keeps.
    fast, slow = (0.8, 0.7, 0.6, 0.5, 0.3, 0.2, 0.1, 0.0), (0.9, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    plan = MultiFrequencySelection(16, 2).plan(exam(*fast, *slow), 0, 0, 16)
    assert [birth.parent for birth in plan.births if birth.parent >= 8] == [8]
    assert plan.deaths[-1] == 4


def test_broken_agents_lose_in_whatever_bracket_they_stand():
    plan = MultiFrequencySelection(8, 2).plan(exam(0.5, *[math.nan] * 3, *[0.1] * 4), 0, 0, 8)
    assert set(plan.deaths) == {1, 2, 3}
    assert {birth.parent for birth in plan.births} == {0}


def test_a_broken_part_is_refilled_from_outside():
    plan = MultiFrequencySelection(8, 2).plan(exam(*[math.nan] * 4, 0.5, 0.4, math.nan, math.nan), 0, 0, 8)
    assert [birth.parent for birth in plan.births] == [4, 5, 4, 5]
    assert plan.mutants == ()


def test_select_nominates_the_copies_of_winners_for_mutation():
    pop = population(0.5, 0.4, 0.3, 0.2, 0.9, 0.1, 0.1, 0.1)
    elite, after, nominated = MultiFrequencySelection(8, 2, seed=3).select(pop)
    assert elite is pop[4]
    assert after[4] is elite
    assert nominated == [8]
    mutate = Mutations(0, 0, 0, 0, 0, 1)
    assert [a.index for a in mutate.mutation(after, nominated) if a.mut != "none"] == [8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"population_size": 9}, "multiple of n_subpopulations"),
        ({"population_size": 2}, "at least two agents in each"),
        ({"population_size": 8, "n_subpopulations": 0}, "n_subpopulations: .* greater than or equal to 1"),
        ({"population_size": 8, "evolution_frequency_ratios": [1]}, "one number for each"),
        ({"population_size": 8, "evolution_frequency_ratios": [2, 4]}, "must start at 1"),
        ({"population_size": 8, "evolution_frequency_ratios": [1, 1]}, "start at 1 and increase"),
        ({"population_size": 8, "n_winners": 4}, "4 agents"),
        ({"population_size": 8, "n_winners": 0, "n_losers": 2}, "n_winners: .* greater than or equal to 1"),
    ],
)
def test_what_does_not_add_up_raises(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MultiFrequencySelection(**arguments)
