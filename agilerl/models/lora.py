"""LoRA for a whole population in one forward pass: a frozen linear layer plus every row's own adapter."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from agilerl.models.slots import AdapterStore, LinearShape, Route

__all__ = ["StackedLoRALinear", "attach", "detach"]


class StackedLoRALinear(nn.Module):
    """Wrap a frozen linear layer: the base once over all rows, then each row's low-rank delta.

    Which adapter serves which row is the store's current route; without one the layer is the base layer.
    ``base_layer`` may be any module that maps ``[..., in]`` to ``[..., out]`` (dense or quantised).
    """

    def __init__(self, base_layer: nn.Module, store: AdapterStore, index: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._store = store
        self._index = index

    @property
    def weight(self) -> Tensor:
        """The frozen weight; some architectures look at its dtype or device."""
        return cast(Tensor, self.base_layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias, where there is one."""
        return cast(Tensor | None, self.base_layer.bias)

    @property
    def in_features(self) -> int:
        """Input width."""
        return cast(int, self.base_layer.in_features)

    @property
    def out_features(self) -> int:
        """Output width."""
        return cast(int, self.base_layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[rows, ..., in]`` to ``[rows, ..., out]``."""
        out, route = self.base_layer(x), self._store.route
        return out if route is None else _add_deltas(x, out, self._store, self._index, route)


def _add_deltas(x: Tensor, out: Tensor, store: AdapterStore, layer: int, route: Route) -> Tensor:
    """Add each row's adapter, ``scaling * B A x``, to ``out``.

    One batched matrix product serves all agents when they have equally many rows; otherwise one product an agent, of
    the same shape it would have alone, so that an agent's bits never depend on its neighbours.
    """
    counts = (x.shape[0],) if route.rows is None else route.rows
    used, n = sum(counts), len(route.slots)
    if len(set(counts)) == 1:
        xs, outs = x[:used].reshape(n, -1, x.shape[-1]), out[:used].reshape(n, -1, out.shape[-1])
        pieces = [_delta(xs, outs, store, layer, route.slots).reshape(out[:used].shape)]
    else:
        pieces, start = [], 0
        for slot, rows in zip(route.slots, counts):
            part = slice(start, start + rows)
            start += rows
            xs, outs = x[part].reshape(1, -1, x.shape[-1]), out[part].reshape(1, -1, out.shape[-1])
            pieces.append(_delta(xs, outs, store, layer, (slot,)).reshape(out[part].shape))
    if used < out.shape[0]:
        pieces.append(out[used:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _delta(x: Tensor, out: Tensor, store: AdapterStore, layer: int, slots: tuple[int, ...]) -> Tensor:
    return cast(Tensor, _LowRank.apply(x, out, _tape(x), store, layer, slots))  # type: ignore[no-untyped-call]


def _tape(like: Tensor) -> Tensor | None:
    """Return something that needs a gradient, so that the first layer, whose input needs none, gets its backward."""
    return torch.empty(0, device=like.device, requires_grad=True) if torch.is_grad_enabled() else None


class _LowRank(torch.autograd.Function):
    """``out + scaling B A x`` with x ``[n, tokens, in]``, one slot a batch entry.

    The gradients of A and B go straight into the store's bank: no copy, no zero-filled slices, and a slot that is not
    in the batch is not touched.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, tape: Tensor | None, store: AdapterStore, layer: int, slots: tuple[int, ...]
    ) -> Tensor:
        a, b = (_pick(bank, slots) for bank in store.factors[layer])
        scaling = _pick(store.scaling, slots)[:, None, None]
        x = x.to(a.dtype)
        low = torch.bmm(x, a.transpose(1, 2)) * scaling
        if tape is not None:
            ctx.save_for_backward(x, low)
            ctx.place = (store, layer, slots)
            ctx.dtype = out.dtype
        if out.dtype == b.dtype:
            return torch.baddbmm(out, low, b.transpose(1, 2))
        return out + torch.bmm(low, b.transpose(1, 2)).to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        store, layer, slots = ctx.place
        a, b = (_pick(bank, slots) for bank in store.factors[layer])
        scaling = _pick(store.scaling, slots)[:, None, None]
        wide = grad.to(b.dtype)
        grad_low = torch.bmm(wide, b) * scaling
        grad_a, grad_b = store.factor_grads[layer]
        _add_to(grad_a, slots, torch.bmm(grad_low.transpose(1, 2), x))
        _add_to(grad_b, slots, torch.bmm(wide.transpose(1, 2), low))
        grad_x = torch.bmm(grad_low, a).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad, None, None, None, None


def _pick(bank: Tensor, slots: tuple[int, ...]) -> Tensor:
    """Return the entries of some slots, without a copy where they stand side by side."""
    if slots == tuple(range(slots[0], slots[0] + len(slots))):
        return bank[slots[0] : slots[0] + len(slots)]
    return bank[list(slots)]


def _add_to(bank: Tensor, slots: tuple[int, ...], values: Tensor) -> None:
    if slots == tuple(range(slots[0], slots[0] + len(slots))):
        bank[slots[0] : slots[0] + len(slots)] += values
    else:
        for slot, value in zip(slots, values):
            bank[slot] += value


def attach(model: nn.Module, store: AdapterStore) -> None:
    """Replace each of the store's layers inside the model by a :class:`StackedLoRALinear` around it."""
    for index, shape in enumerate(store.layers):
        parent, name = _parent(model, shape)
        setattr(parent, name, StackedLoRALinear(getattr(parent, name), store, index))


def detach(model: nn.Module, store: AdapterStore) -> None:
    """Put the original layers back, so that the model is again what it was before :func:`attach`."""
    for shape in store.layers:
        parent, name = _parent(model, shape)
        layer = getattr(parent, name)
        if isinstance(layer, StackedLoRALinear):
            setattr(parent, name, layer.base_layer)


def _parent(model: nn.Module, shape: LinearShape) -> tuple[nn.Module, str]:
    path, _, name = shape.name.rpartition(".")
    return model.get_submodule(path), name
