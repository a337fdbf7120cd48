"""An agent's own weights of the parts of the reward: as genes, in rollouts, in copies, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agilerl.algorithms import CISPO, GRPO, PPO, SFT
from agilerl.data import Trajectory
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.lineage import birth_record, mutation_record
from agilerl.hpo.mutation import Change, Mutation, Mutations
from agilerl.hpo.parameters import Gene, HyperparameterConfig, RLParameter, declared_gene, genes_from, genes_in_force
from agilerl.hpo.tournament import TournamentSelection
from agilerl.population import Population
from agilerl.rewards import CombinedGrader
from tests.algorithms.data_agents import embedded_runtime
from tests.probes import ConstantTarget

EVEN = "reward_weights.even"
EVOLVING = HyperparameterConfig(**{EVEN: RLParameter(min=0, max=1)})


def even(completion_ids: list[int]) -> float:
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def long(completions: list[str], completion_ids: list[list[int]]) -> list[float | Exception]:
    """Fail on every third completion or so."""
    return [ValueError("odd text") if ids[0] % 3 == 0 else len(ids) / 3 for ids in completion_ids]


def graded(fitness: bool = True) -> GradedTask:
    probe = ConstantTarget()
    grader = CombinedGrader([TaskGrader(probe), (even, 0.5), (long, 0.0)])
    return GradedTask(probe, grader, fitness_grader=TaskGrader(probe) if fitness else None)


def make(size: int = 1, algorithm: type[GRPO] | type[PPO] = GRPO, **settings: Any) -> list[Any]:
    runtime = embedded_runtime()
    defaults = {"group_size": 4, "batch_size": 16, "beta": 0.0, "max_output_tokens": 3, "seed": 1}
    return algorithm.population(size, runtime=runtime, **{**defaults, **settings})


def population(agents: list[Any], task: Any = None) -> Population:
    return Population(agents, graded() if task is None else task, prompts_per_step=4, eval_max_new_tokens=2)


def expected(t: Trajectory, reward: float = 1.0, even: float = 0.5, long: float = 0.0) -> float:
    """Return the weighted sum of a trajectory's parts, NaN where one that counts has failed."""
    if long and "long" in t.failed:
        return math.nan
    parts = ((reward, "reward"), (even, "even"), (long, "long"))
    return sum(weight * (t.scores[name] or 0.0) for weight, name in parts)


def assert_weighted(trajectories: list[Trajectory], **weights: float) -> None:
    found = [t.rewards[0] for t in trajectories]
    assert found == pytest.approx([expected(t, **weights) for t in trajectories], nan_ok=True)


# -- genes -----------------------------------------------------------------------------------------------------------


def test_the_range_of_a_mapping_is_that_of_each_entry() -> None:
    assert declared_gene(GRPO.Config, EVEN) == Gene(EVEN, "float", min=0.0, max=1.0, scale="linear")
    assert declared_gene(GRPO.Config, "reward_weights.a.b") is not None, "graders may have dots in their names"
    assert declared_gene(GRPO.Config, "lr") == genes_from(GRPO.Config)["lr"]
    for name in ("reward_weights", "reward_weights.", "lr.x", "lr.", "no_such.x", "seed"):
        assert declared_gene(GRPO.Config, name) is None
    assert not [name for name in genes_from(GRPO.Config) if name.startswith("reward_weights")]
    assert genes_in_force(GRPO.Config, EVOLVING) == {EVEN: Gene(EVEN, "float", scale="linear", factors=(0.8, 1.2))}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward_weights", r"'reward_weights.<name>'\?"),
        ("reward_weights.", r"'reward_weights.<name>'\?"),
        ("reward_wieghts.even", r"'reward_weights.<name>'\?"),
        ("lr.x", r"GRPOConfig .* 'lr.x'"),
    ],
)
def test_a_gene_that_is_no_entry_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        genes_in_force(GRPO.Config, HyperparameterConfig(**{name: RLParameter(0, 1)}))


# -- agents ----------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_an_entry_is_read_and_written_by_its_name() -> None:
    (agent,) = make(reward_weights={"even": 0.5, "long": 0.1}, hp_config=EVOLVING)
    assert agent.hyperparameters == {EVEN: 0.5}
    agent.apply_mutation(Mutation(0, "hyperparameters", (Change(EVEN, 0.5, 0.25),)))
    assert (agent.hyperparameters, agent.mut) == ({EVEN: 0.25}, "reward_weights.even 0.5 -> 0.25")
    assert agent.reward_weights == {"even": 0.25, "long": 0.1}
    agent.set_hyperparameters({"reward_weights.reward": 2, "lr": 1e-3})
    assert (agent.lr, agent.config.reward_weights) == (1e-3, {"even": 0.25, "long": 0.1, "reward": 2.0})
    agent.reward_weights = {"even": 1}
    assert agent.hyperparameters == {EVEN: 1.0}


