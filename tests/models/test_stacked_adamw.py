"""Stacked AdamW against torch's own optimizer, one agent at a time."""

import pytest
import torch

from agilerl.models import slots as bank
from agilerl.models.slots import AdamWSettings, AdapterStore, LinearShape, adamw_step

LAYERS = [LinearShape("a", 8, 12), LinearShape("b", 12, 8)]
SETTINGS = [
    AdamWSettings(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
    AdamWSettings(lr=3e-2, beta1=0.8, beta2=0.95, eps=1e-6, max_grad_norm=None),
    AdamWSettings(lr=1e-5, max_grad_norm=100.0),
]


def filled(dtype: torch.dtype = torch.float64) -> AdapterStore:
    store = AdapterStore(LAYERS, max_rank=4, dtype=dtype)
    store.reserve(3)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        slot = store.allocate(4, 1.0)
        store.theta[slot] = torch.randn(store.size, generator=g, dtype=dtype)
    return store


def gradients(store: AdapterStore, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(store.theta.shape, generator=g, dtype=store.dtype) * 0.1


def test_agrees_with_torch_adamw_and_clipping_in_fp64() -> None:
    store = filled()
    parameters = [torch.nn.Parameter(store.theta[i].clone()) for i in range(3)]
    optimizers = [
        torch.optim.AdamW([p], lr=s.lr, betas=(s.beta1, s.beta2), eps=s.eps, weight_decay=s.weight_decay)
        for p, s in zip(parameters, SETTINGS)
    ]
    for step in range(5):
        store.grad.copy_(gradients(store, step))
        norms, applied = adamw_step(store, [0, 1, 2], SETTINGS, [True] * 3)
        assert applied == [True] * 3
        for i, (p, o, s) in enumerate(zip(parameters, optimizers, SETTINGS)):
            p.grad = gradients(store, step)[i]
            norm = torch.nn.utils.clip_grad_norm_([p], s.max_grad_norm or float("inf"))
            assert norms[i] == pytest.approx(float(norm), rel=1e-12)
            o.step()
    for i, p in enumerate(parameters):
        assert (store.theta[i] - p.detach()).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_agent_at_a_time_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    together, alone = filled(dtype), filled(dtype)
    for step in range(3):
        for store in (together, alone):
            store.grad.copy_(gradients(store, step))
        adamw_step(together, [0, 1, 2], SETTINGS, [True] * 3)
        for slot in (2, 0, 1):
            adamw_step(alone, [slot], [SETTINGS[slot]], [True])
    for name in ("theta", "exp_avg", "exp_avg_sq", "steps"):
        assert torch.equal(getattr(together, name), getattr(alone, name))


@pytest.mark.parametrize("fault", ["nan", "inf", "unhealthy"])
def test_a_sick_agent_keeps_its_bits_and_the_others_theirs(fault: str) -> None:
    store, healthy = filled(), filled()
    for s in (store, healthy):
        s.grad.copy_(gradients(s, 0))
    before = [getattr(store, n)[1].clone() for n in ("theta", "exp_avg", "exp_avg_sq", "steps")]
    if fault != "unhealthy":
        store.grad[1, 3] = float(fault)
    _, applied = adamw_step(store, [0, 1, 2], SETTINGS, [True, fault != "unhealthy", True])
    adamw_step(healthy, [0, 1, 2], SETTINGS, [True] * 3)
    assert applied == [True, False, True]
    for value, name in zip(before, ("theta", "exp_avg", "exp_avg_sq", "steps")):
        assert torch.equal(getattr(store, name)[1], value)
        assert torch.equal(getattr(store, name)[[0, 2]], getattr(healthy, name)[[0, 2]])


def test_slots_that_are_absent_do_not_move() -> None:
    store = filled()
    store.grad.copy_(gradients(store, 0))
    before = store.theta.clone()
    adamw_step(store, [0, 2], [SETTINGS[0], SETTINGS[2]], [True, True])
    assert torch.equal(store.theta[1], before[1])
    assert store.steps.tolist() == [1, 0, 1]
    assert not torch.equal(store.theta[0], before[0])


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0]])
def test_some_columns_at_a_time_give_the_bits_of_all_at_once(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    banks = []
    for elements in (2**22, 1):
        monkeypatch.setattr(bank, "_STEP_ELEMENTS", elements)
        store = filled(torch.float32)
        assert (len(bank._slices(store.size, elements)) > 1) == (elements == 1)
        for step in range(3):
            store.grad.copy_(gradients(store, step))
            adamw_step(store, slots, [SETTINGS[i] for i in slots], [True] * len(slots))
        banks.append([store.theta, store.exp_avg, store.exp_avg_sq])
    assert all(map(torch.equal, *banks))
