"""What holds for every algorithm: copies continue to the bit, genes act, training together equals training alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import ALGORITHMS, DPO, KTO, SFT
from agilerl.algorithms.update import learn_together
from agilerl.data import RolloutBatch
from agilerl.hpo.mutation import Change, Mutation
from agilerl.hpo.parameters import genes_from
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, lora, sample
from tests.algorithms.data_agents import agents_of, examples, new_runtime
from tests.algorithms.ppo_agents import bits, equal
from tests.algorithms.test_router_loss import mixture
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


def make(name: str, **settings: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    rates = {"lr": 1e-2} if "lr" in cls.Config.model_fields else {"lr_actor": 1e-2, "lr_critic": 1e-2}
    sampled = {"group_size": 4, "max_output_tokens": 9} if cls.env_type == "reasoning" else {}
    runtime = Runtime.for_model(random_model(), lora_config=lora(8), seed=5)
    given = {"lora_config": lora(8), "batch_size": 8, "update_epochs": 2, "seed": 5, **rates, **sampled, **settings}
    return cls(runtime=runtime, pad_token_id=PAD, **given)


def of_data(cls: Any, seed: int, count: int = 12) -> RolloutBatch:
    batch = examples(count, seed, pairs=cls is DPO, longest=30)
    return replace(batch, desirable=torch.arange(count) % 3 != 0) if cls is KTO else batch


def batch_for(agent: Any, seed: int = 0) -> RolloutBatch:
    return batch_of(agent) if agent.env_type == "reasoning" else of_data(type(agent), seed)


# -- copies ----------------------------------------------------------------------------------------------------------


SET: dict[str, dict[str, Any]] = {
    "GRPO": {"beta": 0.02, "entropy_coef": 0.01},
    "CISPO": {"top_entropy_quantile": 0.5},
    "RLOO": {"beta": 0.1, "kl_target": 1e-3, "kl_horizon": 64},
    "REINFORCE": {"importance_sampling_level": "trajectory", "advantage_granularity": "token"},
    "DPPO": {"divergence_limit": 0.05},
    "PPO": {"gae_lambda": 0.9},
    "DPO": {"loss_type": ["sigmoid", "hinge"], "loss_weights": [1, 0.5]},
    "SFT": {"loss_type": "dft", "max_output_tokens": 7},
}


@pytest.mark.parametrize("own_reference", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_copies_go_on_to_the_bit_and_leave_their_parent_alone(name: str, own_reference: bool, tmp_path: Path) -> None:
    agent, cls = make(name, **SET.get(name, {})), ALGORITHMS[name]
    agent.learn(batch_for(agent))
    agent.fitness.append(0.5)
    if own_reference:
        agent.set_reference_policy(1)
        agent.learn(batch_for(agent, 3))
    agent.save_checkpoint(tmp_path / "a")
    copies = [
        agent.clone(),
        cls.load(tmp_path / "a", runtime=agent.runtime),
        cls.from_state(agent.state(), agent.runtime),
    ]
    before, data = bits(agent), batch_for(agent, 1)
    assert all((one.steps, one.fitness, one.tokens) == (agent.steps, [0.5], agent.tokens) for one in copies)
    learned = [copy.learn(data) for copy in copies]
    assert equal(bits(agent), before)
    expected = agent.learn(data)
    assert not equal(bits(agent), before)
    for copy, metrics in zip(copies, learned):
        assert type(copy) is cls
        assert (copy.config, copy.config.model_fields_set) == (agent.config, agent.config.model_fields_set)
        assert metrics == expected
        assert equal(bits(copy), bits(agent))


# -- genes -----------------------------------------------------------------------------------------------------------


NEEDS: dict[str, dict[str, Any]] = {
    "clip_coef": {"clip_coef": 0.3},
    "gamma": {"gamma": 0.95},
    "gae_lambda": {"gae_lambda": 0.9},
    "entropy_coef": {"entropy_coef": 0.01},
}
"""Where a gene's default is no number of its range, or bounds that nothing reaches."""
CLIP_MAX = {"GRPO": {"loss_type": "cispo", "clip_max": 1.5}, "CISPO": {"clip_max": 1.01}}


def every_gene() -> list[Any]:
    """Return all algorithms with all of their genes; by night alone those that another one shares and stands for.

    Each declaration of a gene has one relative of GRPO that always runs, the relatives in turn.
    """
    shared: dict[tuple[type, str], list[str]] = {}
    for name, cls in ALGORITHMS.items():
        for gene in genes_from(cls.Config):
            home = next(c for c in cls.Config.__mro__ if gene in vars(c).get("__annotations__", {}))
            shared.setdefault((home, gene), []).append(name)
    return [
        pytest.param(
            name,
            gene,
            marks=()
            if name in ("GRPO", "PPO", "DPO", "SFT") or (place - turn) % len(names) == 0
            else pytest.mark.nightly,
        )
        for turn, ((_, gene), names) in enumerate(shared.items())
        for place, name in enumerate(names)
    ]