@pytest.mark.model
def test_a_change_that_is_refused_changes_nothing() -> None:
    (agent,) = make(reward_weights={"even": 0.5}, hp_config=EVOLVING)
    config = agent.config
    refused = {
        r"reward_weights\.even: input should be a finite number": {EVEN: math.nan},
        r"reward_weights\.even: input should be a valid number": {EVEN: "much"},
        r"evolves without a value.*give it one: reward_weights=\{'even': \.\.\.\}": {"reward_weights": {"long": 1.0}},
        r"lr: input should be a valid number": {"lr.x": 1.0},
        r"evolves without a value": {"algorithm": "CISPO", "reward_weights": {}},
    }
    for message, values in refused.items():
        with pytest.raises(ConfigError, match=message):
            agent.set_hyperparameters(values)
        assert (agent.config, agent.algorithm) == (config, GRPO.algorithm)
    with pytest.raises(TypeError, match="item assignment"):
        agent.reward_weights["even"] = math.inf
    with pytest.raises(ConfigError, match=r"reward_weights\.even .*found none"):
        make(hp_config=EVOLVING)
    with pytest.warns(UserWarning, match=r"even=3\.0 .* starts at 1\.0"):
        (moved,) = make(hp_config=EVOLVING, reward_weights={"even": 3})
    assert moved.reward_weights["even"] == 1.0
    with pytest.raises(ConfigError, match="'reward_weights'"):
        SFT(reward_weights={"even": 1.0})


@pytest.mark.model
@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_copies_have_the_weights_and_go_their_own_way(algorithm: type[GRPO] | type[PPO], tmp_path: Path) -> None:
    (agent,) = make(algorithm=algorithm, reward_weights={"even": 0.5, "long": 0.1}, hp_config=EVOLVING)
    agent.set_hyperparameters({EVEN: 0.25})
    agent.save_checkpoint(tmp_path / "a")
    copies = [
        agent.clone(5),
        algorithm.load(tmp_path / "a", runtime=agent.runtime),
        algorithm.from_state(agent.state(), agent.runtime),
    ]
    agent.set_hyperparameters({EVEN: 1.0})
    for copy in copies:
        assert copy.reward_weights == {"even": 0.25, "long": 0.1}
        assert copy.hyperparameters == {EVEN: 0.25}
        assert copy.genes == agent.genes
    copies[0].set_hyperparameters({EVEN: 0.0})
    assert (agent.hyperparameters[EVEN], copies[1].hyperparameters[EVEN]) == (1.0, 0.25)


@pytest.mark.model
def test_the_algorithm_and_a_weight_change_together() -> None:
    choice = Gene("algorithm", "choice", scale="choice", choices=("GRPO", "CISPO"))
    genes = {EVEN: Gene(EVEN, "float", scale="linear"), "algorithm": choice}
    (agent,) = make(reward_weights={"even": 0.5, "long": 0.1}, hp_config=genes)
    changes = (Change(EVEN, 0.5, 0.75), Change("algorithm", "GRPO", "CISPO"))
    agent.apply_mutation(Mutation(0, "hyperparameters", changes))
    assert agent.algorithm is CISPO.algorithm
    assert agent.reward_weights == {"even": 0.75, "long": 0.1}


# -- rollouts --------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_each_agent_is_rewarded_by_its_own_weights_and_examined_by_one_measure() -> None:
    agents = make(3)
    agents[1].reward_weights = {"even": 4.0}
    agents[2].reward_weights = {"reward": 0.0, "long": -1.0}
    ours = population(agents)
    rollout = ours.rollout()
    assert_weighted(rollout.trajectories[0])
    assert_weighted(rollout.trajectories[1], even=4.0)
    assert_weighted(rollout.trajectories[2], reward=0.0, long=-1.0)
    rewards = {i: [t.rewards[0] for t in own] for i, own in rollout.trajectories.items()}
    assert all(map(math.isfinite, rewards[0] + rewards[1])), "long fails, and counts for the third alone"
    assert any(map(math.isnan, rewards[2]))
    metrics = ours.learn(rollout)
    for index, own in rewards.items():
        finite = [r for r in own if math.isfinite(r)]
        assert metrics[index]["reward"] == pytest.approx(sum(finite) / len(finite), abs=1e-6)
        even_scores = [t.scores["even"] for t in rollout.trajectories[index]]
        assert metrics[index]["rewards/even/mean"] == pytest.approx(sum(even_scores) / len(even_scores))
    with_weights = {index: fitness.mean for index, fitness in ours.evaluate().items()}
    for agent in agents:
        agent.reward_weights = {}
    assert {index: fitness.mean for index, fitness in ours.evaluate().items()} == with_weights


