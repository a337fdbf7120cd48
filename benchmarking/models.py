"""Every causal architecture of transformers as a tiny random model: trained, sampled, compared, exported and merged.

``python -m benchmarking.models [NAME ...]`` prints a line for each, and writes them into
benchmarking/results/models.json, from which docs/generate_models.py makes docs/models.md. A configuration is the one of
its class with small numbers; what a model computes is computed once more by plain transformers with eager attention,
by plain PEFT, and from the merged files.
"""

import copy
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

import agilerl
from agilerl.cli.after import run_export, run_merge
from agilerl.data import Trajectory, collate
from agilerl.errors import AgileRLError
from agilerl.rollouts import GenerationRequest, SamplingSettings

RESULTS = Path(__file__).resolve().parent / "results" / "models.json"
VOCABULARY, LONGEST = 260, 128
EXACT = 1e-5
"""Largest difference, unless the rounding of a model's own arithmetic is larger."""
SMALL: tuple[tuple[str, int], ...] = (
    (r"vocab_size", VOCABULARY),
    (
        r"^(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|dim|emb(edding)?_(size|dim)|model_dim|hidden_dim)$",
        64,
    ),
    (r"^(input|output)_embedding_size$", 64),
    (r"^(num_hidden_layers|num_layers|n_layers?|n_block|(de|en)coder_layers|depth)$", 2),
    (r"(num_attention_heads|n_heads?|num_heads|attention_heads)$", 4),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads)$", 2),
    (r"head_dim$|^d_kv$|^kv_channels$", 16),
    (r"rotary_dim$", 8),
    (r"^(n_group|topk_group)$|dense_replace$|^num_dense_layers$", 1),
    (r"(num_experts_per_tok|moe_k|top_?k|num_selected_experts)$", 2),
    (r"experts$", 4),
    (r"rank$", 16),
    (r"(ffn_dim|n_inner|d_inner|ffw|mlp_dim)$|_ff$|(intermediate|ffn_hidden)_size", 64),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length)$", LONGEST),
    (r"window(_size)?$|chunk_(size|length)$", 16),
    (r"state_size$|d_state$", 8),
)
"""What the names of numbers look like, and the most that a tiny model has of them; the first that matches counts."""
_ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0, 8.0, 3.0, 9.0, 20.0, 7.0, 2.0, 5.0]}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [64, 64, 96, 64],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minicpm3": {"dim_model_base": 16},
    "nemotron": {"num_key_value_heads": 4},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 48), "attn_layers": ["local", "local"]},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}
"""What the general procedure cannot know."""
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert, not a decoder": ("bert", {"is_decoder": False}),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "llama, dynamic NTK": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, YaRN": ("llama", {"rope_parameters": {"rope_type": "yarn", **_ROPE}}),
    "phi3, LongRoPE": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", **_ROPE, **_FACTORS}, "original_max_position_embeddings": 32},
    ),
    "qwen2, windows of some layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, **_MIXED}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
"""Configurations of an architecture that are computed in another way than its default."""
ROWS = [{"question": "abcdefghij"[: 3 + n % 8] * (1 + n % 5), "answer": "x"} for n in range(40)]


def names() -> list[str]:
    """Return what there is to try."""
    return sorted([*_classes(), *VARIANTS])


def _classes() -> dict[str, Any]:
    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


# -- configurations ----------------------------------------------------------------------------------------------------


def _small(config: Any) -> dict[str, Any]:
    """Return the arguments of a configuration's class with which its numbers are small."""
    fields = getattr(type(config), "__dataclass_fields__", None) or vars(config)
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name not in fields or isinstance(value, bool):
            continue
        if isinstance(value, float) and "softcap" in name:
            changes[name] = 2.0  # small enough to show
        elif isinstance(value, int):
            limit = next((limit for pattern, limit in SMALL if re.search(pattern, name)), value)
            changes |= {name: limit} if value > limit else {}
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "is_decoder": True}
    return changes | {name: value for name, value in ends.items() if name in fields and hasattr(config, name)}


