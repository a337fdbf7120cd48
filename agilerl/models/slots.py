"""The adapter bank of a population, one row of numbers per slot and every LoRA factor a view into it; and its AdamW."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from agilerl import streams
from agilerl.errors import ConfigError, EngineError
from agilerl.safety.bounds import memory_bytes
from agilerl.sizes import ADAPTER_COPIES

ALIGN = 64  # elements; rows start at full vector registers, so elementwise kernels round every slot's row alike


@dataclass(frozen=True)
class LinearShape:
    """A linear layer that carries an adapter."""

    name: str
    """Module path inside the base model, for instance ``model.layers.0.self_attn.q_proj``."""
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False
    """Whether its weight is ``[in, out]``, as in GPT-2's ``Conv1D``."""
    by_weight: bool = False
    """Whether PEFT is given the name of its weight (``target_parameters``), because it takes the layer's own name for
    that of an expert."""

    @property
    def keys(self) -> tuple[str, str]:
        """Names of A and B in PEFT's files."""
        return f"base_model.model.{self.name}.lora_A.weight", f"base_model.model.{self.name}.lora_B.weight"


@dataclass(frozen=True)
class Dropout:
    """What adapters leave out of their inputs in a training forward (``lora_dropout``), by number and not by chance."""

    rates: tuple[float, ...]
    """Of each slot of the route; 0: nothing."""
    keys: Tensor
    """[M] int32, one for each vector that a layer gets. Which of its elements are left out depends on this number and
    the layer alone, not on the batch that it is in."""


@dataclass(frozen=True)
class Route:
    """Which slot serves which rows of a batch: ``rows[i]`` consecutive rows belong to ``slots[i]``.

    Rows of the batch beyond ``sum(rows)`` use the base model alone.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...] | None
    """None: all rows of any batch belong to the one slot."""
    dropout: Dropout | None = field(default=None, compare=False, repr=False)
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the layers have looked up for this route."""


