"""Bases in 4 and 8 bits under the stacked adapters."""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agilerl.algorithms import GRPO
from agilerl.algorithms.forward import forward
from agilerl.checks.validation import validated
from agilerl.config.base_model import QuantizationConfig, SharedOptions
from agilerl.errors import ConfigError
from agilerl.models import adapters
from agilerl.models.base import load_base
from agilerl.models.quantised import dequantise_
from agilerl.models.slots import Route
from agilerl.runtime import Runtime
from tests.models.two_agents import make_runtime, parts, rows, train_pass
from tests.tiny_models import PAD, llama, qwen2, random_model

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="the package bitsandbytes is not installed; make setup installs it"
)
pytestmark = pytest.mark.model

KINDS = ("nf4", "fp4", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    random_model(qwen2()).save_pretrained(path)
    return path


def load(folder: Path, quantization: Any) -> Any:
    return load_base(str(folder), options=SharedOptions(quantization_config=quantization)).model


@pytest.mark.parametrize("kind", ["nf4", "fp4", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}])
def test_four_bits_compute_what_their_dequantised_weights_do(kind: Any, folder: Path) -> None:
    quantised = train_pass(make_runtime(load(folder, kind)))
    dense = train_pass(make_runtime(dequantise_(load(folder, kind))))
    original = train_pass(make_runtime(load(folder, None)))
    assert max(quantised.distance(dense)) < 1e-6
    assert min(original.distance(dense)) > 1e-2  # the weights did lose something


def test_eight_bits_compute_what_their_dequantised_weights_do_but_for_the_rounding_of_inputs(folder: Path) -> None:
    """LLM.int8() rounds each row of the inputs to 8 bits as well, half a step of 1/127 at most."""
    quantised = train_pass(make_runtime(load(folder, "int8")))
    dense = train_pass(make_runtime(dequantise_(load(folder, "int8"))))
    logp, grad = quantised.distance(dense)
    assert 0 < logp < 0.05
    assert 0 < grad < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_agents_bits_do_not_depend_on_the_others(kind: str, folder: Path) -> None:
    runtime = make_runtime(load(folder, kind))
    together = train_pass(runtime)
    for agent in (0, 1):
        alone = train_pass(runtime, (agent,))
        assert torch.equal(alone.logp[0], together.logp[agent])
        assert torch.equal(alone.grad[agent], together.grad[agent])


def test_outlier_columns_of_the_whole_batch_do_reach_the_other_agents(folder: Path) -> None:
    """Why ``int8`` has the threshold 0: with LLM.int8()'s own one, 6, an agent's numbers depend on its neighbours."""
    with pytest.warns(UserWarning, match="llm_int8_threshold=6"):
        runtime = make_runtime(load(folder, {"load_in_8bit": True}))
    together = train_pass(runtime)
    assert any(not torch.equal(train_pass(runtime, (agent,)).logp[0], together.logp[agent]) for agent in (0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_and_the_embeddings_keep_their_type_and_all_is_counted(kind: str, folder: Path) -> None:
    runtime = make_runtime(load(folder, kind))
    base, plain = runtime.base, make_runtime(load(folder, None)).base
    assert base.model.lm_head.weight.dtype == base.model.get_input_embeddings().weight.dtype == torch.float32
    assert base.parameters == plain.parameters
    linear = sum(layer.in_features * layer.out_features for layer in runtime.store.layers)
    saved = plain.weight_bytes - base.weight_bytes
    bits = {"nf4": 4, "fp4": 4, "int8": 8}[kind]
    assert saved == pytest.approx(linear * (4 - bits / 8), rel=0.1)  # the scales are the rest
    assert base.quantisation is not None


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_same_on_the_quantised_base(kind: str, folder: Path, tmp_path: Path) -> None:
    runtime = make_runtime(load(folder, kind))
    store, ids = runtime.store, rows(0, runtime.base.vocabulary_size).ids
    adapters.write_adapter(tmp_path, store.layers, store.adapter(1), _config(runtime), str(folder))
    with torch.no_grad(), runtime.store.routed(_only(1)):
        ours = runtime.base.logits(runtime.base.hidden(ids))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(load(folder, kind), tmp_path)
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)


def _only(slot: int) -> Route:
    return Route((slot,), None)


def _config(runtime: Runtime) -> Any:
    config = copy.deepcopy(runtime.lora_config)
    config.base_model_name_or_path = ""
    return config


def test_a_merge_into_dequantised_weights_is_exact(folder: Path, tmp_path: Path) -> None:
    runtime = make_runtime(load(folder, "nf4"))
    store, ids = runtime.store, rows(0, runtime.base.vocabulary_size).ids
    adapters.write_adapter(tmp_path, store.layers, store.adapter(0), _config(runtime), str(folder))
    with torch.no_grad(), store.routed(_only(0)):
        ours = runtime.base.logits(runtime.base.hidden(ids))
    merged = PeftModel.from_pretrained(dequantise_(load(folder, "nf4")), tmp_path).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(ours, merged(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_samples_and_learns(kind: str, folder: Path) -> None:
    base = load_base(str(folder), options=SharedOptions(quantization_config=kind))
    agent = GRPO(runtime=Runtime(base), pad_token_id=PAD, group_size=4, batch_size=8, lr=1e-2, max_output_tokens=8)
    before = agent.runtime.store.theta[agent.slot].clone()
    actions = agent.get_action([{"input_ids": torch.tensor([[5, 6, 7]])}])
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5]])
    metrics = agent.learn((actions.completion_ids, actions.action_masks, rewards))
    assert torch.isfinite(torch.tensor(metrics["mean_loss"]))
    assert not torch.equal(agent.runtime.store.theta[agent.slot], before)


