"""Operators on adapters: a larger or a smaller rank, several adapters merged into one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agilerl import streams
from agilerl.models.slots import AdapterStore


@torch.no_grad()
def resize(store: AdapterStore, slot: int, rank: int, seed: int) -> float:
    """Change the rank of a slot and keep its delta as far as the rank allows; returns the share of energy retained.

    Growing keeps the function exactly: new rows of A start as PEFT would start them, new columns of B are 0, and the
    new entries' second moment is the tensor's mean (a zero would make their first steps far too large). Shrinking
    keeps the best approximation of B A in the Frobenius norm (Eckart-Young) by QR of both factors and an SVD of the
    small core; Adam's moments cannot be rotated likewise and are reset. The scale of the delta is not touched. A layer
    whose delta is 0 keeps the first rows of A: factors that are both 0 would never learn again.
    """
    old = store.ranks[slot]
    state, steps = store.read(slot), float(store.steps[slot])
    scaling = float(store.scaling[slot])
    if rank > store.max_rank:
        store.widen(rank)
    retained = 1.0
    if rank > old:
        state = {name: [_pad(a, b, rank, name) for a, b in pairs] for name, pairs in state.items()}
        state["theta"] = [(_fresh_rows(a, old, i, seed), b) for i, (a, b) in enumerate(state["theta"])]
    else:
        pairs = [_best_approximation(a, b, rank) for a, b in state["theta"]]
        kept, total = sum(p[2] for p in pairs), sum(p[3] for p in pairs)
        retained = kept / total if total > 0 else 1.0
        state = {"theta": [(a, b) for a, b, _, _ in pairs]}
        store.clear_moments(slot)
        steps = 0.0
    # First, because write takes factors of the declared rank alone.
    store.set_rank(slot, rank, scaling)
    store.write(slot, state)
    store.steps[slot] = steps
    return retained


@torch.no_grad()
def rescale(store: AdapterStore, slot: int, scaling: float) -> None:
    """Give a slot another scale, and B the inverse factor, so that the delta stays the same; Adam's moments follow.

    They become those of the gradient with respect to the new B, which is ``scaling / before`` times the old gradient.
    """
    before = float(store.scaling[slot])
    ratio = before / scaling
    if ratio == 1.0:
        return
    state = store.read(slot)
    powers = {"theta": ratio, "exp_avg": 1 / ratio, "exp_avg_sq": 1 / ratio**2}
    store.write(slot, {name: [(a, b * powers[name]) for a, b in pairs] for name, pairs in state.items()})
    store.set_rank(slot, store.ranks[slot], scaling)


def _pad(a: Tensor, b: Tensor, rank: int, bank: str) -> tuple[Tensor, Tensor]:
    extra = rank - a.shape[0]
    fill_a, fill_b = (float(a.mean()), float(b.mean())) if bank == "exp_avg_sq" else (0.0, 0.0)
    return (
        torch.cat([a, a.new_full((extra, a.shape[1]), fill_a)]),
        torch.cat([b, b.new_full((b.shape[0], extra), fill_b)], dim=1),
    )


def _fresh_rows(a: Tensor, old: int, layer: int, seed: int) -> Tensor:
    count, width = a.shape[0] - old, a.shape[1]
    # The old rank is part of the key, so that each growth draws other rows.
    draw = streams.uniforms(seed, "rank_growth", (layer, old), count * width)
    # In the range of AdapterStore.initialise.
    a[old:] = torch.from_numpy((2 * draw - 1) / width**0.5).view(count, width).to(a.dtype)
    return a


def _best_approximation(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Return A', B' of the given rank and the kept and the total squared singular values of B A."""
    if not b.any():
        return a[:rank].clone(), b[:, :rank].clone(), 0.0, 0.0
    # B A = qb (rb ra') qa', so the singular values are those of the small core in the middle.
    qb, rb = torch.linalg.qr(b.double())
    qa, ra = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    root = s[:rank].sqrt()
    new_a, new_b = (root[:, None] * vt[:rank]) @ qa.T, qb @ (u[:, :rank] * root)
    return new_a.to(a.dtype), new_b.to(b.dtype), float((s[:rank] ** 2).sum()), float((s**2).sum())


# -- several adapters as one: the soup of a run, and a reference that follows -----------------------------------------


@dataclass(frozen=True)
class Part:
    """An adapter that is merged with others."""

    factors: Sequence[tuple[Tensor, Tensor]]
    """Per layer: A ``[r, in]`` and B ``[out, r]``; parts need not agree on r."""
    scaling: float
    """What multiplies B A (alpha / r)."""
    weight: float
    """Its share of the merged delta."""


@torch.no_grad()
def merged(parts: Sequence[Part], rank: int, scaling: float) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Return the adapter of this rank and scale nearest to the weighted sum of the parts' deltas, and its energy.

    A delta is a product, ``scaling * B A``, and any invertible R gives the same one as ``B R^-1`` and ``R A``: averages
    of A and of B mean nothing. So the factors are concatenated, ``[w1 B1, w2 B2] [A1; A2]`` is the exact sum, and QR of
    both with an SVD of the small core gives its best approximation in the Frobenius norm (Eckart-Young). The energy is
    the share of the squared singular values that is kept, over all layers; 1 if the parts' spaces fit into the rank.

    The new rows of A are orthogonal and as long as the parts' are on average, and B holds the singular values, as in an
    adapter that started from PEFT's initialisation: the same learning rate means the same. Rows whose singular value is
    0 are there as well, with a column of zeros in B, and continue to learn.
    """
    layers, kept, total = list[tuple[Tensor, Tensor]](), 0.0, 0.0
    for pairs in zip(*(part.factors for part in parts), strict=True):
        stacked = torch.cat([a.double() for a, _ in pairs])
        # Divided by the new scale, which will multiply the product again.
        columns = [b.double() * (part.weight * part.scaling / scaling) for part, (_, b) in zip(parts, pairs)]
        qb, rb = torch.linalg.qr(torch.cat(columns, dim=1))
        qa, ra = torch.linalg.qr(stacked.T)
        u, s, vt = torch.linalg.svd(rb @ ra.T)
        # Rows that are all 0 leave s = 0, which any length but 0 divides.
        length = float(stacked.square().sum(dim=1).mean().sqrt()) or 1.0
        most = min(rank, len(s))
        a, b = pairs[0]
        new_a, new_b = a.new_zeros((rank, a.shape[1])), b.new_zeros((b.shape[0], rank))
        new_a[:most] = (length * vt[:most] @ qa.T).to(a.dtype)
        new_b[:, :most] = (qb @ (u[:, :most] * (s[:most] / length))).to(b.dtype)
        layers.append((new_a, new_b))
        kept, total = kept + float((s[:most] ** 2).sum()), total + float((s**2).sum())
    return layers, kept / total if total > 0 else 1.0
