"""Value heads: one number per token from a slot's own hidden states, for all agents' critics in one bank."""

from typing import Any, cast

import torch
from torch import Tensor

from agilerl.models.slots import AdapterStore

__all__ = ["token_values"]


def token_values(hidden: Tensor, store: AdapterStore, slot: int) -> Tensor:
    """Return values ``[...]`` of hidden states ``[..., H]`` by a slot's head, ``w h + b``, in the head's type."""
    return cast(Tensor, _ValueHead.apply(hidden, store, slot))  # type: ignore[no-untyped-call]


class _ValueHead(torch.autograd.Function):
    """The gradient of the head goes straight into the store's bank, as an adapter's does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, store: AdapterStore, slot: int) -> Tensor:
        head = store.heads[slot]
        hidden = hidden.to(head.dtype)
        ctx.save_for_backward(hidden)
        ctx.place = (store, slot)
        # A sum over the row, not a matrix product: the bits of a sum do not depend on the number of rows.
        return (hidden * head[:-1]).sum(-1) + head[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        store, slot = ctx.place
        store.head_grads[slot, :-1] += (grad[..., None] * hidden).flatten(0, -2).sum(0)
        store.head_grads[slot, -1] += grad.sum()
        return grad[..., None] * store.heads[slot, :-1], None, None
