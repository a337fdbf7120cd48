"""Which layers carry adapters: mixtures of experts, text towers of multimodal models, a scope."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    GPT2Config,
    LagunaConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
)

from agilerl.config.base_model import SharedOptions
from agilerl.errors import CheckpointError, ConfigError, EngineError
from agilerl.models import adapters, layers
from agilerl.models.adapters import lora_layers
from agilerl.models.base import load_base
from agilerl.models.slots import Route
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime
from agilerl.training.base import check_exported
from tests.models.two_agents import make_runtime, rows, train_pass
from tests.tiny_models import random_model

pytestmark = pytest.mark.model

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, **TEXT}
MIXTURES = {
    "qwen3": Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, head_dim=16, **EXPERTS),
    "mixtral": MixtralConfig(num_local_experts=4, **EXPERTS),
    "phi": PhimoeConfig(num_local_experts=4, **EXPERTS),
    "qwen2": Qwen2MoeConfig(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48, **EXPERTS),
}
_GROUPED: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "v_head_dim": 16}
PARTLY_DENSE = {
    "qwen3": Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, head_dim=16, mlp_only_layers=[0], **EXPERTS),
    "glm4": Glm4MoeConfig(moe_intermediate_size=32, head_dim=16, **_GROUPED),
    "deepseek": DeepseekV3Config(moe_intermediate_size=32, **{**_GROUPED, **_LATENT}),
}
"""Mixtures whose first layer has no experts, and some of which have shared ones."""
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def multimodal(kind: str) -> Any:
    if kind == "llava":
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        config: Any = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT))
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
        config = Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


def mixture(name: str) -> Any:
    return random_model(MIXTURES[name], scale=0.5)


def names(model: Any, targets: Any = "all-linear", scope: str | None = None) -> list[str]:
    return [layer.name for layer in lora_layers(model, LoraConfig(target_modules=targets), scope)]


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "phi"])
def test_of_a_mixture_with_fused_experts_the_attention_carries_adapters(name: str) -> None:
    assert {n.rpartition(".")[2] for n in names(mixture(name))} == ATTENTION


def test_shared_experts_carry_adapters_and_their_router_does() -> None:
    shared = {n.partition(".mlp.")[2] for n in names(mixture("qwen2")) if ".mlp." in n}
    gates = {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"}
    assert shared == gates


def test_experts_that_are_named_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts\.gate_up_proj "):
        names(mixture("qwen3"), ["gate_up_proj"])
    model = mixture("qwen3")
    model.model.layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64)])
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.experts\.0'"):
        names(model, r".*experts\.0")
    assert not any("experts" in n for n in names(model))  # all-linear leaves it out


@pytest.mark.parametrize("name", MIXTURES)
def test_agents_of_a_mixture_keep_their_numbers_to_themselves(name: str) -> None:
    runtime = make_runtime(mixture(name))
    together = train_pass(runtime)
    for agent in (0, 1):
        alone = train_pass(runtime, (agent,))
        assert torch.equal(alone.logp[0], together.logp[agent])
        assert torch.equal(alone.grad[agent], together.grad[agent])
    prompts = [rows(agent, 64).ids[0, :7].tolist() for agent in (0, 1)]
    asked = [GenerationRequest(agent, prompts[agent], 3, SamplingSettings(9), key=(agent,)) for agent in (0, 1)]
    assert [runtime.engine.generate([request])[0] for request in asked] == runtime.engine.generate(asked)


def test_experts_that_are_made_of_other_parts_keep_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("qwen3")
    model.config._experts_implementation = "eager"
    monkeypatch.setattr(layers, "_of_expert", lambda *parts: torch.zeros(()))
    assert make_runtime(model).base.model.config._experts_implementation == "eager"


def test_the_code_of_experts_is_not_written_with_a_model(tmp_path: Path) -> None:
    model = mixture("qwen3")
    make_runtime(model)
    assert model.config._experts_implementation == layers.EXPERTS
    model.config.save_pretrained(tmp_path)
    assert layers.EXPERTS not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("config", [*MIXTURES.values(), *PARTLY_DENSE.values()], ids=[*MIXTURES, *PARTLY_DENSE])
def test_peft_computes_the_same_on_a_mixture(config: Any, tmp_path: Path) -> None:
    """Shared experts get rows and tokens flattened into one dimension: each must still meet its own adapter.

    Of models whose experts are fused PEFT takes the layers of dense parts for experts, unless it gets their weights.
    """
    model = random_model(config, scale=0.5)
    runtime = make_runtime(model)
    store, ids = runtime.store, rows(0, 64).ids
    adapters.write_adapter(tmp_path, store.layers, store.adapter(1), runtime.lora_config, "")
    with torch.no_grad(), store.routed(Route((0, 1), (2, len(ids)))):
        ours = runtime.base.hidden(torch.cat([ids[:2], ids]))[2:]
    theirs = PeftModel.from_pretrained(random_model(config, scale=0.5), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(runtime.base.logits(ours), theirs(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PARTLY_DENSE)
def test_of_a_mixture_dense_layers_carry_adapters_that_are_read_again(name: str, tmp_path: Path) -> None:
    model = random_model(PARTLY_DENSE[name], scale=0.5)
    runtime = make_runtime(model)
    store = runtime.store
    assert {"gate_proj", "up_proj", "down_proj"} <= {n.name.rpartition(".")[2] for n in store.layers if n.by_weight}
    adapters.write_adapter(tmp_path, store.layers, store.adapter(1), runtime.lora_config, "")
    assert lora_layers(model, adapters.read_config(tmp_path)) == list(store.layers)
    for ours, theirs in zip(store.adapter(1), adapters.read_adapter(tmp_path, store.layers)[0], strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("damage", ["none", "names of layers", "a tensor too many"])
def test_an_adapter_that_peft_reads_otherwise_does_not_leave(damage: str, tmp_path: Path) -> None:
    """Before dense layers of mixtures were named by their weights, export and merge lost them without a word."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    random_model(PARTLY_DENSE["glm4"], scale=0.5).save_pretrained(base)
    runtime = make_runtime(load_base(str(base)).model)
    layers = runtime.store.layers
    if damage == "names of layers":
        layers = tuple(dataclasses.replace(layer, by_weight=False) for layer in layers)
    adapters.write_adapter(folder, layers, runtime.store.adapter(1), runtime.lora_config, str(base))
    if damage == "a tensor too many":
        (folder / "adapter_config.json").write_text(
            (folder / "adapter_config.json").read_text().replace('"model.layers.1.self_attn.q_proj",', "")
        )
    if damage == "none":
        check_exported(folder, str(base), SharedOptions())
        return
    with pytest.raises(
        CheckpointError, match=r"^PEFT (does not use \d+ tensors|computes something else)|has weights for 2 layers"
    ):
        check_exported(folder, str(base), SharedOptions())


