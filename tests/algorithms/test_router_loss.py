"""The load-balancing loss of a mixture's routers: transformers' function as the oracle, exactness, what it refuses."""

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agilerl.algorithms import DPO, GRPO, SFT
from agilerl.algorithms.forward import AgentRows, forward
from agilerl.config.base_model import SharedOptions
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError
from agilerl.models.slots import Route
from agilerl.runtime import Runtime
from tests.algorithms.conftest import lora
from tests.algorithms.data_agents import agents_of, examples, moment
from tests.tiny_models import PAD, qwen2, random_model

pytestmark = pytest.mark.model

EXPERTS, TOP = 4, 2


def mixture(kind: Any = Qwen3MoeConfig, options: SharedOptions | None = None, **changes: Any) -> Runtime:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(qwen2(), name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    if kind is Qwen3MoeConfig:
        sizes |= {"head_dim": 16, "num_experts": EXPERTS, "moe_intermediate_size": 32}
    else:
        sizes |= {"num_local_experts": EXPERTS, "sliding_window": None}
    config = kind(**{**sizes, "num_experts_per_tok": TOP, "eos_token_id": 1, "pad_token_id": PAD, **changes})
    runtime = Runtime.for_model(random_model(config, scale=0.5), lora_config=lora(8), seed=5, options=options)
    runtime.store.reserve(4)
    return runtime


def agent_of(kind: type = SFT, runtime: Runtime | None = None, **settings: Any) -> Any:
    given = {"lr": 1e-2, "batch_size": 64, "max_grad_norm": None, **settings}
    return agents_of(kind, (given,), mixture() if runtime is None else runtime)[0]


def shared(count: int = 4, seed: int = 0) -> RolloutBatch:
    """Rows of which two each have a prompt in common, of 8 tokens or more for most."""
    return examples(count, seed, pairs=True, longest=20)


def by_transformers(agent: Any, batch: RolloutBatch) -> torch.Tensor:
    """Return the loss of each row as transformers computes it, the row alone in a forward pass."""
    found, base = [], agent.runtime.base
    for row in range(len(batch)):
        ids = batch.ids[row : row + 1, : batch.lengths[row]]
        agent.runtime.store.batch_rows = 1
        with agent.runtime.store.routed(Route((agent.slot,), (1,))):
            logits = base.body(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        found.append(load_balancing_loss_func(logits, EXPERTS, TOP))
    return torch.stack(found)  # type: ignore[arg-type]


def trained(agent: Any) -> Any:
    """Move an agent away from its start, where one of the two factors has no gradient."""
    agent.learn(shared(seed=9))
    agent.runtime.store.clear_moments(agent.slot)
    return agent


@pytest.mark.parametrize("layout", ["flat", "padded", "packed"])
@pytest.mark.parametrize("kind", [Qwen3MoeConfig, MixtralConfig])
def test_values_are_those_of_transformers(kind: Any, layout: str) -> None:
    options = SharedOptions(use_sequence_packing=True) if layout == "packed" else None
    agent, batch = trained(agent_of(runtime=mixture(kind, options))), shared()
    if layout != "flat":
        agent.runtime.base.flattens = False
    parts = [AgentRows(None, shared(seed=3), 1.0), AgentRows(agent.slot, batch, 1.0, routers=True)][::-1]
    output, other = forward(agent.runtime, parts)
    assert output.router_loss is not None
    assert other.router_loss is None
    wanted = by_transformers(agent, batch)
    assert torch.allclose(output.router_loss, wanted, rtol=1e-4)
    assert wanted.std() > 1e-3
    assert agent.runtime.base._routers is None


@pytest.mark.parametrize("options", [None, SharedOptions(gradient_checkpointing=True)])
def test_the_gradient_is_that_of_transformers(options: SharedOptions | None) -> None:
    coefficient, batch, found = 0.7, shared(), {}
    for value in (0.0, coefficient):
        agent = trained(agent_of(runtime=mixture(options=options)))
        agent.router_aux_loss_coef = value
        metrics = agent.learn(batch)
        found[value] = moment(agent) / 0.1  # Adam's first step
    wanted = by_transformers(agent_twin := trained(agent_of(runtime=mixture(options=options))), batch)
    tokens = batch.action_mask.sum(dim=1)  # rows weigh as they do in the loss, here a mean over tokens
    (coefficient * (tokens * wanted).sum() / tokens.sum()).backward()
    gradient = agent_twin.runtime.store.grad[agent_twin.slot]
    assert gradient.abs().max() > 1e-4
    assert torch.allclose(found[coefficient] - found[0.0], gradient, rtol=1e-3, atol=1e-5)
    assert metrics["router_aux_loss"] == pytest.approx(float(wanted.detach().mean()), rel=1e-4)


@pytest.mark.parametrize("kind", [SFT, DPO, GRPO])
def test_micro_batches_and_pieces_accumulate_the_same_gradient(kind: type) -> None:
    results = []
    for micro in (None, 1, "pieces") if kind is SFT else (None, "pieces"):
        own = {"router_aux_loss_coef": 0.5, **({"group_size": 2, "beta": 0.0} if kind is GRPO else {})}
        agent = agent_of(kind, micro_batch_size_per_gpu=micro if micro == 1 else None, **own)
        batch = shared(6)
        batch.rewards[:] = torch.arange(12)[:, None] % 3  # some groups teach nothing by themselves
        if micro == "pieces":
            experience = agent.prepare(batch)
            whole = agent.window_denominator(experience.batch.action_mask)
            for rows in torch.arange(12).split(4):
                agent.accumulate(experience.select(rows), denominator=whole)
            agent.optim_step()
        else:
            agent.learn(batch)
        results.append(moment(agent))
    assert results[0].abs().sum() > 0
    for gradient in results[1:]:
        assert torch.allclose(gradient, results[0], rtol=1e-3, atol=1e-6)


def test_rows_that_teach_nothing_else_still_balance() -> None:
    agent, batch = agent_of(GRPO, group_size=2, beta=0.0, router_aux_loss_coef=0.5), shared()
    batch.rewards[:] = 1.0
    metrics = agent.learn(batch)
    assert metrics["router_aux_loss"] > 0
    assert moment(agent).abs().max() > 0


def test_training_on_it_alone_spreads_tokens_over_the_experts() -> None:
    agent, batch = agent_of(lr=3e-3, router_aux_loss_coef=1.0), shared(8)
    before = float(by_transformers(agent, batch).detach().mean())
    zero = torch.zeros(batch.action_mask.shape)
    agent.accumulate_tangents(batch, zero)  # a loss known by its derivative gets nothing added
    assert agent.optim_step()["grad_norm"] == 0.0
    for _ in range(5):
        agent.accumulate(batch, lambda inputs: inputs.logp.sum() * 0)
        agent.optim_step()
    assert float(by_transformers(agent, batch).detach().mean()) < before - 0.02


def test_bases_without_known_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a mixture"):
        agents_of(SFT, ({"router_aux_loss_coef": 0.1},))
    agent = agents_of(SFT, ({},))[0]
    agent.router_aux_loss_coef = 0.1
    with pytest.raises(ConfigError, match="not a mixture"):
        agent.learn(shared())
