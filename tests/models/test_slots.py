"""The adapter bank: slots, ranks, growth, copies."""

import pytest
import torch

from agilerl.errors import EngineError
from agilerl.models.slots import AdapterStore, LinearShape

LAYERS = [LinearShape("a", 8, 12), LinearShape("b", 12, 8)]


def random_factors(rank: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rank, s.in_features, generator=g), torch.randn(s.out_features, rank, generator=g)) for s in LAYERS
    ]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for p, q in zip(a, b) for x, y in zip(p, q))


def test_factors_are_views_of_the_bank() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    store.reserve(3)
    slot = store.allocate(4, 1.0)
    store.factors[1][0][slot].fill_(7.0)
    assert store.theta[slot].eq(7.0).sum() == 4 * 12
    store.factor_grads[0][1][slot].fill_(3.0)
    assert store.grad[slot].eq(3.0).sum() == 4 * 12


def test_rows_of_the_bank_are_whole_vector_registers() -> None:
    assert AdapterStore(LAYERS, max_rank=3).size % 64 == 0


def test_lowest_free_slot_is_taken_and_cleared() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    slots = [store.allocate(4, 1.0) for _ in range(3)]
    store.theta[1].fill_(5.0)
    store.exp_avg[1].fill_(5.0)
    store.steps[1] = 9
    store.release(slots[1])
    store.release(slots[1])  # giving back twice is harmless
    assert store.used == 2
    assert store.allocate(2, 0.5) == 1
    assert store.theta[1].abs().sum() == 0
    assert store.exp_avg[1].abs().sum() == 0
    assert store.steps[1] == 0
    assert store.ranks[1] == 2
    assert store.scaling[1] == 0.5


@pytest.mark.parametrize("grow", ["slots", "rank"])
def test_growth_keeps_every_adapter_and_its_moments(grow: str) -> None:
    store = AdapterStore(LAYERS, max_rank=4, head_features=5)
    slot = store.allocate(3, 2.0)
    state = {name: random_factors(3, seed) for seed, name in enumerate(("theta", "exp_avg", "exp_avg_sq"))}
    store.write(slot, state)
    store.steps[slot] = 11
    pending = torch.arange(24.0).view(3, 8)
    store.factor_grads[0][0][slot, :3] = pending
    head, head_grad = torch.arange(18.0).view(3, 6), torch.arange(6.0) - 9
    store.write_head(slot, head)
    store.head_grads[slot] = head_grad
    other = store.allocate(4, 1.0) if grow == "slots" else store.allocate(9, 1.0)
    assert other != slot
    read = store.read(slot)
    assert all(same(read[name], state[name]) for name in state)
    assert torch.equal(store.factor_grads[0][0][slot, :3], pending)
    assert torch.equal(store.read_head(slot), head)
    assert torch.equal(store.head_grads[slot], head_grad)
    assert store.steps[slot] == 11
    assert store.scaling[slot] == 2.0


def test_reading_copies() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    slot = store.allocate(4, 1.0)
    before = store.adapter(slot)
    store.theta.fill_(1.0)
    assert all(a.abs().sum() == 0 and b.abs().sum() == 0 for a, b in before)


def test_padding_stays_outside_a_small_rank() -> None:
    store = AdapterStore(LAYERS, max_rank=6)
    slot = store.allocate(2, 1.0)
    store.load_adapter(slot, random_factors(2, 0))
    a, b = store.factors[0]
    assert a[slot, 2:].abs().sum() == 0
    assert b[slot, :, 2:].abs().sum() == 0
    with pytest.raises(EngineError, match=r"rank 3 .*slot 0.* 2"):
        store.load_adapter(slot, random_factors(3, 0))


def test_move_takes_everything_along() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    first, second = store.allocate(4, 1.0), store.allocate(3, 0.25)
    state = {name: random_factors(3, seed) for seed, name in enumerate(("theta", "exp_avg", "exp_avg_sq"))}
    store.write(second, state)
    store.steps[second] = 5
    store.release(first)
    store.move(second, first)
    read = store.read(first)
    assert all(same(read[name], state[name]) for name in state)
    assert (store.steps[first], store.ranks[first], store.scaling[first]) == (5, 3, 0.25)


def test_start_is_peft_s_and_depends_on_seed_and_layer_only() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    slots = [store.allocate(4, 1.0) for _ in range(3)]
    for slot, seed in zip(slots, (1, 1, 2)):
        store.initialise(slot, seed)
    first, twin, other = (store.adapter(s) for s in slots)
    assert same(first, twin)
    assert not torch.equal(first[0][0], other[0][0])
    for (a, b), shape in zip(first, LAYERS):
        assert b.abs().sum() == 0
        # Kaiming-uniform with a = sqrt(5): U(-1/sqrt(in), 1/sqrt(in)).
        assert a.abs().max() <= shape.in_features**-0.5
        assert a.abs().max() > 0.8 * shape.in_features**-0.5