def test_layers_that_peft_renames_are_refused_or_left_out() -> None:
    """It reads ``mlp.shared_expert.`` in this model's files as a pattern, and writes ``mlp.shared_experts.`` for it."""
    config = LagunaConfig(
        moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, head_dim=16, **EXPERTS
    )
    model = random_model(config)
    assert not any("shared_experts" in name for name in names(model))
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.shared_experts\.\w+', whose adapter PEFT would"):
        names(model, ["down_proj"])


def gpt2() -> Any:
    """Wide enough that its backward pass sums over more terms than ``LONG_SUM``."""
    return random_model(
        GPT2Config(vocab_size=64, n_embd=192, n_layer=2, n_head=4, n_positions=128, bos_token_id=2, eos_token_id=1)
    )


def test_a_model_of_conv1d_layers_is_trained_as_peft_would(tmp_path: Path) -> None:
    """GPT-2 keeps its weights as [in, out]; PEFT calls that fan_in_fan_out, and warns if a saved adapter does not."""
    runtime = make_runtime(gpt2())
    store, batch = runtime.store, rows(0, 64)
    assert len(store.layers) == 8
    assert {(layer.in_features, layer.out_features) for layer in store.layers} == {
        *((192, 576), (192, 192), (192, 768), (768, 192))
    }
    together = train_pass(runtime)
    for agent in (1, 0):
        alone = train_pass(runtime, (agent,))
        assert torch.equal(alone.logp[0], together.logp[agent])
        assert torch.equal(alone.grad[agent], together.grad[agent])
    adapters.write_adapter(tmp_path, store.layers, store.adapter(0), runtime.lora_config, "")
    theirs = PeftModel.from_pretrained(gpt2(), tmp_path, is_trainable=True).eval()
    with torch.no_grad(), store.routed(Route((0,), None)):
        assert torch.equal(runtime.base.model(batch.ids).logits, theirs(input_ids=batch.ids).logits)
    factors, read = adapters.read_adapter(tmp_path, store.layers)
    assert read.fan_in_fan_out
    assert all(torch.equal(a, b) for pair, own in zip(factors, store.adapter(0)) for a, b in zip(pair, own))
    logp = theirs(input_ids=batch.ids).logits[:, :-1].log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(alone.logp[0] * batch.action_mask, (logp * batch.action_mask).detach())
    (logp * torch.linspace(-1, 1, logp.numel()).view(logp.shape) * batch.action_mask).sum().backward()
    for number, layer in enumerate(store.layers):
        module = theirs.get_submodule(f"base_model.model.{layer.name}")
        for side, bank in zip("AB", store.factor_grads[number]):
            expected = getattr(module, f"lora_{side}")["default"].weight.grad
            torch.testing.assert_close(bank[0], expected, atol=1e-4, rtol=1e-4)


