"""The kernels that compute the base, attention and Liger's, and whether this machine has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from agilerl.config.base_model import AttentionKind
from agilerl.errors import ConfigError, how_to_install

_FLASH = ("flash_attention_2", "flash_attention_3")


def choose_attention(model: Any, kind: AttentionKind | None, device: torch.device) -> None:
    """Set a model's attention kernel; None keeps the current one. Raises ConfigError if it is not available here."""
    if kind is None or kind == getattr(model.config, "_attn_implementation", None):
        return
    if device.type != "cuda" and kind in ("flex_attention", *_FLASH):
        raise ConfigError(
            f"attn_implementation={kind!r} needs a CUDA device for its backward pass, found {device.type}; use 'sdpa' "
            "or 'eager'"
        )
    try:
        model.set_attn_implementation(kind)
    except (ImportError, ValueError, RuntimeError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"attn_implementation={kind!r} is not available here: {first}; use 'sdpa'") from error


@contextmanager
def decoding_attention(config: Any) -> Iterator[None]:
    """Use SDPA while rows of different lengths are decoded: the other kernels do not accept our mask."""
    before = config._attn_implementation
    if before in ("eager", None):
        yield
        return
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""``(query, key, value, mask, scale)``, the first three ``[rows, heads, n, d]`` -> answers ``[rows, n, heads, d]``."""


def asking(mask: Tensor, attend: Attend) -> Tensor:
    """Return a mask ``[..., ..., ..., ...]`` that makes SDPA layers which are given it attend by ``attend``.

    The mask says how, not a setting of the model, so that a layer that is computed again in the backward pass does the
    same again, and other models of the process go on as before. Models pass masks of four dimensions on as they are.
    """
    _let_masks_decide()
    mask._attend = attend  # type: ignore[attr-defined]
    return mask


@cache
def _let_masks_decide() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sdpa(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        attend = getattr(attention_mask, "_attend", None)
        if attend is None or options.get("position_bias") is not None:
            return usual(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        return attend(query, key, value, attention_mask, options.get("scaling")), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


def attend_decoding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with one query a row, ``[rows, heads, 1, d]``, to keys ``[rows, shared, length, d]``.

    The query heads of one key-value head become further queries of it: the same products, summed by the same kernel,
    without the copy of keys and values to every query head that transformers makes whenever there is a mask, for each
    layer and token.
    """
    rows, heads, _, width = query.shape
    shared = key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, width), key, value, attn_mask=mask, scale=scale
    )
    return found.reshape(rows, 1, heads, value.shape[3])


def attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return answers of ``q [n, heads, s, d]`` over some of its keys, and the logarithm of their weights' sum.

    Answers over other keys can be joined to them: each counts by its sum. ``mask`` is added to the scores.
    """
    if q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        options = {"attn_mask": mask, "scale": scale}
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)  # type: ignore[no-any-return]
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores if mask is None else scores + mask
    weight = scores.logsumexp(-1)
    return (scores - weight[..., None]).exp().to(v.dtype) @ v, weight


def apply_liger_kernels(model: Any, device: torch.device) -> None:
    """Let Liger's Triton kernels compute RMSNorm, rotary embeddings and SwiGLU of one model.

    Raises ConfigError without a CUDA device, without liger-kernel, and for a model that Liger does not support.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"use_liger_kernel=True needs a CUDA device, found {device.type}: Liger's kernels are written in Triton; "
            "leave it out here"
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            "use_liger_kernel=True needs liger-kernel with triton, which is not installed: " + how_to_install("liger")
        ) from error
    kind = model.config.get_text_config().model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"use_liger_kernel=True: Liger has no kernels for a {kind!r} model; leave it out, or use one of "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)[:8])}, ..."
        )
    from inspect import signature

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    # Liger's head and loss stay off: they would compute logits for a whole batch, and of one agent only.
    off = ("cross_entropy", "fused_linear_cross_entropy")
    patch(model=model, **{name: False for name in off if name in signature(patch).parameters})
