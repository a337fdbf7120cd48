"""LoRA for a whole population in one forward pass: a frozen linear layer plus every row's own adapter."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from agilerl.errors import EngineError
from agilerl.models.slots import AdapterStore, LinearShape, Route
from agilerl.sizes import LONG_SUM, LONG_SUM_ROWS


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in the type of x; the product is computed in that of the weight."""
    return nn.functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


class RoundedLinear(nn.Linear):
    """A frozen layer with bf16 weights among layers that compute in fp32: only its product is in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[..., in]`` to ``[..., out]`` of the same type."""
        return product(x, self.weight, self.bias)


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
        return self._store.layers[self._index].in_features

    @property
    def out_features(self) -> int:
        """Output width."""
        return self._store.layers[self._index].out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[rows, ..., in]`` to ``[rows, ..., out]``; a model may also have flattened rows and tokens."""
        return self._compute(self, x)

    def dense(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the frozen weight ``[out, in]`` and bias of a plain linear layer; None for any other."""
        base, transposed = self.base_layer, self._store.layers[self._index].fan_in_fan_out
        plain = type(base) in (nn.Linear, RoundedLinear) or transposed
        if not plain or type(base.weight) is not nn.Parameter or base.weight.requires_grad:
            return None
        return self.weight.T if transposed else self.weight, self.bias

    def leave_graph(self) -> None:
        """Keep this layer out of graphs of torch.compile, because an adapter's backward writes into the bank.

        There would also be one graph per layer, since each has a different index.
        """
        self._compute = _outside_graphs()


def _with_adapters(layer: StackedLoRALinear, x: Tensor) -> Tensor:
    store = layer._store
    if store.route is None:
        return cast(Tensor, layer.base_layer(x))
    runs = _runs(store, layer._index, x, store.route)
    # In two dimensions the base layer's result is no view, so that the deltas can be added in place.
    lines = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        out = layer.base_layer(lines)
        for run in runs:
            _add_delta(lines, out, run, layer._index)
    else:
        tape, site = torch.empty(0, device=x.device, requires_grad=True), (store, layer._index, runs)
        if (dense := layer.dense()) is not None:
            out = _WithLinear.apply(lines, tape, dense, site)  # type: ignore[no-untyped-call]
        else:
            out = _LowRank.apply(lines, layer.base_layer(lines), tape, site)  # type: ignore[no-untyped-call]
    return cast(Tensor, out.view(*x.shape[:-1], out.shape[-1]))


@cache
def _outside_graphs() -> Callable[[StackedLoRALinear, Tensor], Tensor]:
    # Made on demand because it loads the compiler, and only once because a graph is tied to the functions it calls.
    return cast(Callable[[StackedLoRALinear, Tensor], Tensor], torch.compiler.disable(_with_adapters))  # type: ignore[no-untyped-call]


class _Run(NamedTuple):
    """Slots with equal numbers of entries, side by side in the batch, and their factors in one layer."""

    slots: tuple[int, ...]
    entries: slice
    a: Tensor
    """[slots, R, in], times each slot's scaling."""
    b: Tensor
    """[slots, out, R]."""
    rate: float = 0.0
    """Share of the inputs that is left out."""
    keys: Tensor | None = None
    """[slots, entries of each] int32, what decides which; None: none are."""

    def kept(self, layer: int) -> Tensor | None:
        """Return the factors ``[slots, entries of each, in]`` on the inputs: 0, or 1 / (1 - rate); None: all are 1."""
        if self.keys is None:
            return None
        # The sum wraps around; of a thousand layers no two come closer than 515,091 channels.
        channels = _mixed(torch.arange(self.a.shape[2], dtype=torch.int32, device=self.keys.device) + layer * _LAYER)
        # In place: these are as many numbers as the inputs.
        words = _mixed(self.keys[..., None] ^ channels).bitwise_and_(0x7FFFFFFF)
        # Without the sign there are 31 bits.
        return (words >= round(self.rate * 2**31)).to(self.a.dtype).mul_(1 / (1 - self.rate))


_LAYER = 0x9E3779B
"""Far apart: no channel of a layer has the number of another layer's."""


def _mixed(words: Tensor) -> Tensor:
    """Return 32 bits, int32, of which each depends on every bit of ``words``, which is changed.

    Two rounds of xorshift and multiplication with the constants of C. Wellons' "lowbias32"; products wrap around.
    """
    # The right shift of a signed number repeats its sign, which the mask takes away.
    words ^= (words >> 16) & 0xFFFF
    words *= 0x7FEB352D
    words ^= (words >> 15) & 0x1FFFF
    words *= 0x846CA68B - 2**32  # as a signed number
    words ^= (words >> 16) & 0xFFFF
    return words


