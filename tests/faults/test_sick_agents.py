"""Something that is not a number in one agent: the others' bits stay, and it is neither elite nor parent."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch

from agilerl.algorithms.codec import read_state
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.guard import quarantined
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.selection import NoSelection, TruncationSelection
from agilerl.hpo.tournament import TournamentSelection
from agilerl.population import Population
from tests.faults.small_populations import GROUP, PROMPTS, Parity, Seen, iterate, make_population, weights

pytestmark = pytest.mark.model

SICK, ITERATIONS = 1, 3
NAN = float("nan")
MUTATIONS = Mutations(0, 0, 0, 0, 0, 1)


def in_its_loss(population: Population) -> None:
    agent = population.agent(SICK)
    objective = agent.objective
    agent.objective = lambda *arguments: objective(*arguments) * NAN  # type: ignore[method-assign]


def in_its_gradient(population: Population) -> None:
    agent = population.agent(SICK)
    objective = agent.objective

    def poisoned(inputs: Any, metrics: Any) -> torch.Tensor:
        logp = inputs.logp.clone()
        logp.register_hook(lambda gradient: gradient * NAN)
        return objective(replace(inputs, logp=logp), metrics)

    agent.objective = poisoned  # type: ignore[method-assign]


def in_its_logits(population: Population) -> None:
    base, store, slot = population.runtime.base, population.runtime.store, population.agent(SICK).slot
    hidden = base.hidden

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        result = hidden(*arguments, **options)
        route = store.route
        if route is None or slot not in route.slots:
            return result
        assert route.rows is not None
        place = route.slots.index(slot)
        start = sum(route.rows[:place])
        result = result.clone()
        result[start : start + route.rows[place]] = NAN
        return result

    base.hidden = poisoned  # type: ignore[method-assign]


def in_its_weights(population: Population) -> None:
    population.runtime.store.theta[population.agent(SICK).slot, :7] = NAN


def in_its_rewards(population: Population) -> None:
    assert isinstance(population.task, Parity)
    batch = PROMPTS * GROUP
    population.task.fault, population.task.faulty = lambda: NAN, range(SICK * batch, (SICK + 1) * batch)


def nowhere(population: Population) -> None:
    pass


FAULTS = MappingProxyType(
    {
        in_its_loss: "nonfinite",
        in_its_gradient: "nonfinite",
        in_its_logits: "nonfinite",
        in_its_weights: "nonfinite",
        in_its_rewards: "reward_error",
    }
)


@cache
def healthy() -> dict[int, Seen]:
    return iterate(make_population(4), ITERATIONS)


@pytest.mark.parametrize("fault", FAULTS)
def test_others_bits_do_not_change(fault: Callable[[Population], None]) -> None:
    population = make_population(4)
    fault(population)
    before = weights(population.agent(SICK))
    seen = iterate(population, ITERATIONS)
    assert {i: seen[i] == healthy()[i] for i in range(4)} == {0: True, SICK: False, 2: True, 3: True}
    # It did not move either: no step was taken from what is no number.
    for then, now in zip(before, weights(population.agent(SICK))):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert [a.outcome for a in population.agents] == ["ok", FAULTS[fault], "ok", "ok"]
    assert population.agent(SICK).outcomes[FAULTS[fault]] == ITERATIONS
    assert population.agent(0).outcomes["ok"] == ITERATIONS


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", [TournamentSelection(2, True, 4), TruncationSelection()])
def test_it_is_replaced_by_a_mutant_of_the_elite(fault: Callable[[Population], None], strategy: Any) -> None:
    population = make_population(4)
    fault(population)
    iterate(population, 2)
    if fault is in_its_rewards:  # the grader that fails on what it says in training does so in the exam
        population.task.faulty = range(SICK * 12, (SICK + 1) * 12)  # type: ignore[attr-defined]
    fitness = population.evaluate()
    for agent in population.agents:
        assert (agent.fitness[-1] != agent.fitness[-1]) is (agent.index == SICK)
    by_exam = fault in (in_its_logits, in_its_weights, in_its_rewards)
    assert fitness[SICK].is_finite is not by_exam
    if not by_exam:  # the weights are as good as they were, and the exam may say so
        fitness[SICK] = Fitness(1.0, 0.0, 12)
    place = list(fitness).index(SICK)
    seed = seed_of_another_parent(strategy, fitness, place)
    evolution = population.evolve(fitness, strategy, MUTATIONS, generation=0, seed=seed)
    plan = evolution.plan
    assert plan.elite != SICK
    assert SICK in plan.deaths
    assert all(birth.parent != SICK for birth in plan.births)
    child = plan.slots[place]
    assert child in plan.mutants
    if fault is not in_its_rewards:
        assert "not finite in " in evolution.sick[SICK]
        assert next(birth.parent for birth in plan.births if birth.child == child) == plan.elite
    assert all(not a.sick and not any(a.vitals[n] for n in ("reward", "entropy")) for a in population.agents)


def seed_of_another_parent(strategy: Any, fitness: dict[int, Fitness], place: int) -> int:
    """Return a seed by which the strategy itself would give the sick agent's place to a child of not the elite."""
    for seed in range(200):
        plan = strategy.plan(quarantined(fitness, {SICK}), 0, seed, len(fitness))
        if any(birth.child == plan.slots[place] and birth.parent != plan.elite for birth in plan.births):
            return seed
    assert isinstance(strategy, TruncationSelection)  # of four agents the best quarter is the elite
    return 0