def _attempts(config: Any) -> Iterator[dict[str, Any]]:
    """Yield small arguments, the likeliest first: a layer of each kind, as many key-value heads as others."""
    small = _small(config)
    layers = next((n for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if n in small), None)
    forms: list[dict[str, Any]] = [{}]
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and kinds and all(isinstance(kind, str) for kind in kinds):
            each = list(dict.fromkeys(kinds))
            each *= 2 if len(each) == 1 else 1
            forms.insert(0, {name: each, **({layers: len(each)} if layers else {})})
            break
    forms += [{layers: count} for count in (3, 4, 6, 12) if layers]
    for form in forms:
        for more in ({}, {"num_key_value_heads": 4}, {"head_dim": 16}, {"num_key_value_heads": 4, "head_dim": 16}):
            if all(hasattr(config, name) for name in more):
                yield {**small, **form, **more}


def configuration(name: str) -> Any:
    """Return a tiny configuration that transformers computes; raises what its code raises where there is none."""
    kind, changes = VARIANTS.get(name, (name, {}))
    cls, error = _classes()[kind], None
    config, changes = cls(), {**CHANGES.get(kind, {}), **changes}
    parts = [part for part in cls.sub_configs or {} if isinstance(getattr(config, part, None), PretrainedConfig)]
    nested = "text_config" in parts
    for small in _attempts(config.text_config if nested else config):
        arguments = {part: _small(getattr(config, part)) for part in parts}
        arguments |= {**_small(config), "text_config": small} if nested else {**small, **changes}
        try:
            tiny = cls(**arguments)
            with torch.no_grad():
                AutoModelForCausalLM.from_config(tiny).eval()(input_ids=torch.arange(1, 25)[None], use_cache=False)
            return tiny
        except Exception as failure:  # of any type: from inside the code of a model
            error = error or failure
    assert error is not None
    raise error


