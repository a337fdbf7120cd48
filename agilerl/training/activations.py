"""What a training forward leaves behind for its backward pass, from the sizes of the model alone."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Widths", "head_bytes", "layer_bytes", "saved_bytes", "working_bytes"]

_NORM_WIDTH = 4
"""Bytes of a number inside a norm, which computes in fp32 whatever the base has."""
_TILE_BYTES = 256 * 2**20
"""Most bytes of a tile of logits where ``fused_logprobs_chunk_rows`` says nothing."""
_TILES = 3
"""Tiles of logits that exist at a time: the product, its log-softmax, the slope."""


@dataclass(frozen=True)
class Widths:
    """Numbers that a token has at the places of a decoder layer."""

    layers: int
    hidden: int
    query: int
    """Query heads times head size."""
    key_value: int
    """Key-value heads times head size."""
    feed_forward: int
    vocabulary: int
    bytes_each: int
    """Of a number in the base's data type."""

    @property
    def kv_bytes(self) -> int:
        """Kappa: bytes of keys and values of one token."""
        return 2 * self.layers * self.key_value * self.bytes_each

    @classmethod
    def of(cls, base: Any) -> "Widths":
        """Return those of a :class:`agilerl.models.base.BaseModel`."""
        config = base.model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or base.hidden_size // heads
        inner = getattr(config, "intermediate_size", None) or 4 * base.hidden_size
        chosen = getattr(config, "num_experts_per_tok", None)
        if chosen:  # of a mixture, a token passes some experts
            inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
        return cls(
            layers=base.num_layers,
            hidden=base.hidden_size,
            query=heads * size,
            key_value=(getattr(config, "num_key_value_heads", None) or heads) * size,
            feed_forward=inner,
            vocabulary=base.vocabulary_size,
            bytes_each=base.dtype.itemsize,
        )


def layer_bytes(widths: Widths) -> int:
    """Return the bytes that one decoder layer saves for a token, counted on Llama's and Qwen's with SDPA.

    Of the hidden width: the inputs of two norms, in fp32, and what they give, which the adapters save in the base's
    type. Of the query's: the rotated query and the attention's output. Key and value. Of the feed-forward width: gate,
    its activation, up, and their product.
    """
    base = 2 * widths.hidden + 2 * widths.query + 2 * widths.key_value + 4 * widths.feed_forward
    return base * widths.bytes_each + 2 * widths.hidden * max(_NORM_WIDTH, widths.bytes_each)


def saved_bytes(widths: Widths, *, checkpointing: bool, offload: bool = False) -> int:
    """Return the bytes of a token that stay on the device from the forward to the backward pass.

    With ``checkpointing`` that is the input of every layer. What is offloaded is not there.
    """
    if offload:
        return 0
    return widths.layers * (widths.hidden * widths.bytes_each if checkpointing else layer_bytes(widths))


def working_bytes(widths: Widths, *, again: bool) -> int:
    """Return the bytes of a token that the backward pass of one layer needs on top.

    Those are gradients at the widest places, the adapters' share in fp32; where a layer is computed ``again``, or
    fetched, also what it had saved.
    """
    gradients = 4 * (widths.feed_forward + widths.hidden) * max(_NORM_WIDTH, widths.bytes_each)
    return gradients + again * layer_bytes(widths)


def head_bytes(widths: Widths, spoken: int, chunk_rows: int | None = None) -> int:
    """Return the bytes of the head over this many action tokens: tiles of logits, and a slope for each token."""
    rows = spoken if chunk_rows is None else min(spoken, chunk_rows)
    tile = rows * widths.vocabulary * 4
    return _TILES * (tile if chunk_rows else min(tile, _TILE_BYTES)) + 3 * spoken * widths.hidden * widths.bytes_each
