"""AdamW for all agents at once: a handful of elementwise operations over the bank, each agent with its own settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agilerl.models.slots import ALIGN, AdapterStore

_STEP_ELEMENTS = 2**22
"""Numbers of each bank, over all agents, that one round of elementwise operations handles."""


@dataclass(frozen=True)
class AdamWSettings:
    """One agent's optimizer settings for one step."""

    lr: float
    """Learning rate, already scheduled."""
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled decay: theta is multiplied by 1 - lr * weight_decay."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this L2 norm over the agent's whole adapter; None: no clipping."""


def zero_grad(store: AdapterStore) -> None:
    """Clear all gradients in place; setting them to None would break their views into the bank."""
    store.grad.zero_()


@torch.no_grad()
def adamw_step(
    store: AdapterStore, slots: Sequence[int], settings: Sequence[AdamWSettings], healthy: Sequence[bool]
) -> tuple[list[float], list[bool]]:
    """Clip and apply one AdamW step (Loshchilov & Hutter 2019, arXiv 1711.05101) to some slots, and no others.

    An agent whose gradient norm is not finite, or whose entry of ``healthy`` is False, keeps parameters, moments and
    step counter bit for bit. Returns the gradient norms before clipping, and which agents took the step.
    """
    index = torch.as_tensor(list(slots), device=store.device)
    whole = list(slots) == list(range(store.capacity))
    norms = torch.stack([torch.linalg.vector_norm(store.grad[slot]) for slot in slots])
    finite = torch.isfinite(norms).cpu()
    applied = [bool(f) and h for f, h in zip(finite, healthy)]
    ok = torch.tensor(applied, device=store.device)[:, None]
    column = _columns(settings, store)
    # As torch.nn.utils.clip_grad_norm_ does: the 1e-6 keeps a zero norm from dividing by zero.
    clip = torch.clamp(column["max_grad_norm"] / (norms[:, None] + 1e-6), max=1.0)
    steps = store.steps[list(slots)] + 1
    correction1 = _column(1 - torch.tensor([s.beta1 for s in settings], dtype=torch.float64) ** steps, store)
    correction2 = _column(1 - torch.tensor([s.beta2 for s in settings], dtype=torch.float64) ** steps, store)

    # Some columns at a time: over the whole bank, the temporaries would take half as much memory as all four banks.
    for part in _slices(store.size, _STEP_ELEMENTS // max(len(slots), 1)):
        banks = [bank[:, part] for bank in (store.theta, store.grad, store.exp_avg, store.exp_avg_sq)]
        theta, grad, first, second = (bank if whole else bank.index_select(0, index) for bank in banks)
        grad = grad * clip
        new_first = first + (grad - first) * (1 - column["beta1"])
        new_second = second * column["beta2"] + grad * grad * (1 - column["beta2"])
        denominator = new_second.sqrt() / correction2.sqrt() + column["eps"]
        decayed = theta * (1 - column["lr"] * column["weight_decay"])
        new_theta = decayed - (column["lr"] / correction1) * (new_first / denominator)
        changes = ((banks[0], theta, new_theta), (banks[2], first, new_first), (banks[3], second, new_second))
        for bank, old, new in changes:
            # A mask, not an index of the healthy agents: every agent then goes through the same operations, whoever
            # else fails, and where() drops the NaN of a failed one, which a product with 0 would not.
            kept = torch.where(ok, new, old)
            if whole:
                bank.copy_(kept)
            else:
                bank.index_copy_(0, index, kept)
    for slot, took, step in zip(slots, applied, steps):
        if took:
            store.steps[slot] = step
    return [float(n) for n in norms], applied


def _slices(size: int, width: int) -> list[slice]:
    width = max(width // ALIGN * ALIGN, ALIGN)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _columns(settings: Sequence[AdamWSettings], store: AdapterStore) -> dict[str, Tensor]:
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    table = {name: [float(getattr(s, name)) for s in settings] for name in names}
    table["max_grad_norm"] = [float("inf") if s.max_grad_norm is None else s.max_grad_norm for s in settings]
    return {name: _column(torch.tensor(values, dtype=torch.float64), store) for name, values in table.items()}


def _column(values: Tensor, store: AdapterStore) -> Tensor:
    return values.to(dtype=store.dtype, device=store.device)[:, None]