@pytest.mark.model
def test_a_mutation_and_the_graders_own_weights_count_from_the_next_rollout_on() -> None:
    agents = make(2, reward_weights={"even": 0.5}, hp_config=EVOLVING, init="same")
    task = graded()
    ours = population(agents, task)
    assert_weighted(ours.rollout().trajectories[1])
    agents[1].apply_mutation(Mutation(1, "hyperparameters", (Change(EVEN, 0.5, 0.125),)))
    task.weights["reward"] = 3.0  # type: ignore[index]
    rollout = ours.rollout()
    assert_weighted(rollout.trajectories[0], reward=3.0, even=0.5)
    assert_weighted(rollout.trajectories[1], reward=3.0, even=0.125)
    agents[0].set_hyperparameters({"reward_weights.lnog": 1.0})
    with pytest.raises(ConfigError, match=r"'lnog'.*'long'\?"):
        ours.rollout()


@pytest.mark.model
def test_weights_decide_what_is_learned() -> None:
    """From 44 % even tokens: one agent is paid for them, the other fined."""
    agents = make(2, lr=5e-3, group_size=16, batch_size=64, max_output_tokens=1)
    agents[0].reward_weights = {"even": 1.0, "reward": 0.0}
    agents[1].reward_weights = {"even": -1.0, "reward": 0.0}
    ours = population(agents)
    for _ in range(10):
        metrics = ours.learn(ours.rollout())
    assert metrics[0]["rewards/even/mean"] > 0.6
    assert metrics[1]["rewards/even/mean"] < 0.35


@pytest.mark.model
def test_weights_of_nothing_teach_nothing() -> None:
    ours = population(make(1, reward_weights={"even": 0.0, "reward": 0.0}))
    rollout = ours.rollout()
    assert all(math.isnan(t.rewards[0]) for t in rollout.trajectories[0])
    ours.learn(rollout)
    assert ours.evaluate()[0].is_finite


@pytest.mark.model
def test_weights_start_spread_and_evolve() -> None:
    agents = make(4, reward_weights={"even": 0.5}, hp_config=EVOLVING)
    ours = population(agents)
    starts = [agent.hyperparameters[EVEN] for agent in agents]
    assert starts[0] == 0.5
    assert len(set(starts)) == 4
    fitness = {agent.index: Fitness(0.1 * agent.index, 0.0, 4) for agent in agents}
    selection, mutations = TournamentSelection(2, True, 4), Mutations(0, 0, 0, 0, 0, 1)
    evolution = ours.evolve(fitness, selection, mutations, generation=0, seed=1)
    changed = [mutation for mutation in evolution.mutations if mutation.kind == "hyperparameters"]
    assert changed
    for mutation in changed:
        (change,) = mutation.changes
        agent = ours.agent(mutation.agent)
        assert (change.gene, change.new) == (EVEN, agent.hyperparameters[EVEN])
        assert agent.mut.startswith("reward_weights.even ")
        assert mutation_record(mutation, 0)["changes"][0]["gene"] == EVEN
    for birth in evolution.plan.births:
        values = evolution.inherited[birth.child]
        assert birth_record(birth.child, birth.parent, 0, 1, values)["hyperparameters"] == dict(values)
        assert values[EVEN] in starts
    rollout = ours.rollout()
    for agent in ours.agents:
        assert_weighted(rollout.trajectories[agent.index], even=agent.hyperparameters[EVEN])


# -- what is refused -------------------------------------------------------------------------------------------------


def plain() -> GradedTask:
    return GradedTask(ConstantTarget(), TaskGrader(ConstantTarget()), TaskGrader(ConstantTarget()))


@pytest.mark.model
@pytest.mark.parametrize(
    ("weights", "task", "message"),
    [
        ({"evne": 1.0}, graded, r"reward_weights\.evne: .* 'evne'; .* 'even'\?"),
        ({"even": 1.0}, plain, r"probe:constant .* parts; .*GradedTask\("),
        ({"even": 1.0}, ConstantTarget, "the reward of probe:constant has no parts"),
    ],
)
def test_weights_of_parts_that_there_are_not_are_refused(
    weights: dict[str, float], task: Callable[[], Any], message: str
) -> None:
    agents = make(reward_weights=weights)
    with pytest.raises(ConfigError, match=message):
        population(agents, task())


@pytest.mark.model
def test_weights_that_evolve_need_a_fitness_grader() -> None:
    agents = make(reward_weights={"even": 0.5}, hp_config=EVOLVING)
    with pytest.raises(ConfigError, match=r"reward_weights\.even .*fitness grader"):
        population(agents, graded(fitness=False))
    population(agents)
    population(make(reward_weights={"even": 0.5}), graded(fitness=False))  # fixed ones do not