def test_once_is_not_twice_in_a_row() -> None:
    population = make_population(3)
    agent, objective = population.agent(SICK), population.agent(SICK).objective
    outcomes = []
    for _ in range(2):  # bad, good, bad, good
        in_its_loss(population)
        iterate(population, 1)
        outcomes.append(agent.outcome)
        agent.objective = objective  # type: ignore[method-assign]
        iterate(population, 1)
        outcomes.append(agent.outcome)
    assert outcomes == ["nonfinite", "ok", "nonfinite", "ok"]
    assert (agent.skipped_steps, agent.bad_steps, agent.sick) == (2, 0, "")
    # One good step later nobody forgets two bad ones.
    in_its_loss(population)
    iterate(population, 2)
    agent.objective = objective  # type: ignore[method-assign]
    iterate(population, 1)
    assert agent.bad_steps == 0
    assert agent.sick == "loss, gradient or samples were not finite in 2 optimizer steps in a row"


def test_a_fitness_that_is_not_finite_is_no_parent_under_any_seed() -> None:
    for seed in range(50):
        fitness = {i: Fitness(NAN if i == SICK else 0.1 * i, 0.0, 12) for i in range(4)}
        for strategy in (TournamentSelection(3, True, 4), TournamentSelection(2, False, 4), TruncationSelection()):
            plan = strategy.plan(fitness, 0, seed, 4)
            assert plan.elite != SICK
            assert SICK not in {*plan.slots, *(birth.parent for birth in plan.births)}


def test_where_nobody_is_fit_nobody_changes() -> None:
    population = make_population(3)
    for index in range(3):
        population.agent(index).sick = "worn out"
    evolution = population.evolve(
        {i: Fitness(0.5, 0.1, 12) for i in range(3)}, TournamentSelection(2, True, 3), MUTATIONS, generation=0, seed=0
    )
    assert evolution.plan.slots == (0, 1, 2)
    assert evolution.sick == dict.fromkeys(range(3), "worn out")
    # Their weights are what they were before the steps that were skipped: they may try again.
    assert [a.sick for a in population.agents] == ["", "", ""]


def test_random_search_keeps_everybody_but_names_another_elite() -> None:
    population = make_population(3)
    population.agent(2).sick = "worn out"
    fitness = {i: Fitness(0.1 * i, 0.1, 12) for i in range(3)}
    evolution = population.evolve(fitness, NoSelection(), MUTATIONS, generation=0, seed=0)
    assert (evolution.plan.elite, evolution.plan.slots) == (1, (0, 1, 2))


def test_what_decides_is_in_a_checkpoint_and_in_a_clone(tmp_path: Any) -> None:
    population = make_population(2)
    in_its_loss(population)
    iterate(population, 2)
    agent = population.agent(SICK)
    agent.save_checkpoint(tmp_path / "agent")
    restored = type(agent).from_state(read_state(tmp_path / "agent", agent.runtime.store.layers), agent.runtime)
    for copy in (restored, agent.clone()):
        for name in ("bad_steps", "sick", "outcomes"):
            assert getattr(copy, name) == getattr(agent, name) != getattr(population.agent(0), name)
        assert repr(copy.vitals) == repr(agent.vitals)
        assert copy.vitals is not agent.vitals


def test_documented_selection_passes_a_sick_agent_over() -> None:
    population = make_population(3)
    population.agent(2).sick = "worn out"
    population.evaluate()
    elite, chosen, _ = TournamentSelection(2, True, 3).select(population.agents)
    assert 2 not in {elite.index, *(a.index for a in chosen), *(a.parent for a in chosen)}