def token_keys(rows: Tensor, width: int) -> Tensor:
    """Return a number, int32, for each token ``[B, width]`` of rows that have the numbers ``rows [B]``, int32."""
    # From 1, because 0 mixes to 0: a first token would have the number of its row.
    return _mixed(rows[:, None] ^ _mixed(torch.arange(1, width + 1, dtype=torch.int32)))


def _runs(store: AdapterStore, layer: int, x: Tensor, route: Route) -> list[_Run]:
    """Return the runs of a batch: one batched matrix product serves each.

    It has the same shape for each slot as on its own, so that an agent's bits never depend on the others.
    """
    # The scaled factors are copies. torch counts changes in place, and a bank that has grown is at another address.
    of_adapters = (store.theta.data_ptr(), store.theta._version, store.scaling._version)
    key = (layer, x.shape[:-1], store.batch_rows, *of_adapters)
    runs: list[_Run] | None = route.known.get(key)
    if runs is not None:
        return runs
    runs, start = [], 0
    dropout = route.dropout
    if dropout is not None and dropout.keys.numel() != x.numel() // x.shape[-1]:
        raise EngineError(
            f"{store.layers[layer].name} computes {x.numel() // x.shape[-1]} vectors of a batch of "
            f"{dropout.keys.numel()} tokens, so it is unknown what lora_dropout leaves out; set it to 0, or leave the "
            "layer out of lora_config.target_modules"
        )
    rates = (0.0,) * len(route.slots) if dropout is None else dropout.rates
    parts = zip(route.slots, _counts(x, store, layer, route), rates)
    for (count, rate), members in groupby(parts, key=lambda part: part[1:]):
        slots = tuple(slot for slot, *_ in members)
        a, b = (bank[_index(slots)] for bank in store.factors[layer])
        scaled = a * store.scaling[_index(slots)][:, None, None]
        entries = slice(start, start + count * len(slots))
        keys = dropout.keys[entries].view(len(slots), -1) if dropout is not None and rate else None
        runs.append(_Run(slots, entries, scaled, b, rate, keys))
        start += count * len(slots)
    route.known[key] = runs
    return runs