class AdapterStore:
    """Flat, agent-major banks ``[N, D]`` of adapter parameters, gradients and Adam moments.

    A layer's factors A ``[N, R, in]`` and B ``[N, out, R]`` are views of ``theta``, their gradients views of ``grad``.
    The backward pass of :class:`StackedLoRALinear` adds to ``grad`` in place, so the bank is not an autograd leaf. R is
    the largest rank in use, at least 2; an adapter of smaller rank is padded with zeros, which stay zero because the
    gradient of each padded factor is a product with the other factor's zeros. Every row ends with a value head
    ``[H + 1]``, used by critics. Cloning a slot copies one row of each bank.
    """

    def __init__(
        self,
        layers: Sequence[LinearShape],
        *,
        max_rank: int,
        head_features: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        self.max_rank = max_rank
        self.head_features = head_features
        self.dtype, self.device = dtype, torch.device(device)
        self.route: Route | None = None
        self.batch_rows = 0
        """Rows of the current batch, rows of the base model alone included; 0 if unknown."""
        self.ranks: list[int] = []
        self._draws = True
        self._free: list[int] = []
        self._measure()
        self._allocate_banks(0)

    def __repr__(self) -> str:
        return f"AdapterStore(slots={self.used}/{self.capacity}, parameters={self.size:,}, max_rank={self.max_rank})"

    # -- memory ---------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        self.offsets: list[tuple[int, int]] = []
        end = 0
        # A product with a single column is another kernel, whose bits depend on the number of slots and rows.
        self.width = max(self.max_rank, 2)
        for layer in self.layers:
            a, end = end, end + self.width * layer.in_features
            b, end = end, end + self.width * layer.out_features
            self.offsets.append((a, b))
        self.head_offset = end
        end += self.head_features + 1 if self.head_features else 0
        self.size = -(-end // ALIGN) * ALIGN

    def _allocate_banks(self, capacity: int) -> None:
        def bank() -> Tensor:
            return torch.zeros((capacity, self.size), dtype=self.dtype, device=self.device)

        self.theta, self.grad, self.exp_avg, self.exp_avg_sq = bank(), bank(), bank(), bank()
        # On the CPU, where the bias corrections are computed from them.
        self.steps = torch.zeros(capacity, dtype=torch.float64)
        self.scaling = torch.zeros(capacity, dtype=self.dtype, device=self.device)
        self._bind()

    def _bind(self) -> None:
        """Make every layer's factors, and their gradients, views of the banks."""
        count = range(len(self.layers))
        self.factors = [self._views(self.theta, i) for i in count]
        """Per layer: A ``[N, R, in]`` and B ``[N, out, R]`` of all slots."""
        self.factor_grads = [self._views(self.grad, i) for i in count]
        """Per layer: where the gradients of A and B accumulate."""
        self.heads, self.head_grads = self._head_view(self.theta), self._head_view(self.grad)
        """Value heads ``[N, H + 1]``, the last column the bias, and where their gradients accumulate."""

    def _head_view(self, bank: Tensor) -> Tensor:
        return bank[:, self.head_offset : self.head_offset + self.head_features + 1]

    def _views(self, bank: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        shape, (a, b), n, r = self.layers[layer], self.offsets[layer], bank.shape[0], self.width
        return (
            bank[:, a : a + r * shape.in_features].view(n, r, shape.in_features),
            bank[:, b : b + r * shape.out_features].view(n, shape.out_features, r),
        )

    @property
    def capacity(self) -> int:
        """Number of slots that have memory."""
        return self.theta.shape[0]

    @property
    def used(self) -> int:
        """Number of slots that belong to an agent."""
        return self.capacity - len(self._free)

    def reserve(self, slots: int) -> None:
        """Make room for this many slots at once: growing later, slot by slot, would copy all banks every time."""
        if slots > self.capacity:
            needed, most = ADAPTER_COPIES * self.theta.element_size() * slots * self.size, memory_bytes()
            if most is not None and self.theta.device.type == "cpu" and needed > most:
                raise ConfigError(
                    f"{slots:,} adapters take {needed / 2**30:,.0f} GiB with their gradients and moments, more than "
                    "the memory of this machine; ask for fewer agents, or a lower rank"
                )
            self._grow(slots)

    def allocate(self, rank: int, scaling: float) -> int:
        """Take the lowest free slot, cleared to zero, for an adapter of this rank and scale (alpha / r)."""
        if rank > self.max_rank:
            self.widen(rank)
        if not self._free:
            self._grow(self.capacity + 1)
        # The lowest, so that the slots in use are neighbours, whose factors are one view of the bank.
        slot = min(self._free)
        self._free.remove(slot)
        with torch.no_grad():
            for bank in (self.theta, self.grad, self.exp_avg, self.exp_avg_sq):
                bank[slot].zero_()  # of the last agent that had it
        self.steps[slot] = 0
        self.set_rank(slot, rank, scaling)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        if slot not in self._free:
            self._free.append(slot)

    def set_rank(self, slot: int, rank: int, scaling: float) -> None:
        """Declare the rank and scale of a slot; its numbers are not touched."""
        self.ranks[slot] = rank
        self.scaling[slot] = scaling

    def lowest_free_slot(self) -> int | None:
        """Return the free slot with the lowest number, or None when all are taken."""
        return min(self._free, default=None)

    def _grow(self, capacity: int) -> None:
        old = (self.theta, self.grad, self.exp_avg, self.exp_avg_sq, self.steps, self.scaling)
        count = self.capacity
        self._allocate_banks(capacity)
        new = (self.theta, self.grad, self.exp_avg, self.exp_avg_sq, self.steps, self.scaling)
        with torch.no_grad():
            for before, after in zip(old, new):
                after[:count] = before
        self._free += range(count, capacity)
        self.ranks += [0] * (capacity - count)

    def widen(self, rank: int) -> None:
        """Rebuild the banks for a larger rank; existing adapters are padded with zeros, and value heads are kept."""
        states = [{**self.read(slot), "grad": self.adapter(slot, "grad")} for slot in range(self.capacity)]
        heads = [self._head_view(bank).clone() for bank in (self.theta, self.grad, self.exp_avg, self.exp_avg_sq)]
        scaling, steps = self.scaling, self.steps
        self.max_rank = rank
        self._measure()
        self._allocate_banks(self.capacity)
        self.scaling.copy_(scaling)
        self.steps.copy_(steps)
        for slot, state in enumerate(states):
            self.write(slot, state)
        for bank, head in zip((self.theta, self.grad, self.exp_avg, self.exp_avg_sq), heads):
            self._head_view(bank).copy_(head)

    def move(self, source: int, target: int) -> None:
        """Move a slot's contents to a free slot; the caller still has to release the source."""
        self._free.remove(target)
        with torch.no_grad():
            for bank in (self.theta, self.grad, self.exp_avg, self.exp_avg_sq, self.steps, self.scaling):
                bank[target] = bank[source]
        self.ranks[target] = self.ranks[source]

    def clear_moments(self, slot: int) -> None:
        """Reset a slot's Adam moments and step counter."""
        for bank in (self.exp_avg, self.exp_avg_sq, self.steps):
            bank[slot] = 0

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Leave new adapters zero while the context is open, because something else will be written into them."""
        self._draws = False
        try:
            yield
        finally:
            self._draws = True

    # -- contents -------------------------------------------------------------------------------------------------

    def initialise(self, slot: int, seed: int, *, gaussian: bool = False) -> None:
        """Start an adapter as PEFT does: A Kaiming-uniform (a = sqrt 5), B zero, so the agent equals the base.

        With ``gaussian`` A is normal with standard deviation 1 / r, PEFT's ``init_lora_weights="gaussian"``.
        The draw depends only on the seed and the layer: members of a population that share a seed start from the same
        A, and differ only by their hyperparameters and samples.
        """
        if not self._draws:
            return
        for i, layer in enumerate(self.layers):
            rank, bound = self.ranks[slot], 1.0 / sqrt(layer.in_features)  # gain sqrt(2 / (1 + 5)), times sqrt(3)
            count = rank * layer.in_features
            if gaussian:
                numbers = streams.normal(seed, "lora_init", (i,), count) / rank
            else:
                numbers = (2 * streams.uniforms(seed, "lora_init", (i,), count) - 1) * bound
            a = torch.from_numpy(numbers).view(rank, layer.in_features)
            with torch.no_grad():
                self._views(self.theta, i)[0][slot, :rank] = a.to(self.dtype)

    def adapter(self, slot: int, bank: str = "theta") -> list[tuple[Tensor, Tensor]]:
        """Return copies of one slot's factors, per layer: A ``[r, in]`` and B ``[out, r]``, without padding.

        ``bank`` may also be that of their gradients (``grad``) or Adam moments (``exp_avg``, ``exp_avg_sq``).
        """
        rank, numbers = self.ranks[slot], getattr(self, bank)
        views = (self._views(numbers, i) for i in range(len(self.layers)))
        return [(a[slot, :rank].detach().clone(), b[slot, :, :rank].detach().clone()) for a, b in views]

    def load_adapter(self, slot: int, factors: Sequence[tuple[Tensor, Tensor]], bank: str = "theta") -> None:
        """Overwrite what :meth:`adapter` returns."""
        rank, numbers = self.ranks[slot], getattr(self, bank)
        with torch.no_grad():
            # What lies beyond the rank has to be 0: the padded part of each factor is held at 0 by that of the other.
            numbers[slot, : self.head_offset].zero_()
            for i, (a, b) in enumerate(factors):
                if a.shape[0] != rank:
                    raise EngineError(
                        f"adapter of rank {a.shape[0]} does not fit slot {slot}, whose rank is {rank}; "
                        "declare the rank with set_rank first"
                    )
                into_a, into_b = self._views(numbers, i)
                into_a[slot, :rank], into_b[slot, :, :rank] = a, b

    def read(self, slot: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return copies of a slot's parameters and Adam moments, unpadded."""
        return {name: self.adapter(slot, name) for name in ("theta", "exp_avg", "exp_avg_sq")}

    def write(self, slot: int, state: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
        """Overwrite a slot's parameters and Adam moments with what :meth:`read` returned."""
        for name, factors in state.items():
            self.load_adapter(slot, factors, name)

    def read_head(self, slot: int) -> Tensor:
        """Return a copy of a slot's value head and its Adam moments, ``[3, H + 1]``."""
        banks = (self.theta, self.exp_avg, self.exp_avg_sq)
        return torch.stack([self._head_view(bank)[slot] for bank in banks])

    def write_head(self, slot: int, state: Tensor) -> None:
        """Overwrite a slot's value head and its moments with what :meth:`read_head` returned."""
        for bank, values in zip((self.theta, self.exp_avg, self.exp_avg_sq), state):
            self._head_view(bank)[slot] = values

    # -- forward --------------------------------------------------------------------------------------------------

    @contextmanager
    def routed(self, route: Route | None) -> Iterator[None]:
        """Route rows to slots while the context is open. None: base model alone."""
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before

    @contextmanager
    def as_now(self, route: Route | None, batch_rows: int) -> Iterator[None]:
        """Restore an earlier route while a checkpointed layer is recomputed in the backward pass."""
        rows, self.batch_rows = self.batch_rows, batch_rows
        try:
            with self.routed(route):
                yield
        finally:
            self.batch_rows = rows


# -- AdamW for all agents at once: elementwise operations over the bank, each agent with its own settings -------------


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


@torch.no_grad()
def adamw_step(
    store: AdapterStore, slots: Sequence[int], settings: Sequence[AdamWSettings], healthy: Sequence[bool]
) -> tuple[list[float], list[bool]]:
    """Clip and apply one AdamW step (Loshchilov & Hutter 2019, arXiv 1711.05101) to some slots, and no others.

    An agent whose gradient norm is not finite, or whose entry of ``healthy`` is False, keeps parameters, moments and
    step counter bit for bit. Returns the gradient norms before clipping, and which agents took the step.
    """
    index = torch.as_tensor(list(slots), device=store.device)
    # All slots are worked on as views of the banks, a part of them as copies.
    whole = list(slots) == list(range(store.capacity))
    # Slot by slot, because indexing the bank by a list would copy all gradients.
    norms = torch.stack([torch.linalg.vector_norm(store.grad[slot]) for slot in slots])
    finite = torch.isfinite(norms).cpu()
    applied = [bool(f) and h for f, h in zip(finite, healthy)]
    ok = torch.tensor(applied, device=store.device)[:, None]
    column = _columns(settings, store)
    # As torch.nn.utils.clip_grad_norm_ does: the 1e-6 keeps a zero norm from dividing by zero.
    clip = torch.clamp(column["max_grad_norm"] / (norms[:, None] + 1e-6), max=1.0)
    # In fp64, as torch.optim.AdamW has them: in fp32 1 - beta^step loses digits in the first steps.
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
        # As torch.optim.AdamW does: epsilon is added after the bias correction.
        denominator = new_second.sqrt() / correction2.sqrt() + column["eps"]
        decayed = theta * (1 - column["lr"] * column["weight_decay"])
        new_theta = decayed - (column["lr"] / correction1) * (new_first / denominator)
        changes = ((banks[0], theta, new_theta), (banks[2], first, new_first), (banks[3], second, new_second))
        for bank, old, new in changes:
            # A mask, not an index of the healthy agents: every agent goes through the same operations, so its bits do
            # not depend on whether another one fails. And where(), not a product: 0 x NaN is NaN.
            kept = torch.where(ok, new, old)
            if whole:
                bank.copy_(kept)
            else:
                bank.index_copy_(0, index, kept)
    for slot, took, step in zip(slots, applied, steps):
        if took:
            store.steps[slot] = step
    return norms.tolist(), applied


def _slices(size: int, width: int) -> list[slice]:
    # Whole registers again, so that a slice has the bits that it would have within its row.
    width = max(width // ALIGN * ALIGN, ALIGN)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _columns(settings: Sequence[AdamWSettings], store: AdapterStore) -> dict[str, Tensor]:
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    table = {name: [float(getattr(s, name)) for s in settings] for name in names}
    table["max_grad_norm"] = [float("inf") if s.max_grad_norm is None else s.max_grad_norm for s in settings]
    return {name: _column(torch.tensor(values, dtype=torch.float64), store) for name, values in table.items()}


def _column(values: Tensor, store: AdapterStore) -> Tensor:
    return values.to(dtype=store.dtype, device=store.device)[:, None]
