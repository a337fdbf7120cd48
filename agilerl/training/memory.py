"""What a run needs in memory, estimated before it starts, and whether the machine has it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from agilerl.algorithms import ALGORITHMS
from agilerl.data.batch import padded_length
from agilerl.envs.core import Split
from agilerl.errors import ConfigError
from agilerl.models.slots import LinearShape
from agilerl.population import Population
from agilerl.training.config import RunConfig

__all__ = ["adapter_bytes", "available_bytes", "check_memory", "check_weights", "estimate"]

_COPIES = 4
"""Of each adapter: parameters, gradients, two Adam moments."""
_TOKEN_BYTES, _ROW_BYTES = 100, 2000
"""A sampled token and a completion as Python objects, and as tensors of a batch."""
_PANELS: tuple[Split, ...] = ("exam", "test")
_SHARE = 0.8
"""Of the memory, for a run: the rest is for the system, the libraries, and copies that last a moment."""
_CURES = {
    "base": "choose a smaller network.pretrained_model_name_or_path, or training.dtype=bfloat16",
    "adapters": "lower training.pop_size, network.lora_config.r or mutation.rank_range",
    "decode_cache": "lower training.max_rows_in_flight or algorithm.max_output_tokens",
    "training_activations": "lower training.max_tokens_in_flight",
    "rollouts": "lower environment.data_batch_size_per_gpu, algorithm.group_size or training.pop_size",
}


def adapter_bytes(config: RunConfig, layers: Sequence[LinearShape]) -> int:
    """Return the bytes of the slots of the population and its elite, at the largest rank they may get.

    An agent has one slot, one more for a critic, and one more for a reference policy of its own.
    """
    rank = config.network.lora_config.r
    if config.mutation.probabilities.arch_mut > 0:
        rank = max(rank, config.mutation.rank_range[1])
    size = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    name = config.algorithm["name"]
    own = ALGORITHMS[name].trained_slots if name in ALGORITHMS else 1  # a choice is among algorithms without critic
    slots = (config.training.pop_size + 1) * (own + (config.network.adapter is not None))
    return slots * _COPIES * size * torch.float32.itemsize


def estimate(config: RunConfig, population: Population) -> dict[str, int]:
    """Return the bytes of each part that grows with the settings; the interpreter and its libraries come on top."""
    base = population.runtime.base
    model = base.model.config.get_text_config()
    limit, source = population.context_length, population.source
    row = max(source.row_length(split, population.eval_max_new_tokens or limit, limit) for split in _PANELS)
    rows = sum(population.prompts_per_step * a.config.group_size for a in population.agents)  # type: ignore[attr-defined]
    exam_rows = len(population) * config.environment.eval_prompts
    in_flight = min(config.training.max_rows_in_flight, max(rows, exam_rows))
    length = padded_length(row)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or base.hidden_size // model.num_attention_heads
    feed_forward = getattr(model, "intermediate_size", None) or 4 * base.hidden_size
    width = base.dtype.itemsize
    # Saved for backward per token and layer: about 12 vectors of the hidden and 4 of the feed-forward width.
    per_token = base.num_layers * (12 * base.hidden_size + 4 * feed_forward) * width
    return {
        "base": base.weight_bytes,
        "adapters": adapter_bytes(config, population.runtime.store.layers),
        "decode_cache": in_flight * length * base.num_layers * 2 * heads * head_size * width,
        "training_activations": min(population.runtime.max_tokens, rows * length) * per_token,
        "rollouts": rows * (_ROW_BYTES + row * _TOKEN_BYTES),
    }


def check_memory(parts: Mapping[str, int], device: str) -> None:
    """Raise ConfigError when the parts together need more than the device, or for rollouts the machine, has."""
    groups = [list(parts)] if device == "cpu" else [[n for n in parts if n != "rollouts"], ["rollouts"]]
    for place, names in zip((device, "cpu"), groups):
        sizes = {name: parts[name] for name in names if name in parts}
        needed, there = sum(sizes.values()), available_bytes(place)
        if there is not None and needed > _SHARE * there:
            largest = max(sizes, key=lambda name: sizes[name])
            raise ConfigError(
                f"this run needs about {_gib(needed)} of memory, most of it for {largest.replace('_', ' ')} "
                f"({_gib(sizes[largest])}), and {place} has {_gib(there)}; {_CURES[largest]}"
            )


def check_weights(name: str, device: str) -> None:
    """Raise ConfigError when the weights in a local folder alone are larger than the memory."""
    folder = Path(name).expanduser()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    check_memory({"base": size}, device)


def available_bytes(device: str) -> int | None:
    """Return the memory of a device, for the CPU what the machine or its container allows; None where unknown."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [_container_limit()]
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        limits.append(None)
    return min((limit for limit in limits if limit), default=None)


def _container_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
