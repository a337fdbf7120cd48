"""LoRA for a whole population in one forward pass: a frozen linear layer plus every row's own adapter."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from agilerl.errors import EngineError
from agilerl.models.slots import AdapterStore, LinearShape, Route


class StackedLoRALinear(nn.Module):
    """Wrap a frozen linear layer: the base layer once over all rows, then each row's low-rank delta.

    The store's current route says which adapter serves which row; without a route this is the base layer.
    ``base_layer`` may be any module that maps ``[..., in]`` to ``[..., out]`` (dense or quantised).
    """

    def __init__(self, base_layer: nn.Module, store: AdapterStore, index: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._store = store
        self._index = index
        self._compute: Callable[[StackedLoRALinear, Tensor], Tensor] = _with_adapters

    @property
    def weight(self) -> Tensor:
        """The frozen weight; some architectures look at its dtype or device."""
        return cast(Tensor, self.base_layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias, if there is one."""
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
        """Map x ``[rows, ..., in]`` to ``[rows, ..., out]``; a model may also have flattened rows and tokens."""
        return self._compute(self, x)

    def leave_graph(self) -> None:
        """Keep this layer out of graphs of torch.compile, because an adapter's backward writes into the bank.

        There would also be one graph per layer, since each has a different index.
        """
        self._compute = _outside_graphs()


def _with_adapters(layer: StackedLoRALinear, x: Tensor) -> Tensor:
    return _add_deltas(x, layer.base_layer(x), layer._store, layer._index)


@cache
def _outside_graphs() -> Callable[[StackedLoRALinear, Tensor], Tensor]:
    # Made on demand because it loads the compiler, and only once because a graph is tied to the functions it calls.
    return cast(Callable[[StackedLoRALinear, Tensor], Tensor], torch.compiler.disable(_with_adapters))  # type: ignore[no-untyped-call]


def _add_deltas(x: Tensor, out: Tensor, store: AdapterStore, layer: int) -> Tensor:
    """Add each row's adapter, ``scaling * B A x``, to ``out``.

    If all agents have the same number of rows, one batched matrix product serves them all; otherwise there is one
    product per agent, of the same shape as on its own, so that an agent's bits never depend on its neighbours.
    """
    route = store.route
    if route is None:
        return out
    counts = _counts(x, store, layer, route)
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


def _counts(x: Tensor, store: AdapterStore, layer: int, route: Route) -> tuple[int, ...]:
    """Return the number of entries of x that belong to each slot: rows, or rows times tokens if they are flattened."""
    if route.rows is None:
        return (x.shape[0],)
    tokens, rest = divmod(x.shape[0], store.batch_rows or x.shape[0])
    if rest or (tokens > 1 and x.dim() > 2):
        raise EngineError(
            f"{store.layers[layer].name} computes {x.shape[0]} rows of a batch of {store.batch_rows}, so it is unknown "
            "which agent they belong to; leave it out of lora_config.target_modules"
        )
    return tuple(rows * tokens for rows in route.rows)


def _delta(x: Tensor, out: Tensor, store: AdapterStore, layer: int, slots: tuple[int, ...]) -> Tensor:
    return cast(Tensor, _LowRank.apply(x, out, _tape(x), store, layer, slots))  # type: ignore[no-untyped-call]


def _tape(like: Tensor) -> Tensor | None:
    """Return a tensor that requires a gradient: the first layer's input does not, so its backward would be skipped."""
    return torch.empty(0, device=like.device, requires_grad=True) if torch.is_grad_enabled() else None


class _LowRank(torch.autograd.Function):
    """``out + scaling B A x`` with x ``[n, tokens, in]``, one slot per batch entry.

    The gradients of A and B are added directly to the store's bank: no copies, no zero-filled slices, and slots that
    are not in the batch are not touched.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, tape: Tensor | None, store: AdapterStore, layer: int, slots: tuple[int, ...]
    ) -> Tensor:
        a, b = (_pick(bank, slots) for bank in store.factors[layer])
        scaling = _pick(store.scaling, slots)[:, None, None]
        low = torch.bmm(x.to(a.dtype), a.transpose(1, 2)) * scaling
        if tape is not None:
            ctx.save_for_backward(x, low)  # x in its own type: other layers save the same tensor
            ctx.place = (store, layer, slots)
            ctx.dtype = out.dtype
        if out.dtype == b.dtype:
            return torch.baddbmm(out, low, b.transpose(1, 2))
        return out + torch.bmm(low, b.transpose(1, 2)).to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        x = x.to(low.dtype)
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
    """Return the entries of some slots, without a copy if the slots are contiguous."""
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
    """Put the original layers back, which undoes :func:`attach`."""
    for shape in store.layers:
        parent, name = _parent(model, shape)
        layer = getattr(parent, name)
        if isinstance(layer, StackedLoRALinear):
            setattr(parent, name, layer.base_layer)


def _parent(model: nn.Module, shape: LinearShape) -> tuple[nn.Module, str]:
    path, _, name = shape.name.rpartition(".")
    return model.get_submodule(path), name


# -- value heads: one number a token from a slot's own hidden states, for all agents' critics in one bank --------------


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
        # A sum over the row, not a matrix product: its bits do not depend on how many rows there are.
        return (hidden * head[:-1]).sum(-1) + head[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        store, slot = ctx.place
        store.head_grads[slot, :-1] += (grad[..., None] * hidden).flatten(0, -2).sum(0)
        store.head_grads[slot, -1] += grad.sum()
        return grad[..., None] * store.heads[slot, :-1], None, None
