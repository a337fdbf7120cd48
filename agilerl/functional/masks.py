"""Sums, means and whitening over the valid positions of a masked tensor."""

from typing import Any

import torch
from torch import Tensor

ZERO_STD = 1e-6
"""A standard deviation below this is rounding noise and counts as 0."""


def fill_masked(x: Tensor, mask: Tensor | None, value: float = 0.0) -> Tensor:
    """Replace ``x`` where ``mask`` is False; no mask means that every position is valid.

    A NaN at a replaced position reaches neither the value nor the gradient, which ``x * mask`` would not
    give (NaN * 0 = NaN). It has to come before any arithmetic: exp of a NaN that is masked afterwards still
    has a NaN gradient.
    """
    return x if mask is None else torch.where(mask, x, torch.full((), value, dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the valid positions, over one dimension or (None) over all of them.

    On a CPU the terms are added from first to last, so masked positions on the right do not change a bit of the
    result: a row's sum is the same in a batch of any padded length.
    """
    filled = fill_masked(x, mask)
    if dim is not None or x.dim() < 2:
        return ordered_sum(filled, -1 if dim is None else dim)
    return ordered_sum(filled, -1).sum()


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the valid positions, 0 if there are none."""
    count = mask.expand(torch.broadcast_shapes(mask.shape, x.shape))  # type: ignore[no-untyped-call]
    number = count.sum() if dim is None else count.sum(dim)
    return masked_sum(x, mask, dim) / number.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, over: Tensor | None = None) -> Tensor:
    """Return ``(x - mean) * rsqrt(var + 1e-8)`` over all valid positions, 0 elsewhere.

    ``var`` has ddof 1. Values that are all equal (std below 1e-6) give exactly 0, not amplified rounding noise.
    ``shift_mean=False`` adds the mean again. One valid position counts as a variance of 0.

    With ``over`` (bool, like ``mask``) mean and variance are those of its valid positions alone. The other valid ones
    are divided by the same number, but not shifted: a 0 there stays 0.
    """
    inside = mask if over is None else mask & over
    # In fp64: rsqrt(1e-8) multiplies by 1e4 whatever rounding the mean of nearly equal values carries.
    wide = fill_masked(x, mask).double()
    mean = masked_mean(wide, inside)
    centred = fill_masked(wide - mean, inside)
    variance = masked_sum(centred.square(), inside) / (inside.sum() - 1).clamp(min=1)
    scale, equal = torch.rsqrt(variance + 1e-8), variance < ZERO_STD**2
    white = centred * scale
    white = torch.where(equal, torch.zeros_like(white), white)
    white = fill_masked(white if shift_mean else white + mean, inside)
    if over is not None:
        white = torch.where(inside, white, torch.where(equal, wide, wide * scale))
    return white.to(x.dtype)


def top_entropy_mask(entropy: Tensor, mask: Tensor, threshold: float | Tensor) -> Tensor:
    """Keep the valid positions whose entropy (nats) is at least ``threshold``.

    The threshold belongs to the whole optimizer window (a quantile of its valid entropies), so that the choice does
    not depend on the micro-batch. Source: Wang et al., "Beyond the 80/20 Rule", arXiv 2506.01939.
    """
    return mask & (fill_masked(entropy, mask, float("-inf")) >= threshold)


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along ``dim`` in an order that trailing zeros cannot change (on a CPU)."""
    return _OrderedSum.apply(x, dim)  # type: ignore[no-any-return, no-untyped-call]


def spread(x: Tensor, dim: int, size: int) -> Tensor:
    """Repeat ``x`` ``size`` times along a new ``dim``; its gradient is an ordered sum."""
    return _Spread.apply(x, dim, size)  # type: ignore[no-any-return, no-untyped-call]


class _OrderedSum(torch.autograd.Function):
    """Sum with the terms added first to last; the dual of ``_Spread``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.size = dim % x.dim(), x.shape[dim]
        # Tensor.sum adds in an order that depends on the padded length. A scan is sequential on a CPU (with an
        # fp64 accumulator); on a GPU it would be slower and no more exact.
        if x.device.type != "cpu" or not ctx.size:
            return x.sum(dim)
        # A copy, because a view would keep the whole scan in memory.
        return x.cumsum(dim).select(dim, -1).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return spread(grads[0], ctx.dim, ctx.size), None


class _Spread(torch.autograd.Function):
    """Repetition along a new dimension; the dual of ``_OrderedSum``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int) -> Tensor:
        ctx.dim = dim
        return x.unsqueeze(dim).repeat_interleave(size, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ordered_sum(grads[0], ctx.dim), None, None
