"""The memory that a training forward saves for its backward pass, from the sizes of the model alone."""

from dataclasses import dataclass
from typing import Any

from agilerl.sizes import PASS_TOKENS, TILE_BYTES

_NORM_WIDTH = 4
"""Bytes of a number inside a norm, which computes in fp32 whatever the base's data type is."""
_TILES = 3
"""Tiles of logits that exist at a time: the product, its log-softmax, the gradient."""
_LEAST_PASS, _LARGEST_PASS = 512, 2**16
"""Tokens of a training forward that is chosen by memory: fewer would read the base's weights too often."""
_CPU_BYTES = 256 * 2**20
"""Saved bytes of a training forward on a CPU."""
_GPU_SHARE = 0.25
"""Share of a GPU's memory that the saved bytes of a training forward take."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How many numbers represent a token at each stage of a decoder layer."""

    layers: int
    hidden: int
    query_width: int
    """Query heads times head size."""
    kv_width: int
    """Key-value heads times head size."""
    feed_forward: int
    """For a mixture of experts: inside the experts that one token passes through."""
    vocabulary: int
    width: float = 4.0
    """w: bytes of a weight, of an activation, and of a key or value."""

    @property
    def kv_bytes(self) -> float:
        """Kappa: bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_width * self.width

    @classmethod
    def of(cls, base: Any, width: float | None = None) -> "Widths":
        """Return the widths of a :class:`agilerl.models.base.BaseModel`; ``width`` None: that of its data type."""
        config = base.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or base.hidden_size // heads)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * base.hidden_size
        chosen = getattr(config, "num_experts_per_tok", None)
        if chosen:
            inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
        return cls(
            layers=base.num_layers,
            hidden=base.hidden_size,
            query_width=heads * size,
            kv_width=int(getattr(config, "num_key_value_heads", None) or heads) * size,
            feed_forward=int(inner),
            vocabulary=base.vocabulary_size,
            width=base.dtype.itemsize if width is None else width,
        )


def layer_bytes(widths: Widths) -> float:
    """Return the bytes that one decoder layer saves for a token, counted on Llama's and Qwen's layers with SDPA.

    Hidden width: the inputs of two norms, in fp32, and their outputs, which the adapters save in the base's type.
    Query width: the rotated query and the attention's output, as the kernel computes it and back in the order of the
    tokens. Key-value width: key and value. Feed-forward width: gate, its activation, up, and their product.
    """
    base = 2 * widths.hidden + 3 * widths.query_width + 2 * widths.kv_width + 4 * widths.feed_forward
    return base * widths.width + 2 * widths.hidden * max(_NORM_WIDTH, widths.width)


def saved_bytes(widths: Widths, *, checkpointing: bool, offload: bool = False) -> float:
    """Return the bytes of a token that stay on the device from the forward to the backward pass.

    With ``checkpointing`` that is the input of every layer; with ``offload`` nothing stays.
    """
    if offload:
        return 0
    return widths.layers * (widths.hidden * widths.width if checkpointing else layer_bytes(widths))


def pass_tokens(widths: Widths, *, checkpointing: bool, memory: float | None = None) -> int:
    """Return how many tokens a training forward has if the user gives no size, an agent's micro-batch as well.

    It depends on the model and on the device's whole ``memory`` in bytes (None: a CPU), never on what is free of it, so
    that a run cuts its batches in the same way whenever it is repeated.
    """
    token = saved_bytes(widths, checkpointing=checkpointing)
    room, most = (_CPU_BYTES, PASS_TOKENS) if memory is None else (_GPU_SHARE * memory, _LARGEST_PASS)
    return int(min(max(room // token, _LEAST_PASS), most))


def working_bytes(widths: Widths, *, restored: bool) -> float:
    """Return the bytes of a token that the backward pass of one layer needs besides.

    Those are the gradients at the widest stages, in fp32 because of the adapters; if the layer's saved tensors are
    ``restored`` (computed again, or fetched from the host), those as well.
    """
    gradients = 4 * (widths.feed_forward + widths.hidden) * max(_NORM_WIDTH, widths.width)
    return gradients + restored * layer_bytes(widths)


def head_bytes(widths: Widths, spoken: int, chunk_rows: int | None = None) -> float:
    """Return the bytes of the head for this many action tokens: tiles of logits, and a gradient for each token."""
    rows = spoken if chunk_rows is None else min(spoken, chunk_rows)
    tile = rows * widths.vocabulary * 4
    return _TILES * (tile if chunk_rows else min(tile, TILE_BYTES)) + 3 * spoken * widths.hidden * widths.width