def test_a_model_that_has_lost_its_gradients_is_refused(folder: Path) -> None:
    """4-bit weights are laid out anew for forwards without gradients on some CPUs; autograd cannot see through that."""
    if not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("bitsandbytes does so on CPUs with AVX512-BF16 alone")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="float32").eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[4, 5, 6]]))
    with pytest.raises(ConfigError, match=r"4-bit .*load it again"):
        Runtime.for_model(model)


def test_our_own_forwards_without_gradients_cost_none(folder: Path) -> None:
    runtime = make_runtime(load(folder, "nf4"))
    expected = train_pass(runtime)
    with torch.no_grad():
        forward(runtime, parts(runtime))
    assert train_pass(runtime).same_bits(expected)
    assert expected.grad[:, : runtime.store.offsets[0][1]].any()  # reaches the first layer


def test_without_bitsandbytes_the_sentence_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*pip install 'lora-evolution\[quantization\]'"):
        load(folder, "nf4")


def test_the_three_ways_to_say_it_are_one() -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    said = SharedOptions(quantization_config=config).quantization_config
    assert said == SharedOptions(quantization_config=config.to_dict()).quantization_config
    short = SharedOptions(quantization_config="nf4").quantization_config
    assert isinstance(said, QuantizationConfig)
    assert short == said.model_copy(update={"bnb_4bit_compute_dtype": None})


def test_what_is_wrong_is_said(folder: Path) -> None:
    for value, message in (
        ("int3", "expected nf4, fp4, int8"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit=True and load_in_8bit"),
        ({"load_in_4bits": True}, "'load_in_4bit'"),
    ):
        with pytest.raises(ConfigError, match=message):
            validated(SharedOptions, {"quantization_config": value})
    plain = random_model()
    with pytest.raises(ConfigError, match=r"nf4.*from_pretrained"):
        GRPO(actor_network=plain, pad_token_id=PAD, quantization_config="nf4")
    with pytest.raises(ConfigError, match=r"nf4.*int8"):
        GRPO(actor_network=load(folder, "int8"), pad_token_id=PAD, quantization_config="nf4")


def test_a_model_that_the_user_loaded_in_four_bits_is_taken_as_it_is(folder: Path) -> None:
    model = load(folder, "nf4")
    agent = GRPO(actor_network=model, pad_token_id=PAD, quantization_config="nf4")
    assert agent.runtime.base.quantisation is not None


def test_modules_that_are_skipped_keep_their_type_and_so_does_the_head(folder: Path) -> None:
    model = load(folder, {"load_in_4bit": True, "llm_int8_skip_modules": ["q_proj"]})
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.dtype == model.lm_head.weight.dtype == torch.float32
    assert attention.k_proj.weight.dtype == torch.uint8


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    random_model(llama()).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype="float32")
    with pytest.raises(ConfigError, match=r"skip_modules=\['lm_head'\]"):
        Runtime.for_model(model)