def _counts(x: Tensor, store: AdapterStore, layer: int, route: Route) -> tuple[int, ...]:
    """Return the number of vectors of x that belong to each slot."""
    if route.rows is None:
        return (x.numel() // x.shape[-1],)
    # A layer may get rows and tokens in one dimension; every row then has the same number of tokens.
    tokens, rest = divmod(x.shape[0], store.batch_rows or x.shape[0])
    if rest or (tokens > 1 and x.dim() > 2):
        raise EngineError(
            f"{store.layers[layer].name} computes {x.shape[0]} rows of a batch of {store.batch_rows}, so it is unknown "
            "which agent they belong to; leave it out of lora_config.target_modules"
        )
    tokens *= x[0].numel() // x.shape[-1]
    return tuple(rows * tokens for rows in route.rows)


_Site = tuple[AdapterStore, int, Sequence[_Run]]
"""(store, layer, runs)."""


def _inputs(x: Tensor, run: _Run, kept: Tensor | None) -> Tensor:
    """Return a run's entries of x, ``[slots, entries of each, in]``, without what is left out."""
    entries = _by_slot(x, run).to(run.a.dtype)
    return entries if kept is None else entries * kept


def _add_delta(x: Tensor, out: Tensor, run: _Run, layer: int) -> Tensor:
    """``out += scaling B A x`` for a run's entries of x ``[entries, in]``; returns ``scaling A x``."""
    low = torch.bmm(_inputs(x, run, run.kept(layer)), run.a.transpose(1, 2))
    # A view, so that this adds to out.
    into = _by_slot(out, run)
    if out.dtype == run.b.dtype:
        into.baddbmm_(low, run.b.transpose(1, 2))
    else:
        into += torch.bmm(low, run.b.transpose(1, 2)).to(out.dtype)
    return low


def _add_gradients(grad: Tensor, x: Tensor, lows: Sequence[Tensor], site: _Site, grad_x: Tensor | None) -> None:
    """Add the gradients of A and B to the bank, and that of x to ``grad_x``."""
    store, layer, runs = site
    grad_a, grad_b = store.factor_grads[layer]
    for run, low in zip(runs, lows):
        wide = _by_slot(grad, run).to(run.b.dtype)
        grad_low = torch.bmm(wide, run.b)  # [slots, entries, out] [slots, out, R]
        kept = run.kept(layer)  # once more: cheaper than to keep it from the forward pass
        # The scaling is in low and in run.a, and so in the gradients of B and x, but not yet in that of A.
        change = torch.bmm(grad_low.transpose(1, 2), _inputs(x, run, kept))
        _add_to(grad_a, run.slots, change.mul_(store.scaling[_index(run.slots)][:, None, None]))
        _add_to(grad_b, run.slots, torch.bmm(wide.transpose(1, 2), low))
        if grad_x is None:
            continue
        into = _by_slot(grad_x, run)
        if kept is not None:
            into += (torch.bmm(grad_low, run.a) * kept).to(into.dtype)
        elif into.dtype == run.a.dtype:
            into.baddbmm_(grad_low, run.a)
        else:
            into += torch.bmm(grad_low, run.a).to(into.dtype)


class _LowRank(torch.autograd.Function):
    """``out += scaling B A x`` for x ``[entries, in]``, each run of entries by its own slots.

    ``tape`` requires a gradient: the first layer's x does not, so its backward would be skipped. The gradients of A and
    B are added directly to the store's bank: no copies, no zero-filled slices, and slots that are not in the batch are
    not touched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, tape: Tensor, site: _Site) -> Tensor:
        lows = [_add_delta(x, out, run, site[1]) for run in site[2]]
        # Autograd has to know of an input that is changed in place and returned.
        ctx.mark_dirty(out)
        ctx.save_for_backward(x, *lows)  # x in its own type: other layers save the same tensor
        ctx.site = site
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *lows = ctx.saved_tensors
        grad = grad.contiguous()
        # Entries of the base model alone have none.
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        _add_gradients(grad, x, lows, ctx.site, grad_x)
        return grad_x, grad, None, None


class _WithLinear(torch.autograd.Function):
    """The same together with the frozen linear layer: one gradient of x, to which each run adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tensor, dense: tuple[Tensor, Tensor | None], site: _Site) -> Tensor:
        out = product(x, *dense)
        lows = [_add_delta(x, out, run, site[1]) for run in site[2]]
        ctx.save_for_backward(x, *lows)
        ctx.weight, ctx.site = dense[0], site
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *lows = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _times(grad, ctx.weight) if ctx.needs_input_grad[0] else None
        _add_gradients(grad, x, lows, ctx.site, grad_x)
        return grad_x, None, None, None


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight`` in the type of rows; on a CPU a row's bits do not depend on the number of rows."""
    wanted, rows = rows.dtype, rows.to(weight.dtype)
    # The sum is over the weight's outputs, len(weight) terms.
    missing = LONG_SUM_ROWS - len(rows) if rows.device.type == "cpu" and len(weight) >= LONG_SUM else 0
    result = rows @ weight if missing <= 0 else (nn.functional.pad(rows, (0, 0, 0, missing)) @ weight)[: len(rows)]
    return result.to(wanted)


def _by_slot(values: Tensor, run: _Run) -> Tensor:
    """Return a run's entries as ``[slots, entries of each, width]``, a view."""
    return values[run.entries].view(len(run.slots), -1, values.shape[-1])


def _index(slots: tuple[int, ...]) -> slice | list[int]:
    """Return the index of some slots in a bank: a slice, which copies nothing, if they are contiguous."""
    span = range(slots[0], slots[0] + len(slots))
    return slice(span.start, span.stop) if slots == tuple(span) else list(slots)


def _add_to(bank: Tensor, slots: tuple[int, ...], values: Tensor) -> None:
    index = _index(slots)
    if isinstance(index, slice):
        bank[index] += values
    else:
        for slot, value in zip(index, values):  # one by one: a slot may be there twice
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
        ctx.site = (store, slot)
        # A sum over the row, not a matrix product: its bits do not depend on how many rows there are.
        return (hidden * head[:-1]).sum(-1) + head[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        store, slot = ctx.site
        store.head_grads[slot, :-1] += (grad[..., None] * hidden).flatten(0, -2).sum(0)
        store.head_grads[slot, -1] += grad.sum()
        return grad[..., None] * store.heads[slot, :-1], None, None
