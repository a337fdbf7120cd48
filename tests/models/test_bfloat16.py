"""A bf16 base on a CPU: its products are in bf16, everything between them in fp32."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, Qwen3MoeConfig

from agilerl.algorithms.update import learn_together
from agilerl.data import collate
from agilerl.models.base import load_base
from agilerl.models.layers import round_products
from agilerl.models.lora import RoundedLinear, _times
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime
from tests.algorithms.conftest import equal, make_agents, sample, weights
from tests.models.two_agents import make_runtime, train_pass
from tests.tiny_models import PAD, llama, qwen2, random_model

pytestmark = pytest.mark.model


def rounded(config: Any = None) -> Any:
    model = random_model(config, scale=0.5).to(torch.bfloat16)
    round_products(model)
    return model


@pytest.mark.parametrize("config", [qwen2(), llama()], ids=["tied", "untied"])
def test_it_is_nearer_to_fp32_than_a_model_that_computes_in_bf16(config: Any) -> None:
    exact = train_pass(make_runtime(random_model(config, scale=0.5).to(torch.bfloat16).float()))
    ours, plain = make_runtime(rounded(config)), make_runtime(random_model(config, scale=0.5).to(torch.bfloat16))
    assert ours.base.flattens
    assert (ours.base.dtype, ours.base.activation_dtype) == (torch.bfloat16, torch.float32)
    assert plain.base.activation_dtype == torch.bfloat16
    near, far = train_pass(ours).distance(exact), train_pass(plain).distance(exact)
    assert all(0 < mine < 0.8 * theirs for mine, theirs in zip(near, far))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_products_are_in_bf16_and_nothing_else(targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    types, linear, silu = set(), torch.nn.functional.linear, torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: types.add(x.dtype) or linear(x, *rest))
    runtime = make_runtime(rounded(), targets)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, **rest: types.add((x.dtype, 0)) or silu(x, **rest))
    train_pass(runtime)
    assert types == {torch.bfloat16, (torch.float32, 0)}
    assert runtime.base.model.get_input_embeddings()(torch.tensor([3])).dtype == torch.float32
    rows, weight = torch.full((3, 4), 1 / 3), torch.full((4, 2), 1 / 7, dtype=torch.bfloat16)
    gradient = _times(rows, weight)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, (rows.bfloat16() @ weight).float())
    assert not torch.equal(gradient, rows @ weight.float())
    assert {p.dtype for name, p in runtime.base.model.named_parameters() if "norm" in name} == {torch.float32}
    assert {p.dtype for name, p in runtime.base.model.named_parameters() if "proj" in name} == {torch.bfloat16}


def test_agents_together_have_the_bits_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.algorithms.conftest.random_model", rounded)
    agents = make_agents()
    assert agents[0].runtime.base.activation_dtype != agents[0].runtime.base.dtype
    tokens = []
    for _ in range(2):
        rollouts = sample(agents)
        tokens.append([[row.token_ids for row in rows] for rows in rollouts])
        learn_together(agents, [collate(rows, PAD) for rows in rollouts])
    for i in range(3):
        (agent,) = (a for a in make_agents() if a.index == i)
        for step in tokens:
            (rows,) = sample([agent])
            assert [row.token_ids for row in rows] == step[i]
            learn_together([agent], [collate(rows, PAD)])
        assert equal(weights(agent), weights(agents[i]))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=64),
        Qwen3MoeConfig(
            **qwen2().to_dict()
            | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 8, "head_dim": 16}
        ),
    ],
    ids=["gpt2", "experts"],
)
def test_models_of_other_layers_stay_as_they_are(config: Any) -> None:
    model = rounded(config)
    assert not any(isinstance(module, RoundedLinear) for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_base_that_is_loaded_samples_what_it_trains() -> None:
    base = load_base("embedded", dtype="bfloat16")
    assert base.activation_dtype == torch.float32
    assert not base.decodes_exactly
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    runtime = Runtime(base, lora_config=lora, seed=0)
    (answers,) = runtime.engine.generate([GenerationRequest(None, list(range(5, 25)), 8, SamplingSettings(12))])
    for answer in answers:
        ids = torch.tensor([list(range(5, 25)) + answer.token_ids])
        with torch.no_grad():
            logp = base.logits(base.hidden(ids)[0, 19:-1]).log_softmax(-1).gather(1, ids[0, 20:, None])[:, 0]
        assert float((logp - torch.tensor(answer.logprobs)).abs().max()) < 0.02
