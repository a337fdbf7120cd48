"""GRPO and its relatives: mixed populations in one batch, clones, checkpoints, genes, and the algorithm as a gene."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, DPPO, GRPO, GSPO, REINFORCE, RLOO, MaxRL
from agilerl.algorithms.update import learn_together
from agilerl.config.run import RunConfig
from agilerl.data import collate
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Change, Mutation, Mutations
from agilerl.hpo.parameters import Gene, genes_from
from agilerl.hpo.tournament import TournamentSelection
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.training.resolved import resolve
from agilerl.training.setup import build
from tests.algorithms.conftest import batch_of, equal, lora, sample, weights
from tests.algorithms.data_agents import embedded_runtime
from tests.probes import ConstantTarget
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

FAMILY: tuple[type[GRPO], ...] = (GRPO, GSPO, CISPO, RLOO, REINFORCE, MaxRL, DPPO)
SETTINGS: dict[type[GRPO], dict[str, Any]] = {
    GRPO: {"lr": 1e-3, "batch_size": 8, "beta": 0.02, "entropy_coef": 0.01},
    GSPO: {"lr": 3e-2, "batch_size": 4, "group_size": 3, "temperature": 0.8, "clip_coef": 0.1},
    CISPO: {"lr": 1e-3, "batch_size": 20, "group_size": 5, "update_epochs": 2, "top_entropy_quantile": 0.5},
    RLOO: {"lr": 3e-3, "batch_size": 8, "beta": 0.1, "kl_target": 1e-3, "kl_horizon": 64},
    REINFORCE: {
        "lr": 1e-3,
        "batch_size": 6,
        "importance_sampling_level": "trajectory",
        "advantage_granularity": "token",
    },
    MaxRL: {"lr": 2e-3, "batch_size": 8, "entropy_coef": 0.02},
    DPPO: {"lr": 2e-3, "batch_size": 5, "update_epochs": 2, "divergence_limit": 0.05},
}


def make(*classes: type[GRPO], changes: dict[str, Any] | None = None, **settings: Any) -> list[GRPO]:
    """Build one agent of each class on one new base."""
    runtime = Runtime.for_model(random_model(), lora_config=lora(8), seed=5)
    runtime.store.reserve(len(classes))
    return [
        cls(
            pad_token_id=PAD,
            runtime=runtime,
            index=FAMILY.index(cls),
            lora_config=lora(8 if i % 2 else 4),
            **{"max_output_tokens": 9, "seed": 5, "group_size": 4, **SETTINGS[cls], **settings, **(changes or {})},
        )
        for i, cls in enumerate(classes)
    ]


# -- one batch -------------------------------------------------------------------------------------------------------


def test_a_mixed_population_computes_what_each_would_alone() -> None:
    together = make(*FAMILY)
    expected = []
    for _ in range(3):
        rollouts = sample(together)
        expected.append([[t.token_ids for t in own] for own in rollouts])
        metrics = learn_together(together, [collate(own, PAD) for own in rollouts])
        assert all(math.isfinite(v) for own in metrics for v in own.values())
    final = [weights(agent) for agent in together]
    assert not any(equal(a, b) for i, a in enumerate(final) for b in final[:i])
    for own in range(len(FAMILY)):
        agents = make(*FAMILY)
        for step in range(3):
            (rollout,) = sample([agents[own]])
            assert [t.token_ids for t in rollout] == expected[step][own]
            learn_together([agents[own]], [collate(rollout, PAD)])
        assert equal(weights(agents[own]), final[own])


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_state_knows_its_class(tmp_path: Path) -> None:
    """Whoever is asked to restore it: a mixed population has no one class of its own."""
    (cispo,) = make(CISPO)
    cispo.save_checkpoint(tmp_path / "a")
    for cls in (GRPO, GSPO, REINFORCE):
        assert type(cls.from_state(cispo.state(), cispo.runtime)) is CISPO
    assert type(GRPO.load(tmp_path / "a", runtime=cispo.runtime)) is CISPO
    assert {cls.algorithm.name for cls in FAMILY} == {cls.__name__ for cls in FAMILY}
    assert all(cls.Config.algorithm == cls.__name__ for cls in FAMILY)


# -- genes -----------------------------------------------------------------------------------------------------------


"""Where a gene's default is no number of its range, or bounds that nothing reaches."""


# -- the algorithm as a gene -----------------------------------------------------------------------------------------


def choice(*classes: type[GRPO]) -> dict[str, Gene]:
    lr = genes_from(GRPO.Config)["lr"]
    names = tuple(c.__name__ for c in classes)
    return {"lr": lr, "algorithm": Gene("algorithm", "choice", scale="choice", choices=names)}


