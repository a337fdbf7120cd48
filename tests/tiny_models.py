"""Small random models for tests that need a real forward pass."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

VOCABULARY = 64
EOS, PAD = 1, 0


def qwen2(**changes: Any) -> Qwen2Config:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
    }
    return Qwen2Config(**{**sizes, **changes})


def llama(**changes: Any) -> LlamaConfig:
    sizes = qwen2().to_dict()
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "eos_token_id",
        "pad_token_id",
    )
    return LlamaConfig(**{**{n: sizes[n] for n in names}, "tie_word_embeddings": False, **changes})


def random_model(config: Any = None, seed: int = 0, scale: float = 1.0) -> PreTrainedModel:
    """Build a model with weights large enough that its samples vary; leaves the global generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(qwen2() if config is None else config)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 if p.dim() == 1 else 8.0 * scale)
    return model.eval()
