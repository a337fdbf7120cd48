"""Adapters that are another policy than before."""

import torch
from torch import Tensor

from agilerl import streams
from agilerl.models.slots import AdapterStore


@torch.no_grad()
def perturb(store: AdapterStore, slot: int, share: float, seed: int, key: tuple[int, ...]) -> None:
    """Perturb each layer's delta by Gaussian noise on B whose product with A has norm ``share * ||B A||``.

    So weights change as by an update. A new adapter (B = 0, delta 0) stays unchanged.
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
