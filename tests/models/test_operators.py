"""Adapter operators: noise of a known size, rank changes that keep the function, merges of products."""

import pytest
import torch

from agilerl.models.operators import Part, merged, resize
from agilerl.models.slots import AdapterStore, LinearShape

LAYERS = [LinearShape("a", 24, 16), LinearShape("b", 16, 24)]


def trained(rank: int = 4, dtype: torch.dtype = torch.float32) -> AdapterStore:
    store = AdapterStore(LAYERS, max_rank=8, dtype=dtype)
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


def test_in_fp64_growing_and_shrinking_back_are_exact() -> None:
    store = trained(dtype=torch.float64)
    before = deltas(store)
    resize(store, 0, 12, seed=1)
    grown = deltas(store)
    assert resize(store, 0, 4, seed=1) == pytest.approx(1.0, abs=1e-14)  # nothing was learned in the new rank
    for old, large, small in zip(before, grown, deltas(store)):
        assert float((large - old).norm() / old.norm()) < 1e-15
        assert float((small - old).norm() / old.norm()) < 1e-14


def test_shrinking_an_adapter_that_has_learned_nothing_leaves_one_that_can_learn() -> None:
    store = AdapterStore(LAYERS, max_rank=4)
    slot = store.allocate(4, 1.0)
    store.initialise(slot, seed=3)
    rows = [a for a, _ in store.adapter(slot)]
    assert resize(store, slot, 2, seed=1) == 1.0
    for row, (a, b) in zip(rows, store.adapter(slot)):
        assert torch.equal(a, row[:2])  # both factors 0 would have no gradient, ever
        assert b.abs().sum() == 0


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


# -- merges -----------------------------------------------------------------------------------------------------------


def factors(seed: int, rank: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rank, s.in_features, generator=g, dtype=torch.float64),
            torch.randn(s.out_features, rank, generator=g, dtype=torch.float64),
        )
        for s in LAYERS
    ]


def wrong(found: list[tuple[torch.Tensor, torch.Tensor]], expected: list[torch.Tensor], scaling: float = 1.0) -> float:
    """Relative error of the deltas."""
    gaps = [scaling * b @ a - delta for (a, b), delta in zip(found, expected)]
    return float(torch.stack([g.norm() for g in gaps]).norm() / torch.stack([d.norm() for d in expected]).norm())


def test_a_rotated_copy_merges_without_any_error_where_averaged_factors_are_mostly_wrong() -> None:
    own = factors(0)
    expected = [b @ a for a, b in own]
    turns = [torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0] for _ in own]
    rotated = [(turn @ a, b @ turn.T) for turn, (a, b) in zip(turns, own)]
    assert wrong(rotated, expected) < 1e-14  # the same policy
    found, energy = merged([Part(own, 1.0, 0.5), Part(rotated, 1.0, 0.5)], 4, 1.0)
    assert wrong(found, expected) < 1e-14
    assert energy == pytest.approx(1.0, abs=1e-14)
    averaged = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in zip(own, rotated)]
    assert wrong(averaged, expected) > 0.3


def test_a_merge_is_the_weighted_sum_as_far_as_the_rank_allows() -> None:
    one, two = factors(1), factors(2, rank=3)
    parts = [Part(one, 2.0, 0.7), Part(two, 0.5, 0.3)]
    whole = [0.7 * 2.0 * b @ a + 0.3 * 0.5 * d @ c for (a, b), (c, d) in zip(one, two)]
    exact, energy = merged(parts, 7, 1.5)
    assert wrong(exact, whole, 1.5) < 1e-14
    assert energy == pytest.approx(1.0, abs=1e-14)
    found, energy = merged(parts, 4, 1.5)
    left, total = 0.0, 0.0
    for delta, (a, b) in zip(whole, found):
        u, s, v = torch.linalg.svd(delta)
        assert torch.allclose(1.5 * b @ a, (u[:, :4] * s[:4]) @ v[:4], atol=1e-12)
        left, total = left + float((s[:4] ** 2).sum()), total + float((s**2).sum())
    assert energy == pytest.approx(left / total, rel=1e-12)


def test_rows_of_a_merge_are_as_long_as_the_parts_and_orthogonal() -> None:
    one, two = factors(1), factors(2)
    found, _ = merged([Part(one, 1.0, 0.5), Part(two, 1.0, 0.5)], 4, 1.0)
    for (a, _), (first, _), (second, _) in zip(found, one, two):
        length = float(torch.cat([first, second]).square().sum(dim=1).mean())
        assert torch.allclose(a @ a.T, length * torch.eye(4, dtype=torch.float64), atol=1e-10)


def test_a_merge_of_adapters_that_have_learned_nothing_can_learn() -> None:
    parts = [Part([(a, torch.zeros_like(b)) for a, b in factors(seed)], 1.0, 0.5) for seed in (1, 2)]
    found, energy = merged(parts, 4, 1.0)
    assert energy == 1.0
    assert all(b.abs().sum() == 0 and a.norm(dim=1).min() > 1 for a, b in found)


def test_a_rank_beyond_the_layer_is_filled_with_zeros() -> None:
    found, _ = merged([Part(factors(1, rank=20), 1.0, 1.0)], 20, 1.0)
    assert found[0][0].shape == (20, 24)
    assert wrong(found, [b @ a for a, b in factors(1, rank=20)]) < 1e-14
