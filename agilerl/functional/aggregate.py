"""From a loss per token to one number, with a denominator that is fixed for the whole optimizer window."""

from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor

from agilerl.functional.masks import masked_mean, masked_sum

LossNorm = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"]

LOSS_NORM_ALIASES: Mapping[str, LossNorm] = {
    "micro_batch": "seq-mean-token-mean",
    "accumulation_window": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "sequence-mean-token-sum": "seq-mean-token-sum",
}
"""Other documented names of the aggregation modes."""


def aggregate(loss: Tensor, mask: Tensor, mode: LossNorm, denominator: float | Tensor) -> Tensor:
    """Return ``sum_i row_i / denominator``: the part of the window's loss that these rows contribute.

    | mode | row_i | denominator (``normaliser``) | source |
    |---|---|---|---|
    | seq-mean-token-mean | mean over valid tokens | sequences | GRPO, arXiv 2402.03300 |
    | token-mean | sum over valid tokens | valid tokens | DAPO, arXiv 2503.14476 |
    | seq-mean-token-sum | sum over valid tokens | sequences | RLOO, arXiv 2402.14740 |
    | fixed-length | sum over valid tokens | sequences * max_length | Dr.GRPO, arXiv 2503.20783 |

    ``loss`` and ``mask`` are ``[B, L]``. The denominator counts the whole window, so the parts of any split into
    micro-batches add up to the same loss and gradient. It is a number, or ``[B]`` if the rows belong to agents with
    different windows. A denominator of 0 (a window without valid tokens) gives 0.
    """
    rows = aggregate_rows(loss, mask, mode)
    limit = _as_tensor_like(denominator, rows)
    return (rows / limit.masked_fill(limit == 0, 1.0)).sum()


def aggregate_rows(loss: Tensor, mask: Tensor, mode: LossNorm) -> Tensor:
    """Return each row's term ``[B]`` before the denominator; 0 for a row without a valid token."""
    _check_mode(mode)
    return masked_mean(loss, mask, -1) if mode == "seq-mean-token-mean" else masked_sum(loss, mask, -1)


def normaliser(mask: Tensor, mode: LossNorm, *, max_length: int | None = None) -> float:
    """Return the denominator that belongs to ``mode`` and to the mask ``[B, L]`` of a whole optimizer window.

    It is additive: the sum over micro-batches or ranks is the value of all their rows together. Rows without a valid
    token count as sequences. ``fixed-length`` needs ``max_length``, the longest completion that can be sampled, in
    tokens; without it ValueError is raised.
    """
    _check_mode(mode)
    if mode == "token-mean":
        return float(mask.sum())
    if mode != "fixed-length":
        return float(mask.shape[0])
    if max_length is None or max_length < 1:
        raise ValueError(f"fixed-length aggregation needs max_length of at least 1 token, found {max_length}")
    return float(mask.shape[0] * max_length)


def _as_tensor_like(value: float | Tensor, like: Tensor) -> Tensor:
    """Give a number or tensor the dtype and device of ``like``, so that both divide with the same arithmetic."""
    return value.detach().to(like) if isinstance(value, Tensor) else like.new_tensor(value)


def _check_mode(mode: str) -> None:
    if mode not in get_args(LossNorm):
        raise ValueError(f"loss_norm must be one of {', '.join(get_args(LossNorm))}, found {mode!r}")