def test_an_agent_becomes_another_and_keeps_what_it_has() -> None:
    (agent,) = make(GRPO, hp_config=choice(GRPO, CISPO, GSPO), changes={"lr": 1e-2, "entropy_coef": 0.0, "beta": 0.0})
    agent.learn(batch_of(agent))
    slot, before, seen = agent.slot, weights(agent), []
    agent.register_mutation_hook(lambda: seen.append(agent.mut))
    assert agent.hyperparameters == {"lr": 1e-2, "algorithm": "GRPO"}
    agent.apply_mutation(Mutation(0, "hyperparameters", (Change("algorithm", "GRPO", "CISPO"),)))
    assert (agent.slot, agent.lr, seen) == (slot, 1e-2, ["algorithm GRPO -> CISPO"])
    # The agent is the object it was, of the class it was built with; what it has is another algorithm.
    assert (agent.algorithm, type(agent)) == (CISPO.algorithm, GRPO)
    assert repr(agent).startswith("CISPO(index=0, ")
    assert equal(weights(agent), before)
    # What was set stays set, what was not has the new algorithm's default, and there is nothing of the old one left.
    assert (agent.config.loss_norm, agent.config.batch_size) == ("token-mean", 8)
    assert agent.hyperparameters["algorithm"] == "CISPO"
    # From here on it is what a CISPO agent with the same weights would be.
    (other,) = make(CISPO, changes={"lr": 1e-2, "batch_size": 8, "group_size": 4, "update_epochs": 1, "beta": 0.0})
    other.set_hyperparameters({"top_entropy_quantile": 1.0})
    state = agent.state()
    assert state.algorithm == "CISPO"
    other.runtime.store.write(other.slot, {"theta": state.adapter, **state.moments})
    other.runtime.store.steps[other.slot] = state.optimizer_steps
    other.index, other.updates = agent.index, agent.updates
    data = batch_of(agent)
    agent.learn(data)
    other.learn(data)
    assert equal(weights(agent), weights(other))
    clone = agent.clone(9)
    assert (clone.algorithm, clone.genes == agent.genes) == (CISPO.algorithm, True)


def test_a_change_that_does_not_fit_changes_nothing() -> None:
    (agent,) = make(REINFORCE, changes={"group_size": 1})
    config = agent.config
    for name, message in (
        ("GRPO", "advantage_granularity: input should be"),
        ("RLOO", r"RLOO .* completion .* action|advantage_granularity"),
        ("PPO", "cannot become 'PPO'"),
    ):
        with pytest.raises(ConfigError, match=message):
            agent.set_hyperparameters({"algorithm": name, "lr": 0.5})
        assert (agent.algorithm, agent.config) == (REINFORCE.algorithm, config)
    (agent,) = make(GRPO, changes={"importance_sampling_level": "token"})
    with pytest.raises(ConfigError, match="importance_sampling_level='token'"):
        agent.set_hyperparameters({"algorithm": "GSPO"})
    agent.set_hyperparameters({"algorithm": "GRPO", "lr": 0.5})
    assert (agent.algorithm, agent.lr) == (GRPO.algorithm, 0.5)


def test_an_agent_has_the_attributes_of_the_algorithm_it_has() -> None:
    (agent,) = make(GSPO)
    assert not any(hasattr(agent, name) for name in ("gamma", "divergence_limit"))
    with pytest.raises(ConfigError, match="gamma"):
        agent.gamma = 0.9
    agent.set_hyperparameters({"algorithm": "REINFORCE"})
    agent.gamma = 0.9
    assert (agent.config.gamma, agent.gamma) == (0.9, 0.9)
    assert not hasattr(agent, "divergence_limit")


class Narrow(REINFORCE):
    """A user's algorithm: REINFORCE with hyperparameters of its own, and no more said."""

    class Config(REINFORCE.Config):  # type: ignore[name-defined, misc]
        knob: float = 0.5


def test_a_class_that_names_only_its_config_has_an_algorithm_of_its_own() -> None:
    (agent,) = make(REINFORCE)
    narrow = Narrow(runtime=agent.runtime, pad_token_id=PAD, knob=0.25)
    expected = ("Narrow", Narrow.Config, REINFORCE.algorithm.credit)
    assert (narrow.algorithm.name, narrow.algorithm.Config, narrow.algorithm.credit) == expected
    assert (narrow.knob, narrow.state().algorithm, repr(narrow)[:13]) == (0.25, "Narrow", "Narrow(index=")
    assert type(Narrow.from_state(narrow.state(), agent.runtime)) is Narrow


def probe(*classes: type[GRPO], prompts: int = 8, **settings: Any) -> Population:
    runtime = embedded_runtime(scale=1.0)
    defaults = {"lr": 5e-3, "group_size": 16, "batch_size": 64, "max_output_tokens": 1, "seed": 1}
    agents = [cls(runtime=runtime, index=i, **{**defaults, **settings}) for i, cls in enumerate(classes)]
    return Population(agents, ConstantTarget(), prompts_per_step=prompts, eval_max_new_tokens=1)