def write_base(config: Any, folder: Path) -> None:
    """Write a random model with weights large enough that its samples vary, and a tokenizer of bytes."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    special = ["<pad>", "<eos>", "<bos>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


# -- what becomes of one -----------------------------------------------------------------------------------------------


def _variety(completion: str) -> float:
    return len(set(completion)) / 40


def _with_adapter(model: Any, exported: Path) -> Any:
    """Return a copy of a model with ``alpha / r B A`` added to the weights that the exported files name."""
    adapted, tensors = copy.deepcopy(model), load_file(exported / "adapter_model.safetensors")
    settings = json.loads((exported / "adapter_config.json").read_text())
    for key in (key for key in tensors if ".lora_A." in key):
        module = adapted.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        delta = settings["lora_alpha"] / settings["r"] * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        module.weight.data += delta.T if isinstance(module, Conv1D) else delta
    return adapted


def _logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


def _rounding(model: Any, ids: torch.Tensor, logits: torch.Tensor) -> float:
    """Return how far the logits of transformers itself are from those in fp64; 0 where its code mixes the two types."""
    exact = copy.deepcopy(model).double()
    exact.config.get_text_config()._experts_implementation = "eager"  # others multiply no fp64
    try:
        with torch.no_grad():
            return _apart(exact(input_ids=ids, use_cache=False).logits, logits)
    except Exception:  # of any type: from inside the code of a model
        return 0.0


def _compared(agent: Any, by_hand: Any) -> dict[str, float]:
    """Sample rows on both sides of every window, and compare their log-probs."""
    runtime, lengths = agent.runtime, (4, 10, 24, 40)
    longest = runtime.base.context_length - 1
    prompts = [[3 + (7 * n + i) % 250 for i in range(min(n, longest))] for n in lengths]
    asked = [GenerationRequest(agent.slot, p, 2, SamplingSettings(30), key=(n,)) for n, p in enumerate(prompts)]
    rows = [
        Trajectory(prompt, c.token_ids, [True] * len(c.token_ids), c.logprobs, [0.0])
        for prompt, completions in zip(prompts, runtime.engine.generate(asked))
        for c in completions
    ]
    together = agent.logprobs(collate(rows, 0)).cpu()
    apart = {"sampled and trained": 0.0, "in a batch and alone": 0.0, "sampled and by hand": 0.0}
    for row, logps in zip(rows, together):
        part = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) - 1 + len(row.token_ids))
        sampled, alone = torch.tensor(row.logprobs), agent.logprobs(collate([row], 0)).cpu()[0]
        hand = _logprobs(by_hand, row.prompt_ids, row.token_ids)
        pairs = ((sampled, logps[part]), (logps[part], alone[part]), (sampled, hand))
        apart = {name: max(before, _apart(*pair)) for (name, before), pair in zip(apart.items(), pairs)}
    return apart


def outcome(name: str, folder: Path) -> dict[str, Any]:
    """Return what becomes of an architecture: ``right``, ``refused`` with its sentence, ``wrong`` or ``not tried``.

    ``folder`` is an empty one. Anything else that is raised is a fault of the package.
    """
    try:
        write_base(configuration(name), folder / "base")
    except Exception as error:  # of any type: from inside the code of a model
        return {"outcome": "not tried", "why": f"{type(error).__name__}: {error}".partition("\n")[0][:160]}
    base, run = str(folder / "base"), folder / "run"
    try:
        trained = agilerl.train(
            dataset=ROWS,
            reward=_variety,
            network={"pretrained_model_name_or_path": base, "lora_config": {"r": 4, "lora_alpha": 8}},
            algorithm={"name": "GRPO", "lr": 0.01, "group_size": 4, "batch_size": 16, "max_output_tokens": 24},
            environment={"eval_prompts": 4, "test_prompts": 4, "data_batch_size_per_gpu": 4},
            population=1,
            evolve=[],
            max_tokens=2_000,
            out=run,
            display=False,
        )
    except AgileRLError as error:
        late = any(run.glob("checkpoints/*"))
        why = str(error).replace(base, "FOLDER")
        return {"outcome": "wrong" if late else "refused", "why": why}
    agent, exported, merged = trained.elite, folder / "exported", folder / "merged"
    run_export(run, exported, quiet=True)
    run_merge(run, merged, quiet=True)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    by_hand, ids = _with_adapter(plain, exported), torch.arange(3, 53)[None]
    apart = _compared(agent, by_hand)
    from peft import PeftModel

    peft = PeftModel.from_pretrained(copy.deepcopy(plain), exported).eval()
    loaded = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager").eval()
    with torch.no_grad():
        logits, hand = (
            [m(input_ids=ids, use_cache=False).logits for m in pair] for pair in ((peft, loaded), (by_hand, plain))
        )
    apart |= {"PEFT and by hand": _apart(logits[0], hand[0]), "merged and by hand": _apart(logits[1], hand[0])}
    moved, worst, tolerance = _apart(*hand), max(apart.values()), max(EXACT, 4 * _rounding(by_hand, ids, hand[0]))
    flattens, longest = agent.runtime.base.flattens, agent.runtime.base.context_length
    return {
        "outcome": "right" if worst < min(tolerance, 0.01 * moved) else "wrong",
        **({"tolerance": float(f"{tolerance:.1g}")} if worst >= EXACT else {}),
        "rows": "in one line" if flattens else "padded",
        "longest row": "as configured" if longest >= LONGEST else f"{longest} of {LONGEST}",
        "apart": {pair: float(f"{value:.1g}") for pair, value in apart.items()},
    }


def main(asked: Sequence[str]) -> None:
    """Try some architectures, or all of them, and then write the results."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in asked or names():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = outcome(name, Path(folder))
            except Exception as error:  # what a user would see as a traceback
                results[name] = {"outcome": "wrong", "why": f"{type(error).__name__}: {error}"[:300]}
        print(f"{name}: {json.dumps(results[name])} ({time.perf_counter() - start:.1f} s)", flush=True)
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if asked else {}
    RESULTS.write_text(json.dumps(dict(sorted({**before, **results}.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
