"""Mutation plans: probabilities, the spared elite, rank and noise, purity, and the documented step on agents."""

import json
import math
from collections import Counter

import pytest
from plain_agents import GENES, PlainAgent, population

from agilerl.errors import ConfigError
from agilerl.hpo.mutation import Change, Member, Mutation, Mutations, inherited, rescaled
from agilerl.hpo.parameters import Gene
from agilerl.hpo.tournament import TournamentSelection


def mutations(**chances) -> Mutations:
    settings = {"mutate_elite", "genes_per_mutation", "rank_range", "mutation_sd", "rand_seed"}
    extra = {name: chances.pop(name) for name in settings & set(chances)}
    names = ("no_mutation", "architecture", "new_layer_prob", "parameters", "activation", "rl_hp")
    return Mutations(**{name: chances.get(name, 0) for name in names}, **extra)


def members(count: int, rank: int = 8) -> list[Member]:
    return [Member(i, {"lr": 1e-5, "group_size": 8}, GENES, rank) for i in range(count)]


def test_kinds_come_with_their_probabilities():
    half = mutations(no_mutation=2, architecture=4, rl_hp=4)
    assert half.probabilities == {"none": 0.2, "rank": 0.4, "hyperparameters": 0.4}
    kinds = Counter(m.kind for m in half.plan(members(4000), None, 0, seed=0))
    for kind, probability in half.probabilities.items():
        spread = 4 * math.sqrt(4000 * probability * (1 - probability))
        assert abs(kinds[kind] - 4000 * probability) < spread


def test_hyperparameter_mutations_move_one_gene_within_its_range():
    for mutation in mutations(rl_hp=1).plan(members(50), None, 0, seed=0):
        (change,) = mutation.changes
        assert change.old == {"lr": 1e-5, "group_size": 8}[change.gene]
        assert change.new != change.old
        assert GENES[change.gene].contains(change.new)


def test_several_genes_may_move_at_once():
    with pytest.warns(UserWarning, match=r"genes_per_mutation=5.*only 2"):
        plans = mutations(rl_hp=1, genes_per_mutation=5).plan(members(20), None, 0, seed=0)
    assert all([change.gene for change in plan.changes] == ["group_size", "lr"] for plan in plans)


@pytest.mark.parametrize(
    ("rank", "rank_range", "reached"),
    [(8, (4, 64), {4, 16}), (4, (4, 64), {8}), (64, (4, 64), {32}), (8, (8, 8), set()), (0, (4, 64), set())],
)
def test_rank_doubles_or_halves_within_its_range(rank, rank_range, reached):
    plans = mutations(architecture=1, rank_range=rank_range).plan(members(40, rank), None, 0, seed=0)
    changes = [change for plan in plans for change in plan.changes]
    assert {change.new for change in changes} == reached
    assert all(change.gene == "rank" and change.old == rank for change in changes)
    assert {plan.kind for plan in plans} == ({"rank"} if reached else {"none"})
    if not reached:
        assert f"rank {rank} has no neighbour" in plans[0].details["reason"]


def test_without_genes_nothing_moves_and_the_reason_is_told():
    (plan,) = mutations(rl_hp=1).plan([Member(0, {}, {})], None, 0, seed=0)
    assert (plan.kind, plan.details["reason"]) == ("none", "no hyperparameter is declared to evolve")


def test_a_gene_without_a_value_is_an_error():
    with pytest.raises(ConfigError, match=r"Agent 3 .*gene"):
        mutations(rl_hp=1).plan([Member(3, {}, GENES)], None, 0, seed=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_elite_is_never_mutated(seed):
    plans = mutations(rl_hp=1).plan(members(4), elite=2, generation=seed, seed=seed)
    assert [plan.kind for plan in plans] == ["hyperparameters", "hyperparameters", "none", "hyperparameters"]
    assert plans[2].details == {"reason": "elite"}


def test_the_elite_is_mutated_only_when_asked_for():
    plans = mutations(rl_hp=1, mutate_elite=True).plan(members(2), elite=0, generation=0, seed=0)
    assert [plan.kind for plan in plans] == ["hyperparameters"] * 2


def test_only_nominated_members_are_mutated():
    plans = mutations(rl_hp=1).plan(members(4), 0, 0, seed=0, nominated=(3,))
    assert [plan.kind for plan in plans] == ["none", "none", "none", "hyperparameters"]


def test_a_member_gets_the_same_whoever_else_is_there():
    mutate = mutations(no_mutation=1, architecture=1, rl_hp=1)
    together = mutate.plan(members(8), None, 3, seed=5)
    alone = [mutate.plan([member], None, 3, seed=5)[0] for member in members(8)]
    backwards = mutate.plan(members(8)[::-1], None, 3, seed=5)[::-1]
    assert together == alone == backwards
    assert together != mutate.plan(members(8), None, 4, seed=5)
    assert together != mutate.plan(members(8), None, 3, seed=6)


def test_json_round_trip():
    for mutation in mutations(no_mutation=1, architecture=1, rl_hp=1).plan(members(30), 0, 0, seed=1):
        assert Mutation.from_dict(json.loads(json.dumps(mutation.to_dict(), allow_nan=False))) == mutation


@pytest.mark.parametrize("data", [{}, {"agent": 0, "kind": "activation", "changes": []}, {"agent": 0, "changes": [1]}])
def test_what_is_not_a_mutation_is_refused(data):
    with pytest.raises(ConfigError, match="Expected a mutation"):
        Mutation.from_dict(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rl_hp": 1, "activation": 0.1}, "activation=0, found 0.1"),
    ],
)
def test_bad_settings_raise_a_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message):
        mutations(**arguments)