def test_rows_that_no_agent_can_be_told_of_are_an_error() -> None:
    runtime = make_runtime(random_model())
    layer = runtime.base.body.layers[0].mlp.up_proj
    runtime.store.batch_rows = 4
    with (
        runtime.store.routed(Route((0, 1), (2, 2))),
        pytest.raises(EngineError, match=r"6 rows .* of 4"),
    ):
        layer(torch.zeros(6, 64))


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_of_a_multimodal_model_the_text_tower_is_trained(kind: str) -> None:
    model = multimodal(kind)
    assert len(names(model)) == 14
    assert all(".language_model.layers." in n for n in names(model))
    runtime = make_runtime(model)
    runtime.base.check_head()
    found = train_pass(runtime)
    assert (found.grad.abs().sum(dim=1) > 0).all()
    settings = SamplingSettings(4)
    (group,) = runtime.engine.generate([GenerationRequest(0, [3, 4, 5], 2, settings)])
    assert [len(c.token_ids) for c in group if c.finish_reason != "stop"] == [4] * len(
        [c for c in group if c.finish_reason != "stop"]
    )


def test_a_multimodal_model_loads_by_its_folder(tmp_path: Path) -> None:
    multimodal("llava").save_pretrained(tmp_path)
    base = load_base(str(tmp_path))
    assert (type(base.body).__name__, base.num_layers, base.vocabulary_size) == ("LlamaModel", 2, 64)


def test_a_scope_narrows_the_layers() -> None:
    model = multimodal("llava")
    assert names(model, scope="language_model") == names(model)
    only = names(model, scope="language_model.layers.1")
    assert only
    assert all(".layers.1." in n for n in only)
    with pytest.raises(ConfigError, match="lora_target_scope='vision_tower'"):
        names(model, scope="vision_tower")
    runtime = Runtime.for_model(random_model(), options=SharedOptions(lora_target_scope="mlp"))
    assert {layer.name.split(".")[3] for layer in runtime.store.layers} == {"mlp"}


def test_the_head_is_refused_as_a_target() -> None:
    with pytest.raises(ConfigError, match="'lm_head'"):
        names(random_model(), ["lm_head"])


def test_the_model_class_is_that_of_a_causal_model_where_there_is_one(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    assert isinstance(load_base(str(tmp_path)).model, type(AutoModelForCausalLM.from_pretrained(tmp_path)))
