"""Mutations of the adapter: noise on its weights, a larger or a smaller rank."""

import torch
from torch import Tensor

from agilerl import streams
from agilerl.models.slots import AdapterStore


@torch.no_grad()
def add_noise(store: AdapterStore, slot: int, share: float, seed: int, key: tuple[int, ...]) -> None:
    """Perturb each layer's delta by Gaussian noise on B whose product with A has norm ``share * ||B A||``.

    Noise on B is enough: A spans the same directions, and a new adapter (B = 0, delta 0) stays unchanged, as it should
    under a relative perturbation. Adam's moments are kept.
    """
    factors = []
    for i, (a, b) in enumerate(store.adapter(slot)):
        draw = streams.normal(seed, "parameter_noise", (*key, i), b.numel())
        noise = torch.from_numpy(draw).view(b.shape).to(dtype=b.dtype, device=b.device)
        size, unit = _norm(b, a), _norm(noise, a)
        factors.append((a, b + noise * torch.where(unit > 0, share * size / unit, 0.0).to(b.dtype)))
    store.load_adapter(slot, factors)


def _norm(b: Tensor, a: Tensor) -> Tensor:
    """Return the Frobenius norm of B A in fp64, from two matrices of its rank: |B A|^2 = sum (B'B) (A A')."""
    b, a = b.double(), a.double()
    return ((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt()


@torch.no_grad()
def resize(store: AdapterStore, slot: int, rank: int, seed: int) -> float:
    """Change the rank of a slot and keep its delta as far as the rank allows; returns the share of energy retained.

    Growing keeps the function exactly: new rows of A start as PEFT would start them, new columns of B are 0, and the
    new entries' second moment is the tensor's mean (a zero would make their first steps far too large). Shrinking
    keeps the best approximation of B A in the Frobenius norm (Eckart-Young) by QR of both factors and an SVD of the
    small core; Adam's moments cannot be rotated likewise and are reset. The scale of the delta is not touched.
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
    draw = streams.uniforms(seed, "rank_growth", (layer, old), count * width)
    a[old:] = torch.from_numpy((2 * draw - 1) / width**0.5).view(count, width).to(a.dtype)
    return a


def _best_approximation(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Return A', B' of the given rank and the kept and the total squared singular values of B A."""
    qb, rb = torch.linalg.qr(b.double())
    qa, ra = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    root = s[:rank].sqrt()
    new_a, new_b = (root[:, None] * vt[:rank]) @ qa.T, qb @ (u[:, :rank] * root)
    return new_a.to(a.dtype), new_b.to(b.dtype), float((s[:rank] ** 2).sum()), float((s**2).sum())
