"""What every selection strategy promises, whatever the fitness: import ``STRATEGIES`` to test one of your own."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_agents import PlainAgent, population

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.knockout import KnockoutSelection, PulseSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.selection import (
    Birth,
    NoSelection,
    Plan,
    TruncationSelection,
    apply_plan,
    latest_fitness,
    next_generation,
)
from agilerl.hpo.tournament import TournamentSelection

STRATEGIES = {
    "tournament": lambda n: TournamentSelection(min(2, n), True, n),
    "large tournament": lambda n: TournamentSelection(n, True, n),
    "tournament without elitism": lambda n: TournamentSelection(min(2, n), False, n),
    "truncation": lambda n: TruncationSelection(),
    "ungated truncation": lambda n: TruncationSelection(fraction=0.5, confidence=0.5),
    "multi-frequency": lambda n: MultiFrequencySelection(n) if n >= 4 and n % 2 == 0 else NoSelection(),
    "one part": lambda n: MultiFrequencySelection(n, 1) if n >= 2 else NoSelection(),
    "no selection": lambda n: NoSelection(),
    "knockout": lambda n: KnockoutSelection(n),
    "knockout of founders": lambda n: KnockoutSelection(50, period=2, floor=2),
    "pulses": lambda n: PulseSelection(),
}
SHRINKING = ("knockout", "knockout of founders", "pulses", "tournament without elitism")
"""Strategies that need not keep the best agent: a tie is not evidence against the one that is there."""

SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf])


@st.composite
def populations(draw):
    indices = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
    prompts = draw(st.integers(1, 4))
    row = st.lists(SCORES, min_size=prompts, max_size=prompts)
    return {index: Fitness.from_scores(draw(row)) for index in indices}


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(fitness=populations(), generation=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_a_plan_is_a_valid_step(name, fitness, generation, seed):
    strategy = STRATEGIES[name](len(fitness))
    plan = strategy.plan(fitness, generation, seed, next_index=50)

    children = {birth.child: birth.parent for birth in plan.births}
    survivors = set(plan.slots) - set(children)
    assert survivors | set(plan.deaths) == set(fitness)
    assert not survivors & set(plan.deaths)
    # Indices never repeat, and are dealt without gaps.
    assert sorted(children) == list(range(50, 50 + len(children)))
    # Survivors keep their place.
    if len(plan.slots) == len(fitness):
        assert all(new == old or new in children for new, old in zip(plan.slots, fitness, strict=True))
    else:
        assert plan.slots == (*(index for index in fitness if index in survivors), *children)
    # A broken agent is never a parent, and gives its values to nobody.
    assert all(fitness[parent].is_finite for parent in children.values())
    donors = {birth.hyperparameters_from for birth in plan.births} - {None}
    assert all(fitness[donor].is_finite for donor in donors)
    assert plan.elite == ranking(fitness)[0]
    assert plan.elite not in plan.mutants
    assert set(plan.mutants) <= set(children)
    if name not in SHRINKING:
        assert plan.elite in plan.slots
    if not any(one.is_finite for one in fitness.values()):
        assert plan.slots == tuple(fitness)

    assert plan == strategy.plan(fitness, generation, seed, next_index=50)
    assert plan == Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("multi-frequency", "one part")])
def test_the_order_of_the_slots_changes_no_decision(name):
    # Parts of multi-frequency selection are made of slots, so there the order is part of the question.
    fitness = {i: Fitness.from_scores([(i * 7) % 5, (i * 3) % 4, i % 3]) for i in range(8)}
    shuffled = {i: fitness[i] for i in (3, 1, 7, 0, 5, 2, 6, 4)}
    for generation in range(6):
        one = STRATEGIES[name](8).plan(fitness, generation, 11, 8)
        other = STRATEGIES[name](8).plan(shuffled, generation, 11, 8)
        assert (one.elite, set(one.deaths), set(one.slots)) == (other.elite, set(other.deaths), set(other.slots))
        assert [(b.child, b.parent) for b in one.births] == [(b.child, b.parent) for b in other.births]


@pytest.mark.parametrize("name", STRATEGIES)
def test_asking_twice_or_in_another_order_changes_nothing(name):
    # No state between calls: a resumed run, or another process, computes the same plans.
    fitness = {i: Fitness.from_scores([i % 3, i % 2, 0.1 * i]) for i in range(8)}
    strategy = STRATEGIES[name](8)
    forward = [strategy.plan(fitness, generation, 3, 8) for generation in range(5)]
    backward = [STRATEGIES[name](8).plan(fitness, generation, 3, 8) for generation in reversed(range(5))]
    assert forward == backward[::-1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_agents_and_reused_indices_are_errors(name):
    with pytest.raises(ConfigError, match="at least one agent"):
        STRATEGIES[name](4).plan({}, 0, 0, 1)
    fitness = {i: Fitness(0.1 * i, 0.1, 4) for i in range(4)}
    with pytest.raises(ConfigError, match=r"^next_index "):
        STRATEGIES[name](4).plan(fitness, 0, 0, 3)


@pytest.mark.parametrize("name", ["tournament", "multi-frequency"])
def test_a_population_of_another_size_is_an_error(name):
    with pytest.raises(ConfigError, match="population_size=8, found 4"):
        STRATEGIES[name](8).plan({i: Fitness(0.1) for i in range(4)}, 0, 0, 4)


def test_no_selection_names_the_elite_and_touches_nobody():
    plan = NoSelection().plan({4: Fitness(0.1), 2: Fitness(0.3)}, 5, 0, 5)
    assert plan == Plan(generation=5, elite=2, slots=(4, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": (1, 1)}, "every agent exactly once"),
        ({"slots": (0, 1), "births": (Birth(7, 0),)}, "children must be in its slots"),
        ({"slots": (0, 1), "deaths": (1,)}, "dead must not"),
        ({"slots": (0, 1), "mutants": (0,)}, "never the elite"),
        ({"slots": (0, 1), "mutants": (5,)}, "mutate agents in its slots"),
    ],
)
def test_impossible_plans_cannot_be_written_down(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Plan(generation=0, elite=0, **arguments)


@pytest.mark.parametrize("data", [{}, {"generation": 0, "elite": 0, "slots": [0], "births": [1]}])
def test_what_is_not_a_plan_is_refused(data):
    with pytest.raises(ConfigError, match="Expected a selection plan"):
        Plan.from_dict(data)


def test_applying_a_plan_clones_the_parents_as_they_were():
    pop = population(0.1, 0.9, 0.5)
    # 1 is copied into slot 0; the child of the dying 2 takes the values of 1.
    plan = Plan(0, elite=1, slots=(3, 1, 4), births=(Birth(3, 1), Birth(4, 2, hyperparameters_from=1)), deaths=(0, 2))
    assert str(plan) == "generation 0: best 1; born 1 -> 3, 2 -> 4; left 0, 2"
    assert str(replace(plan, verdicts={2: "left: place 3 of 3"})).endswith("left 0, 2 (place 3 of 3)")
    elite, after = apply_plan(plan, pop)
    assert elite is pop[1]
    assert after[1] is pop[1]
    assert [agent.index for agent in after] == [3, 1, 4]
    assert [agent.weights for agent in after] == [[1.0], [1.0], [2.0]]
    assert [agent.hyperparameters["lr"] for agent in after] == [2e-6, 2e-6, 2e-6]
    after[0].weights[0] = 9.0
    assert pop[1].weights == [1.0]


def test_a_plan_for_other_agents_is_an_error():
    with pytest.raises(ConfigError, match=r"agents \[7\].*population is \[0, 1"):
        apply_plan(Plan(0, elite=0, slots=(0, 3), births=(Birth(3, 7),)), population(0.1, 0.2))


def test_agents_must_be_evaluated_before_selection():
    with pytest.raises(ConfigError, match=r"Agent 1 .*fitness"):
        latest_fitness([PlainAgent(0, [0.1]), PlainAgent(1)])
    with pytest.raises(ConfigError, match="empty population"):
        latest_fitness([])
    with pytest.raises(ConfigError, match="different indices"):
        latest_fitness([PlainAgent(1, [0.1]), PlainAgent(1, [0.2])])


def test_the_last_fitness_counts():
    pop = [PlainAgent(0, [0.9, 0.1]), PlainAgent(1, [0.2, 0.4])]
    assert {i: one.mean for i, one in latest_fitness(pop).items()} == {0: 0.1, 1: 0.4}
    assert next_generation(pop) == 1
