"""Token log-probabilities, from logits or fused with the language-model head."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl.sizes import CPU_ROWS, TILE_BYTES

MAX_CPU_ROWS = 128
"""Most rows of a matrix product on a CPU: from about 150 rows, kernels block long sums in another way."""


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return ``log softmax(logits / temperature)[ids]``, shape of ``ids``, in fp32 (fp64 stays fp64).

    ``logits [..., V]``, ``ids [...]`` int64, ``temperature`` a number or one value per position.
    """
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the entropy of ``softmax(logits / temperature)`` in nats, ``[...]`` from ``[..., V]``, differentiable."""
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logp.exp() * _finite(logp)).sum(-1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_rows: int | None = None,
    entropy: bool = False,
    wide: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs ``[M]`` of ``targets`` and, if asked, entropies ``[M]``, without ever storing ``[M, V]``.

    Logits are ``cap(scale * (hidden @ weight.T + bias)) / temperature`` with ``cap(z) = softcap * tanh(z / softcap)``.
    The product runs in the dtype of ``weight``, everything after it in fp32 (fp64 stays fp64), or in the same dtype
    if ``wide`` is False. The head is frozen: both outputs are differentiable with respect to ``hidden`` only.

    Shapes: ``hidden [M, H]``, ``weight [V, H]``, ``targets [M]`` int64, ``bias [V]``, ``temperature`` a positive number
    or ``[M]``. ``chunk_rows`` is the most rows of logits that exist at a time (at least 16; None: 256 MB of fp32).
    Raises ValueError if shapes or settings do not fit, or if the head requires a gradient.

    On one CPU thread a row's bits, values and gradients, depend neither on the other rows nor on ``chunk_rows``.
    A row whose incoming gradient is exactly 0 gives a gradient of exactly 0, even if its hidden state is NaN.
    """
    _check(hidden, weight, targets, chunk_rows)
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("the fused head is for frozen weights; call requires_grad_(False), or use token_logprobs")
    if isinstance(temperature, float | int):
        if temperature <= 0:
            raise ValueError(f"temperature must be greater than 0, found {temperature}")
        temperature = torch.full((), float(temperature), dtype=torch.float64)
    # One value a row in every case, so that one agent alone and a batch of agents do the same arithmetic.
    dtype = _wide(weight.dtype) if wide else weight.dtype
    rows_temperature = temperature.detach().to(hidden.device, dtype).expand(hidden.shape[0])
    rows = max(chunk_rows or TILE_BYTES // (4 * weight.shape[0]), CPU_ROWS)
    jacobian = torch.is_grad_enabled() and hidden.requires_grad
    head = _Head(weight, bias, softcap, float(scale), rows, entropy, jacobian)
    logp, entropies = _LinearLogProbs.apply(hidden, targets, rows_temperature, head)  # type: ignore[no-untyped-call]
    return logp, entropies if entropy else None


@torch.no_grad()
def linear_collision_entropy(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_rows: int | None = None,
    wide: bool = True,
) -> Tensor:
    """Return ``-log sum_v p(v)^2`` ``[M]`` in nats, without gradient: the Renyi entropy of order 2 of each position.

    p is the distribution of :func:`linear_logprobs` with the same settings, ``temperature`` is ``[M]``, and what is
    said there about a row's bits holds here.
    """
    temperature = temperature.to(hidden.device, _wide(weight.dtype) if wide else weight.dtype)
    rows = max(chunk_rows or TILE_BYTES // (4 * weight.shape[0]), CPU_ROWS)
    head = _Head(weight, bias, softcap, float(scale), rows, entropy=False, jacobian=False)
    entropies = torch.empty_like(temperature)
    for part in _tiles(len(hidden), rows):
        # As a logsumexp, because the squares of small probabilities would underflow.
        entropies[part] = -torch.logsumexp(2 * _tile(hidden, temperature, part, head)[0], dim=-1)
    return entropies


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float
    rows: int
    entropy: bool
    jacobian: bool


class _LinearLogProbs(torch.autograd.Function):
    """Head, log-softmax and gather over tiles of rows.

    A row's log-prob is one number, so its gradient is one vector ``[H]``: forward takes it while the tile of logits
    exists, and backward only scales it. The entropy's is recomputed, since it is rarely needed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, temperature: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        logp = torch.empty_like(temperature, memory_format=torch.contiguous_format)
        entropies = torch.empty_like(logp) if head.entropy else logp.new_zeros(0)
        slopes = torch.empty_like(hidden, dtype=head.weight.dtype) if head.jacobian else hidden.new_zeros(0)
        for part in _tiles(hidden.shape[0], head.rows):
            tile, factor = _tile(hidden, temperature, part, head)
            logp[part] = tile.gather(-1, targets[part, None]).squeeze(-1)
            if not (head.entropy or head.jacobian):
                continue
            probabilities = tile.exp()
            if head.entropy:
                entropies[part] = -(probabilities * _finite(tile)).sum(-1)
            if head.jacobian:
                # d log p_target / d logit_j = 1[j = target] - p_j
                # In place to save a tile of memory; so after the entropy, which reads the probabilities.
                slope = probabilities.neg_()
                slope.scatter_add_(1, targets[part, None], torch.ones_like(slope[:, :1]))
                slopes[part] = _matmul(slope.mul_(factor).to(head.weight.dtype), head.weight)
        ctx.save_for_backward(hidden, temperature, entropies, slopes)
        ctx.head = head
        # An output that nobody uses gets None instead of zeros, which saves the entropy's second pass.
        ctx.set_materialize_grads(False)
        if not head.entropy:
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        hidden, temperature, entropies, slopes = ctx.saved_tensors
        head: _Head = ctx.head
        # Both parts are added in the wide type, and rounded to that of the hidden states once.
        grad = torch.zeros_like(hidden, dtype=temperature.dtype)
        if grad_logp is not None:
            grad += _row_scaled(slopes.to(grad.dtype), grad_logp)
        if grad_entropy is not None and head.entropy:
            for part in _tiles(hidden.shape[0], head.rows):
                tile, factor = _tile(hidden, temperature, part, head)
                # d H / d logit_j = -p_j (log p_j + H)
                # _finite copies the tile, so that exp_ may overwrite it.
                slope = _finite(tile).add_(entropies[part, None]).mul_(tile.exp_()).neg_().mul_(factor)
                rows = _matmul(slope.to(head.weight.dtype), head.weight).to(grad.dtype)
                grad[part] += _row_scaled(rows, grad_entropy[part])
        return grad.to(hidden.dtype), None, None, None


def _tile(hidden: Tensor, temperature: Tensor, part: slice, head: _Head) -> tuple[Tensor, Tensor]:
    """Return log-probs ``[R, V]`` and the factor, ``[R, 1]`` or ``[R, V]``, between gradients of logits and product."""
    logits = _matmul(hidden[part].to(head.weight.dtype), head.weight.T).to(temperature.dtype)
    if head.bias is not None:
        logits.add_(head.bias)
    logits.mul_(head.scale)
    factor = head.scale / temperature[part, None]
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        # d softcap tanh(z / softcap) / dz = 1 - tanh^2; the logits are the tanh between these two lines.
        factor = factor * (1 - logits.square())
        logits.mul_(head.softcap)
    return torch.log_softmax(logits.div_(temperature[part, None]), dim=-1), factor


def _row_scaled(rows: Tensor, factors: Tensor) -> Tensor:
    factors = factors.unsqueeze(-1)
    return (rows * factors).masked_fill(factors == 0, 0.0)  # 0 times NaN is NaN


def _matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return ``rows @ matrix``; on a CPU in blocks in which the bits of a row do not depend on the other rows."""
    if rows.device.type != "cpu":
        return rows @ matrix
    out = rows.new_empty(rows.shape[0], matrix.shape[1])
    for block, target in zip(torch.split(rows, MAX_CPU_ROWS), torch.split(out, MAX_CPU_ROWS)):
        missing = -len(block) % CPU_ROWS
        if missing:
            target.copy_((F.pad(block, (0, 0, 0, missing)) @ matrix)[: len(block)])
        else:
            torch.mm(block, matrix, out=target)
    return out


def _tiles(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.unsqueeze(-1)
    return logits.to(_wide(logits.dtype)) / temperature


def _finite(logp: Tensor) -> Tensor:
    """Replace -inf (a token that cannot be drawn) by a finite number, so that 0 * log 0 is 0 and not NaN."""
    return logp.clamp(min=torch.finfo(logp.dtype).min)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [M, H] and weight [V, H], found {list(hidden.shape)} and {list(weight.shape)}; "
            "flatten the tokens into one dimension"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected one target per row, found targets {list(targets.shape)} for {hidden.shape[0]} rows")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1 or None (automatic), found {chunk_rows}")
