"""What a run holds in memory, from the sizes of its model and its batches alone.

``agilerl plan`` adds it up for a layout (:func:`memory`); ``agilerl train`` uses the same formulas on a loaded model.
"""

from collections.abc import Mapping
from math import ceil

from agilerl.training.activations import Widths, head_bytes, saved_bytes
from agilerl.training.roofline import (
    ADAPTER_WIDTH,
    Local,
    ModelShape,
    Split,
    Workload,
    adapter_parameters,
    padded,
    rows_in_flight,
    tokens_in_flight,
)

__all__ = ["bank_bytes", "cache_bytes", "decoding_bytes", "memory", "peak"]

_COPIES = 4
"""Of each adapter: parameters, gradients, two Adam moments."""
_DRAW_BYTES = 28
"""For each token of the vocabulary and each row that is decoded: logits, and the sorted probabilities of a draw."""


def bank_bytes(numbers: int, agents: int, slots: int) -> int:
    """Return the bytes of the adapters of so many agents and of the elite that is kept, ``slots`` each.

    ``numbers`` are those of one adapter, D.
    """
    return (agents + 1) * slots * _COPIES * ADAPTER_WIDTH * numbers


def cache_bytes(widths: Widths, rows: int, length: float) -> int:
    """Return the bytes of keys and values of so many rows of ``length`` tokens."""
    return rows * padded(length) * widths.kv_bytes


def decoding_bytes(widths: Widths, rows: int, length: float) -> int:
    """Return the bytes that the torch engine needs for so many rows in flight: the cache, and drawing a token."""
    return cache_bytes(widths, rows, length) + rows * widths.vocabulary * _DRAW_BYTES


def memory(shape: ModelShape, load: Workload, split: Split | None = None) -> dict[str, float]:
    """Return the bytes on the fullest device. What decoding and training hold takes turns, but for vLLM's share.

    Not in it: the interpreter and its libraries, the CUDA context.
    """
    split = split or Split()
    local = Local.of(load, split)
    rows = local.agents * load.rows * local.share
    exam_rows = local.agents * load.exam_prompts * local.share
    in_flight = min(rows_in_flight(load, local), ceil(max(rows if load.samples else 0, exam_rows)))
    widths, longest = shape.widths, load.prompt + load.longest
    tokens = min(tokens_in_flight(load, local), max(padded(load.length), rows * padded(load.length)))
    spoken = tokens * load.completion / load.length
    saved = saved_bytes(widths, checkpointing=load.checkpointing)
    training = tokens * saved + head_bytes(widths, ceil(spoken))
    parts = {
        "base": shape.weight_bytes - shape.linear_bytes * (1 - 1 / split.shards),
        "adapters": bank_bytes(adapter_parameters(shape, load.rank), local.agents, load.slots),
        "decoding": 0 if split.vllm else decoding_bytes(widths, in_flight, longest),
        "training": training,
        "vllm": 0,
    }
    if split.vllm:
        parts["vllm"] = (shape.weight_bytes + cache_bytes(widths, in_flight, longest)) / split.tensor_parallel
    return {name: float(size) for name, size in parts.items()}


def peak(parts: Mapping[str, float], split: Split | None = None) -> float:
    """Return the most bytes that exist at a time."""
    if split is not None and split.vllm and split.takes_turns:
        return parts["adapters"] + max(parts["vllm"], parts["base"] + parts["training"])
    lasting = sum(size for name, size in parts.items() if name not in ("decoding", "training"))
    return lasting + max(parts["decoding"], parts["training"])
