"""Adapter operators: noise of a known size, rank changes that keep the function."""

import pytest
import torch

from agilerl.models.operators import add_noise, resize
from agilerl.models.slots import AdapterStore, LinearShape

LAYERS = [LinearShape("a", 24, 16), LinearShape("b", 16, 24)]


def trained(rank: int = 4) -> AdapterStore:
    store = AdapterStore(LAYERS, max_rank=8)
    slot = store.allocate(rank, 2.0)
    g = torch.Generator().manual_seed(0)
    state = {
        name: [
            (torch.randn(rank, s.in_features, generator=g), torch.randn(s.out_features, rank, generator=g))
            for s in LAYERS
        ]
        for name in ("theta", "exp_avg", "exp_avg_sq")
    }
    state["exp_avg_sq"] = [(a.abs(), b.abs()) for a, b in state["exp_avg_sq"]]
    store.write(slot, state)
    store.steps[slot] = 3
    return store


def deltas(store: AdapterStore) -> list[torch.Tensor]:
    return [b @ a for a, b in store.adapter(0)]


@pytest.mark.parametrize("new", [6, 8, 12])
def test_growing_keeps_the_function(new: int) -> None:
    store = trained()
    before, moments = deltas(store), store.read(0)
    assert resize(store, 0, new, seed=1) == 1.0
    assert store.ranks[0] == new
    assert float(store.scaling[0]) == 2.0
    for old, now in zip(before, deltas(store)):
        assert torch.allclose(old, now, atol=1e-5)
    after = store.read(0)
    for (a, b), (old_a, old_b) in zip(after["exp_avg_sq"], moments["exp_avg_sq"]):
        assert torch.equal(a[:4], old_a)
        # The mean, not 0: Adam would otherwise take enormous first steps on the new entries.
        assert a[4:].sub(old_a.mean()).abs().max() < 1e-6
        assert b[:, 4:].sub(old_b.mean()).abs().max() < 1e-6
    assert after["theta"][0][0][4:].abs().min() > 0
    assert after["theta"][0][1][:, 4:].abs().sum() == 0


def test_shrinking_is_the_best_approximation_and_reports_its_energy() -> None:
    store = trained()
    full = deltas(store)
    kept = resize(store, 0, 2, seed=1)
    squares = [torch.linalg.svdvals(d.double()) ** 2 for d in full]
    assert kept == pytest.approx(float(sum(s[:2].sum() for s in squares) / sum(s.sum() for s in squares)), rel=1e-5)
    for whole, now in zip(full, deltas(store)):
        u, s, v = torch.linalg.svd(whole.double())
        best = (u[:, :2] * s[:2]) @ v[:2]
        assert torch.allclose(best.float(), now, atol=1e-4)
    assert store.exp_avg[0].abs().sum() == 0
    assert store.steps[0] == 0


def test_noise_has_the_size_it_was_asked_for() -> None:
    store = trained()
    before = deltas(store)
    add_noise(store, 0, 0.03, seed=1, key=(2, 7))
    for old, now in zip(before, deltas(store)):
        assert float((now - old).norm() / old.norm()) == pytest.approx(0.03, rel=1e-3)
    again = trained()
    add_noise(again, 0, 0.03, seed=1, key=(2, 7))
    assert torch.equal(again.theta, store.theta)
    add_noise(again, 0, 0.03, seed=1, key=(2, 8))
    assert not torch.equal(again.theta, store.theta)


def test_a_fresh_adapter_stays_the_base_under_noise() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    slot = store.allocate(4, 1.0)
    store.initialise(slot, seed=3)
    add_noise(store, slot, 0.1, seed=1, key=(0,))
    assert all(d.abs().sum() == 0 for d in deltas(store))