def test_a_mixed_population_evolves() -> None:
    population = probe(GRPO, CISPO, GSPO, GRPO, hp_config=choice(GRPO, CISPO, GSPO), group_size=4, batch_size=16)
    mutations = Mutations(0, 0, 0, 0, 0, 1)
    seen = set()
    for generation in range(5):
        population.learn(population.rollout())
        order = {a.index: Fitness(0.1 * i, 0.0, 4) for i, a in enumerate(population.agents)}
        evolution = population.evolve(order, TournamentSelection(2, True, 4), mutations, generation=generation, seed=0)
        for mutation, agent in zip(evolution.mutations, population.agents):
            for change in mutation.changes:
                seen.add(change.gene)
                assert agent.hyperparameters[change.gene] == change.new
        assert all(a.algorithm.name == a.hyperparameters["algorithm"] for a in population.agents)
        assert len({a.slot for a in population.agents}) == 4
    assert seen == {"lr", "algorithm"}
    assert population.runtime.store.used == 4


# -- manifests -------------------------------------------------------------------------------------------------------


def manifest(name: str, **algorithm: Any) -> RunConfig:
    values = {"lr": 1e-3, "beta": 0.0, "group_size": 4, "max_output_tokens": 4, **algorithm}
    return RunConfig.from_dict(
        {
            "algorithm": {"name": name, **values},
            "environment": {
                "task": "reasoning_gym:spell_backward",
                "params": {"min_word_len": 3, "max_word_len": 4},
                "eval_prompts": 2,
                "test_prompts": 2,
            },
            "training": {"pop_size": 5},
            "mutation": {"rl_hp_selection": {"lr": {"min": 1e-5, "max": 1e-2}}},
        }
    )


def test_a_manifest_may_leave_the_algorithm_to_evolution() -> None:
    config = manifest("choice[GRPO, CISPO, GSPO]")
    assert resolve(config).algorithms == (GRPO, CISPO, GSPO)
    assert resolve(config).genes["algorithm"].choices == ("GRPO", "CISPO", "GSPO")
    agents = build(config).population.agents
    assert [a.algorithm.name for a in agents] == ["GRPO", "CISPO", "GSPO", "GRPO", "CISPO"]
    assert agents[0].lr == 1e-3
    assert agents[2].config.clip_range == (1 - 3e-4, 1 + 4e-4)
    # The resolved manifest is a manifest: it gives the same run again.
    again = RunConfig.from_dict(resolve(config).document())
    assert resolve(again).algorithms == (GRPO, CISPO, GSPO)
    assert resolve(again).document() == resolve(config).document()
    assert resolve(manifest("GRPO")).genes.keys() == {"lr"}


@pytest.mark.parametrize(
    ("name", "algorithm", "message"),
    [
        ("choice[GRPO, PPO]", {}, r"PPO; .* GRPO"),
        ("choice[GRPO, CIPSO]", {}, "is unknown; did you mean 'CISPO'"),
        ("choice[GRPO]", {}, "at least two different algorithms"),
        ("choice[GRPO, GRPO]", {}, "at least two different algorithms"),
        ("choice[GRPO, GSPO]", {"importance_sampling_level": "token"}, "pools the ratio over the trajectory"),
        ("choice[REINFORCE, GRPO]", {"group_size": 1}, "group_size=1 .*at least 2"),
        ("choice[GRPO, CISPO]", {"dual_clip": 3.0}, "CISPO .* dual_clip"),
        ("choice[GRPO, GSPO]", {"clip_max": 2.0}, "unknown key 'algorithm.clip_max'"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_before_the_run(name: str, algorithm: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(manifest(name, **algorithm))


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (REINFORCE, {"group_size": 1, "prompts": 128}),
        (REINFORCE, {"advantage_estimator": "reinforce++", "kl_placement": "reward", "kl_estimator": "k1"}),
        (REINFORCE, {"advantage_estimator": "reinforce++-baseline", "kl_estimator": "k2"}),
        (GRPO, {"dynamic_sampling": True, "clip_coef": (0.8, 1.28), "loss_norm": "token-mean", "beta": 0.0}),
        (GRPO, {"kl_target": 0.5, "beta": 0.01, "entropy_coef": 1e-3, "top_entropy_quantile": 0.8}),
    ],
)
def test_it_solves_a_probe_of_known_optimum(cls: type[GRPO], settings: dict[str, Any]) -> None:
    population = probe(cls, **settings)
    before = population.evaluate()[0].mean
    for _ in range(10):
        metrics = population.learn(population.rollout())
    assert before < 0.5
    assert population.evaluate()[0].mean == 1.0
    assert metrics[0]["reward"] >= 0.8


def test_a_mixed_population_learns_together() -> None:
    population = probe(GRPO, CISPO, GSPO)
    for _ in range(10):
        population.learn(population.rollout())
    assert [result.mean for result in population.evaluate().values()] == [1.0, 1.0, 1.0]


def test_an_algorithm_of_ones_own_cannot_be_changed() -> None:
    class Mine(GRPO):
        def credit(self, batch: Any, kl: torch.Tensor | None = None) -> torch.Tensor:
            return super().credit(batch, kl) * 2

    (it,) = make(GRPO)
    mine = Mine(runtime=it.runtime, pad_token_id=PAD, index=1, lora_config=lora(4))
    for agent, name in ((it, "Mine"), (mine, "GSPO")):
        before = agent.algorithm
        with pytest.raises(ConfigError, match=r"cannot become"):
            agent.set_hyperparameters({"algorithm": name})
        assert agent.algorithm is before
