"""The options of the shared base: in Python and in manifests, agreed upon by all agents."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, PPO
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import config_of, load_manifest
from agilerl.errors import ConfigError
from agilerl.models.layers import apply_liger_kernels
from agilerl.runtime import Runtime
from agilerl.training.resolved import resolve
from agilerl.training.setup import build
from tests.models.two_agents import make_runtime, train_pass
from tests.tiny_models import PAD, random_model
from tests.training.small_runs import SMALL


def agent(runtime: Runtime, **options: Any) -> GRPO:
    return GRPO(runtime=runtime, pad_token_id=PAD, **options)


@pytest.mark.model
def test_the_first_agent_decides_and_the_others_agree() -> None:
    runtime = Runtime.for_model(random_model())
    first = agent(runtime, fused_logprobs_chunk_rows=32)
    assert runtime.options.fused_logprobs_chunk_rows == 32
    others = [agent(runtime), agent(runtime, fused_logprobs_chunk_rows=32), first.clone()]
    with pytest.raises(ConfigError, match=r"fused_logprobs_chunk_rows=64 .*=32"):
        agent(runtime, fused_logprobs_chunk_rows=64)
    with pytest.raises(ConfigError, match="gradient_checkpointing=True contradicts"):
        PPO(runtime=runtime, pad_token_id=PAD, gradient_checkpointing=True)
    for one in (first, *others):
        one.clean_up()
    agent(runtime, fused_logprobs_chunk_rows=64)  # nobody is left who wanted 32
    assert runtime.options.fused_logprobs_chunk_rows == 64
    agent(runtime, fused_loss_chunk_rows=16)  # the name that AgileRL has beside Liger's loss
    assert runtime.options.fused_logprobs_chunk_rows == 16


@pytest.mark.model
def test_what_the_runtime_was_given_stays() -> None:
    runtime = Runtime.for_model(random_model(), options=SharedOptions(gradient_checkpointing=False))
    with pytest.raises(ConfigError, match="gradient_checkpointing=True contradicts"):
        agent(runtime, gradient_checkpointing=True)


@pytest.mark.model
def test_options_of_loading_are_for_loading() -> None:
    runtime = Runtime.for_model(random_model())
    with pytest.raises(ConfigError, match="lora_target_scope='mlp' contradicts"):
        agent(runtime, lora_target_scope="mlp")
    with pytest.raises(ConfigError, match=r"^model_config "):
        GRPO(actor_network=random_model(), pad_token_id=PAD, model_config={"attn_implementation": "eager"})


@pytest.mark.model
def test_model_config_changes_the_configuration_of_a_model_that_is_loaded() -> None:
    loaded = GRPO(model_name="embedded", model_config={"torch_dtype": "bfloat16", "attn_implementation": "eager"})
    base = loaded.runtime.base
    assert (str(base.dtype), base.model.config._attn_implementation) == ("torch.bfloat16", "eager")
    for overrides, message in (
        ({"rms_norm_epsilon": 3}, r"'rms_norm_epsilon' .* 'rms_norm_eps'"),
        ({"dtype": "int3"}, "'int3' contradicts dtype='auto'"),
    ):
        with pytest.raises(ConfigError, match=message):
            GRPO(model_name="embedded", model_config=overrides)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["flex_attention", "flash_attention_2"])
def test_attention_that_this_machine_has_not_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"attn_implementation='{kind}' .*'sdpa' or 'eager'"):
        make_runtime(random_model(), attn_implementation=kind)


@pytest.mark.model
def test_decoding_uses_sdpa_where_the_attention_takes_no_mask() -> None:
    prompt, found = [{"input_ids": [[3, 4, 5]]}], []
    one = agent(Runtime.for_model(random_model(), seed=1), max_output_tokens=6)
    config = one.runtime.base.model.config
    # Decoding is checked once, with the first; the last cannot be computed here, and is not.
    for kind in ("eager", "sdpa", "flex_attention"):
        config._attn_implementation = kind
        found.append(one.get_action(prompt, training=False).completion_ids[0].tolist())
        assert config._attn_implementation == kind
    assert found[0] == found[1] == found[2]


@pytest.mark.model
def test_eager_attention_and_tiles_of_logits_compute_the_same() -> None:
    expected = train_pass(make_runtime(random_model()))
    assert max(train_pass(make_runtime(random_model(), attn_implementation="eager")).distance(expected)) < 1e-5
    assert train_pass(make_runtime(random_model(), fused_logprobs_chunk_rows=16)).same_bits(expected)


@pytest.mark.model
def test_log_probs_in_the_heads_own_type_are_coarser() -> None:
    fine = train_pass(make_runtime(random_model().bfloat16()))
    coarse = train_pass(make_runtime(random_model().bfloat16(), cast_logprobs_to_fp32=False))
    logp, _ = coarse.distance(fine)
    assert 1e-4 < logp < 0.02


@pytest.mark.model
def test_prompts_are_decoded_in_chunks_to_the_same_tokens() -> None:
    prompts = [{"input_ids": [[3, 4, n]]} for n in range(5, 10)]
    found, sizes = [], []
    for chunk in (None, 2):
        runtime = Runtime.for_model(random_model(), seed=1)
        runtime.base.body.layers[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
        one = agent(runtime, hf_generate_chunk_size=chunk, group_size=16, max_output_tokens=6)
        found.append([ids.tolist() for ids in one.get_action(prompts).completion_ids])
    assert found[0] == found[1]
    assert (sizes[1], sizes[-1]) == (5 * 16, 16)  # the rows of one decoding step


def test_manifests_have_them_under_network() -> None:
    config = load_manifest(None, ["network.gradient_checkpointing=true", "network.quantization_config=nf4"])
    options = resolve(config).options
    assert options.gradient_checkpointing
    assert options.quantization_config is not None
    assert options.quantization_config.bnb_4bit_quant_type == "nf4"
    again = type(config).from_dict(resolve(config).document())
    assert resolve(again).document() == resolve(config).document()
    assert resolve(again).options == options


def test_what_manifests_contradict_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.quantization_config and quantization_config mean the same"):
        config_of({"algorithm": {"quantization_config": "int8"}, "network": {"quantization_config": "nf4"}})
    with pytest.raises(ConfigError, match=r"'algorithm.gradient_checkpoint'.*'network.gradient_checkpointing'"):
        build(load_manifest(None, ["algorithm.gradient_checkpoint=true"]))


@pytest.mark.model
@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("network.gradient_checkpointing=true", "gradient_checkpointing", True),
        ("network.use_sequence_packing=true", "use_sequence_packing", True),
        ("network.attn_implementation=eager", "attn_implementation", "eager"),
        ("network.lora_target_scope=self_attn", "lora_target_scope", "self_attn"),
        ("network.config_overrides={rms_norm_eps: 0.1}", "config_overrides", {"rms_norm_eps": 0.1}),
    ],
)
def test_a_runs_options_reach_its_base(override: str, name: str, value: Any) -> None:
    runtime = build(load_manifest(None, [*SMALL, override])).population.runtime
    assert getattr(runtime.options, name) == value
    assert runtime.base.options == runtime.options


def test_what_was_under_algorithm_is_read_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(
        "algorithm: {name: GRPO, use_vllm: true, vllm_config: {exams: torch}, stop_sequences: null}\n"
        "network: {quantization: nf4, max_context_length: 96}\n"
    )
    overrides = ["network.use_vllm=false", "algorithm.vllm_config.probe_tokens=0", "training.eval_loop=1"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = load_manifest(tmp_path / "old.yaml", overrides)
    sentences = {str(one.message).partition(";")[0].partition(":")[0] for one in said}
    assert sentences == {
        "algorithm.use_vllm is called network.use_vllm now",
        "algorithm.vllm_config is called network.vllm_config now",
        "network.quantization is called network.quantization_config now",
        "training.eval_loop has no meaning here",
    }
    # What the command line says wins over the file, whichever of the two has the earlier name.
    options = resolve(config).options
    assert not options.use_vllm
    assert options.vllm_config is not None
    assert (options.vllm_config.exams, options.vllm_config.probe_tokens) == ("torch", 0)
    assert "stop_sequences" not in options.model_fields_set
    assert config.algorithm == {"name": "GRPO", "max_model_len": 96}
    now = {"network": {"max_context_length": None}, "algorithm": {"use_liger_loss": False, "max_model_len": 1024}}
    with pytest.warns(UserWarning, match=r"algorithm\.use_liger_loss has no meaning here"):
        assert config_of(now).algorithm == {"name": "GRPO", "max_model_len": 1024}


@pytest.mark.processes
def test_the_declaration_needs_no_torch() -> None:
    names = ", ".join(f"agilerl.config.{name}" for name in ("base_model", "vllm", "manifest", "named_files"))
    code = f"import {names}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_ligers_kernels_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, patched = random_model(), []

    def patch(model: Any, *, rope: bool = True, rms_norm: bool = True) -> None:
        patched.append((model, rope, rms_norm))
        transformers_module.Marked = 2

    transformers_module: Any = sys.modules[type(model).__module__]
    monkeypatch.setattr(transformers_module, "Marked", 1, raising=False)
    kernels = ModuleType("liger_kernel.transformers.monkey_patch")
    kernels.MODEL_TYPE_TO_APPLY_LIGER_FN = {model.config.model_type: patch}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    apply_liger_kernels(model, torch.device("cuda"))
    assert patched == [(model, False, True)]
    assert transformers_module.Marked == 1