@cache
def two_updates(name: str, given: tuple[tuple[str, Any], ...], gene: str | None) -> tuple[Any, list[torch.Tensor]]:
    """Return what an agent samples between two updates, and its weights after them; the gene changes in between."""
    agent = make(name, **dict(given))
    agent.learn(batch_for(agent))
    if gene is not None:
        declared, old = genes_from(type(agent).Config)[gene], getattr(agent.config, gene)
        new = next(v for v in (declared.choices or (declared.min, declared.max)) if v != old)
        agent.apply_mutation(Mutation(agent.index, "hyperparameters", (Change(gene, old, new),)))
        assert gene in agent.mut
    said = [t.token_ids for t in sample([agent])[0]] if agent.env_type == "reasoning" else None
    agent.learn(batch_for(agent, 1))
    return said, bits(agent)


@pytest.mark.parametrize(("name", "gene"), every_gene())
def test_every_gene_changes_behaviour_when_it_mutates(name: str, gene: str) -> None:
    """Two steps: a mutation must reach consumers that were used before it, so nothing derived may be cached."""
    start = {"batch_size": 9 if name in ("DPO", "SFT", "KTO") else 8, "weight_decay": 0.01}
    if name not in ("DPO", "SFT", "KTO"):
        start |= {"beta": 0.01}
    if (name, gene) == ("RLOO", "clip_coef"):
        start["lr"] = 1e-3  # larger steps take the ratio of a whole completion beyond any bounds
    needed = CLIP_MAX.get(name, {}) if gene == "clip_max" else NEEDS.get(gene, {})
    given = tuple({**start, **needed}.items())
    (said, before), (others, after) = two_updates(name, given, None), two_updates(name, given, gene)
    assert said != others or not equal(before, after)


# -- one batch -------------------------------------------------------------------------------------------------------


TOGETHER: dict[str, tuple[type, tuple[dict[str, Any], ...], Callable[[], Runtime]]] = {
    "SFT": (
        SFT,
        (
            {"lr": 1e-3, "batch_size": 8},
            {"lr": 3e-2, "batch_size": 5, "loss_type": "dft"},
            {"lr": 1e-4, "batch_size": 20, "update_epochs": 2, "packing": False},
        ),
        new_runtime,
    ),
    "SFT of a mixture": (
        SFT,
        (
            {"lr": 1e-2, "batch_size": 4, "router_aux_loss_coef": 0.3, "lora_config": lora(8)},
            {"lr": 3e-3, "batch_size": 6, "router_aux_loss_coef": 1.0, "update_epochs": 2, "lora_config": lora(8)},
            {"lr": 3e-3, "batch_size": 4, "lora_config": lora(8)},
        ),
        mixture,
    ),
    "DPO": (
        DPO,
        (
            {"lr": 1e-3, "batch_size": 4, "beta": 0.1},
            {"lr": 3e-2, "batch_size": 3, "beta": 0.5, "loss_type": "ipo"},
            {"lr": 1e-4, "batch_size": 9, "loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.3)},
        ),
        new_runtime,
    ),
    "DPO without a reference or weighted": (
        DPO,
        (
            {"lr": 3e-3, "batch_size": 4, "loss_type": "orpo"},
            {"lr": 3e-3, "batch_size": 3, "use_weighting": True, "ld_alpha": 0.5, "update_epochs": 2},
            {"lr": 3e-3, "batch_size": 9, "loss_type": ("simpo", "cpo"), "reference_free": True},
        ),
        new_runtime,
    ),
    "DPO with references that follow": (
        DPO,
        (
            {"lr": 1e-2, "batch_size": 4, "ref_sync_steps": 1, "ref_sync_alpha": 0.5},
            {"lr": 3e-3, "batch_size": 9, "ref_sync_steps": 2},
            {"lr": 3e-3, "batch_size": 9},
        ),
        new_runtime,
    ),
    "KTO": (
        KTO,
        (
            {"lr": 1e-3, "batch_size": 4},
            {"lr": 3e-2, "batch_size": 9, "beta": 0.5, "desirable_weight": 2.0, "update_epochs": 2},
            {"lr": 1e-3, "batch_size": 5, "loss_type": "apo_zero_unpaired", "undesirable_weight": 0.5},
        ),
        new_runtime,
    ),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_agents_of_data_learn_together_what_they_learn_alone(kind: str) -> None:
    cls, settings, runtime = TOGETHER[kind]
    batches = [[of_data(cls, 10 * step + (i > 0), 9) for i in range(3)] for step in range(3)]
    together = agents_of(cls, settings, runtime())
    start = [bits(agent) for agent in together]
    for step in batches:
        learn_together(together, step)
    for own in range(3):
        agents = agents_of(cls, settings, runtime())
        for step in batches:
            agents[own].learn(step[own])
        assert equal(bits(agents[own]), bits(together[own]))
        assert not equal(bits(together[own]), start[own])
        assert agents[own].reference_key == together[own].reference_key
