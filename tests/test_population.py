"""A population on a task: rollouts, exams, evolution, and that it really learns."""

import numpy as np
import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.hpo.tournament import TournamentSelection
from agilerl.population import Population
from tests.algorithms.data_agents import embedded_runtime
from tests.probes import ConditionalTarget, ConstantTarget
from tests.tiny_models import random_model

pytestmark = pytest.mark.model

GENES = HyperparameterConfig(lr=RLParameter(1e-5, 1e-1))


def make_population(size: int = 3, task=None, **settings) -> Population:  # type: ignore[no-untyped-def]
    runtime = embedded_runtime()
    defaults = {"lr": 1e-2, "group_size": 8, "batch_size": 64, "beta": 0.0, "max_output_tokens": 2, "seed": 1}
    agents = GRPO.population(size, runtime=runtime, hp_config=GENES, **{**defaults, **settings})
    return Population(agents, task or ConstantTarget(), prompts_per_step=8, eval_max_new_tokens=2)


@pytest.mark.parametrize(
    ("task", "iterations", "least", "sampled"), [(ConstantTarget(), 12, 1.0, 0.5), (ConditionalTarget(), 48, 0.9, 0.45)]
)
def test_grpo_solves_probes_of_known_optimum(task, iterations: int, least: float, sampled: float) -> None:  # type: ignore[no-untyped-def]
    """Greedy answers reach the optimum; samples climb from 1 % to what the small random head can express."""
    population = make_population(1, task, lr=3e-3, group_size=32, batch_size=256, max_output_tokens=1)
    population.examiner.eval_max_new_tokens = 1
    before = population.evaluate()[0].mean
    for _ in range(iterations):
        metrics = population.learn(population.rollout())
    assert before < 0.5
    assert population.evaluate()[0].mean >= least
    assert metrics[0]["reward"] >= sampled


def test_all_agents_see_the_same_prompts_and_sample_for_themselves() -> None:
    population = make_population(3)
    rollout = population.rollout()
    prompts = [[t.prompt_ids for t in own] for own in rollout.trajectories.values()]
    assert prompts[0] == prompts[1] == prompts[2]
    tokens = [[t.token_ids for t in own] for own in rollout.trajectories.values()]
    assert tokens[0] != tokens[1]
    assert all(a.position == 8 and a.rollouts == 1 for a in population.agents)
    assert [t.prompt_ids for t in population.rollout().trajectories[0]] != prompts[0]


def test_groups_are_compared_only_if_some_are_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr("agilerl.population.teaches_nothing", lambda group: bool(compared.append(len(group))))
    make_population(1).rollout()
    assert compared == []
    make_population(1, dynamic_sampling=True).rollout()
    assert compared == [8] * 8


def test_the_exam_is_one_for_all_and_ignores_genes() -> None:
    population = make_population(3)
    population.agents[1].temperature = 0.5
    population.agents[2].max_output_tokens = 1
    results = population.evaluate()
    # All adapters are still at their start, so all agents are the base model.
    base = population.evaluate_base("exam")
    assert {r.scores for r in results.values()} == {base.scores}
    assert base.n == 10
    assert base.stderr > 0 or len(set(base.scores)) == 1


def test_a_nan_agent_fails_the_exam_and_is_never_a_parent() -> None:
    population = make_population(4)
    sick = population.agents[2]
    sick.runtime.store.theta[sick.slot].fill_(float("nan"))
    fitness = population.evaluate()
    assert not fitness[2].is_finite
    assert all(fitness[i].is_finite for i in (0, 1, 3))
    selection, mutations = TournamentSelection(2, True, 4), Mutations(1, 0, 0, 0, 0, 0)
    for generation in range(20):
        evolution = population.evolve(fitness, selection, mutations, generation=generation, seed=0)
        assert evolution.plan.elite != 2
        assert all(b.parent != 2 for b in evolution.plan.births)
        assert 2 not in evolution.plan.slots
        fitness = {a.index: Fitness(0.1, 0.0, 4) for a in population.agents}
        if generation == 0:
            assert torch.isfinite(population.runtime.store.theta[: len(population)]).all()


def test_evolution_copies_the_parent_and_leaves_the_elite_alone() -> None:
    population = make_population(4)
    for agent, lr in zip(population.agents, (1e-2, 1e-3, 1e-4, 2e-2)):
        agent.lr = lr
    population.learn(population.rollout())
    before = {a.index: (a.state(), a.lr) for a in population.agents}
    fitness = {0: Fitness(0.9, 0.0, 9), 1: Fitness(0.1, 0.0, 9), 2: Fitness(0.2, 0.0, 9), 3: Fitness(0.3, 0.0, 9)}
    mutations = Mutations(0, 0, 0, 0, 0, 1)
    evolution = population.evolve(fitness, TournamentSelection(4, True, 4), mutations, generation=0, seed=0)
    assert evolution.plan.elite == 0
    assert [b.parent for b in evolution.plan.births] == [0, 0, 0]
    assert [a.index for a in population.agents] == [0, *(b.child for b in evolution.plan.births)] or len(
        {a.index for a in population.agents}
    ) == 4
    elite, lr = before[0]
    for agent in population.agents:
        state = agent.state()
        assert all(torch.equal(x, y) for p, q in zip(state.adapter, elite.adapter) for x, y in zip(p, q))
        assert all(
            torch.equal(x, y)
            for n in state.moments
            for p, q in zip(state.moments[n], elite.moments[n])
            for x, y in zip(p, q)
        )
        assert (agent.lr == lr) is (agent.index == 0)
    assert sorted(a.slot for a in population.agents) == [0, 1, 2, 3]
    assert population.runtime.store.used == 4
    assert population.next_index == 7


def test_global_generators_are_never_touched() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    population = make_population(2)
    population.learn(population.rollout())
    population.evolve(
        population.evaluate(), TournamentSelection(2, True, 2), Mutations(0, 1, 0, 0, 0, 1), generation=0, seed=0
    )
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_a_population_needs_agents_of_one_runtime_and_a_tokenizer() -> None:
    agents = [GRPO(actor_network=random_model(seed=s), pad_token_id=0) for s in (1, 2)]
    with pytest.raises(ConfigError, match="share one runtime"):
        Population(agents, ConstantTarget())
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        Population(agents[:1], ConstantTarget())