def test_inherited_lists_only_what_differs():
    mutation = inherited(9, {"lr": 1e-5, "group_size": 8}, 2, {"lr": 1e-6, "group_size": 8})
    assert mutation.changes == (Change("lr", 1e-5, 1e-6),)
    assert mutation.details == {"reason": "migration", "hyperparameters_from": 2}


@pytest.mark.parametrize("seed", range(25))
def test_documented_sequence_leaves_the_elite_untouched(seed):
    pop = population(0.3, 0.9, 0.1, 0.9, math.nan)
    tournament, mutate = TournamentSelection(2, True, 5, seed=seed), mutations(rl_hp=1, rand_seed=seed)
    elite, pop, _ = tournament.select(pop)
    assert elite.index == 1  # the elder of the two best
    pop = mutate.mutation(pop)
    assert any(agent is elite for agent in pop)
    assert elite.hyperparameters == {"lr": 2e-6, "group_size": 8}
    assert [agent.mut for agent in pop] == ["none" if agent is elite else "hyperparameters" for agent in pop]


def test_the_documented_step_says_that_there_are_no_genes():
    pop = [PlainAgent(index, [0.1], genes={}) for index in range(2)]
    with pytest.warns(UserWarning, match="no agent of this population has any; create the agents with hp_config"):
        mutations(rl_hp=1).mutation(pop)
    mutations(architecture=1).mutation(pop)


def test_documented_step_applies_what_it_plans():
    pop = population(0.1, 0.2, 0.3)
    before = [Member.of(agent) for agent in pop]
    mutate = mutations(rl_hp=1, architecture=1, rand_seed=4)
    assert mutate.mutation(pop) == pop
    planned = mutate.plan(before, elite=2, generation=1, seed=4)
    assert [agent.mutations[-1] for agent in pop] == planned
    for agent, plan in zip(pop, planned, strict=True):
        for change in plan.changes:
            assert (agent.rank if change.gene == "rank" else agent.hyperparameters[change.gene]) == change.new


def test_agents_that_were_never_evaluated_may_be_mutated():
    pop = [PlainAgent(0), PlainAgent(1)]
    assert [agent.mut for agent in mutations(rl_hp=1).mutation(pop)] == ["hyperparameters"] * 2
    assert [agent.mut for agent in mutations(rl_hp=1).mutation(pop, elite=1)] == ["hyperparameters", "none"]


def test_a_gene_at_the_end_of_its_one_way_says_so():
    gene = Gene("lr", "float", min=1e-6, max=1e-3, monotone="up")
    only_genes = mutations(rl_hp=1)
    [still] = only_genes.plan([Member(0, {"lr": 1e-3}, {"lr": gene})], None, 0, 0)
    assert (still.kind, still.changes) == ("none", ())
    assert "end of its range" in still.details["reason"]
    [moved] = only_genes.plan([Member(0, {"lr": 1e-4}, {"lr": gene})], None, 0, 0)
    assert moved.changes[0].new > 1e-4


@pytest.mark.parametrize(("way", "factor"), [("up", 0.4), ("down", 3.0)])
def test_a_pulse_against_the_way_of_a_gene_leaves_it(way, factor):
    gene = Gene("lr", "float", min=1e-6, max=1e-2, monotone=way)
    assert rescaled(Member(0, {"lr": 1e-4}, {"lr": gene}), factor).changes == ()
    assert rescaled(Member(0, {"lr": 1e-4}, {"lr": gene}), 1 / factor).changes != ()
