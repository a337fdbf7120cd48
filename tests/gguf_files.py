"""Small GGUF files, as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.tiny_models import llama, random_model

TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}<|end|>"
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TOKENS = [*SPECIAL, *(bytes_to_unicode()[byte] for byte in range(256)), "ab"]
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    "<end>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581",
    "a",
    "b",
    "\u2581a",
    "ab",
]
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "lm_head": "output",
}


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """Return a random Llama for the tokens of these files."""
    return random_model(llama(**{"vocab_size": len(TOKENS), "rms_norm_eps": 1e-5, **changes}), scale=0.2)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    template: str | None = TEMPLATE,
    pieces: bool = False,
    **settings: Any,
) -> Path:
    """Write a Llama with a tokenizer of bytes, or of SentencePiece's pieces; ``kind`` is the type of its matrices.

    ``settings`` are calls of the writer: ``add_bos_token=True`` is ``add_add_bos_token(True)``.
    """
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if pieces:
        settings = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, **settings}
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([0.0] * 260 + [-float(number) for number in range(len(PIECES) - 260)])
        kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256]
        writer.add_token_types(kinds + [TokenType.NORMAL] * (len(PIECES) - len(kinds)))
    else:
        settings = {"tokenizer_pre": "default", "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, **settings}
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(["a b"])
    if template is not None:
        writer.add_chat_template(template)
    for name, value in settings.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        for heads, projection in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if projection in name:  # llama.cpp rotates neighbours, transformers halves
                values = values.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        wanted = GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(values), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
