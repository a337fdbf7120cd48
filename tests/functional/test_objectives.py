"""Objectives per token, values and gradients by hand."""

import math

import pytest
import torch

from agilerl import functional as fn

NAN = float("nan")


def slope(loss, x):
    x = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    value = loss(x)
    value.sum().backward()
    return value.item(), x.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected"),
    [
        (1.0, 2.0, {}, (-2.0, -2.0)),
        (1.3, 2.0, {}, (-2.4, 0.0)),  # above 1.2: clipped, no gradient
        (0.5, 2.0, {}, (-1.0, -2.0)),  # below 0.8 with A > 0: the minimum is the free term
        (0.5, -2.0, {}, (1.6, 0.0)),  # below 0.8 with A < 0: clipped
        (1.3, -2.0, {}, (2.6, 2.0)),  # above 1.2 with A < 0: free
        (9.0, -2.0, {}, (18.0, 2.0)),
        (9.0, -2.0, {"dual_clip": 3.0}, (6.0, 0.0)),  # at most -c A
        (9.0, 2.0, {"dual_clip": 3.0}, (-2.4, 0.0)),  # only for A < 0
        (9.0, -2.0, {"delta": 4.0}, (8.0, 0.0)),  # rho capped at delta
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, options, expected):
    advantage = torch.tensor([advantage], dtype=torch.float64)
    found = slope(lambda x: fn.clipped_surrogate(x, advantage, 0.2, 0.2, **options), ratio)
    assert found == pytest.approx(expected)


def test_clip_bounds_may_differ_by_row():
    ratio, advantages = torch.full((2, 3), 1.25), torch.ones(2, 1)
    low, high = torch.tensor([[0.2], [0.2]]), torch.tensor([[0.2], [0.28]])
    found = fn.clipped_surrogate(ratio, advantages, low, high)
    torch.testing.assert_close(found, torch.tensor([[-1.2] * 3, [-1.25] * 3]))
    for row in range(2):
        alone = fn.clipped_surrogate(ratio[row : row + 1], advantages[:1], 0.2, high[row].item())
        assert torch.equal(alone[0], found[row])


def test_clip_regions():
    ratio = torch.tensor([0.7, 0.7, 1.0, 1.3, 1.3])
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0])
    low, high = fn.clip_regions(ratio, advantages, 0.2, 0.2)
    assert low.tolist() == [True, False, False, False, False]
    assert high.tolist() == [False, False, False, False, True]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # -sg(min(9, 5)) * 2 * log pi: value 10 at log pi = -1, gradient -10; the surrogate would give none.
    advantage, ratio = torch.tensor([2.0], dtype=torch.float64), torch.tensor([9.0], dtype=torch.float64)
    assert slope(lambda x: fn.cispo(ratio, advantage, x), -1.0) == pytest.approx((10.0, -10.0))
    # The weight is detached: differentiating exp(x) as well would give another gradient.
    found = slope(lambda x: fn.cispo(x.exp(), advantage, x), -1.0)
    assert found[1] == pytest.approx(-2 * math.exp(-1))
    low = fn.cispo(torch.tensor([0.1]), torch.ones(1), torch.tensor([-1.0]), 5.0, 0.5)
    assert low.item() == pytest.approx(0.5)


def test_reinforce_sft_and_dft_by_hand():
    # At log p = log 0.25: d(-A log p) = -A; d(-log p) = -1; d(-sg(p) log p) = -p = -0.25.
    x, advantage = math.log(0.25), torch.tensor([3.0], dtype=torch.float64)
    assert slope(lambda x: fn.reinforce(x, advantage), x) == pytest.approx((-3 * x, -3.0))
    assert slope(fn.sft, x) == pytest.approx((-x, -1.0))
    assert slope(fn.dft, x) == pytest.approx((-0.25 * x, -0.25))


def test_value_loss_by_hand():
    values = torch.tensor([[0.5, 1.0, 0.0, NAN]], requires_grad=True)
    old, target = torch.tensor([[0.0, 0.9, 0.0, NAN]]), torch.tensor([[1.0, 2.0, 0.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    loss = fn.value_loss(values, old, target, 0.2, mask=mask)
    # (1) V .5, clipped to .2: max(.25, .64) / 2 = .32, no gradient. (2) not clipped: (1 - 2)^2 / 2 = .5, gradient -1.
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.32, 0.5, 0.0, 0.0]]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -1.0, 0.0, 0.0]]))
    plain = fn.value_loss(values, old, target, None, mask=mask).detach()
    torch.testing.assert_close(plain, torch.tensor([[0.125, 0.5, 0.0, 0.0]]))
    region = fn.value_clip_region(values, old, target, 0.2)
    assert region.tolist() == [[True, False, False, False]]


def test_explained_variance_by_hand():
    # R 1, 2, 3 (var 2/3), R - V = 1, 0, 1 (var 2/9): 1 - 1/3.
    returns, values = torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.tensor([[0.0, 2.0, 2.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    assert fn.explained_variance(values, returns, mask).item() == pytest.approx(2 / 3)
    assert fn.explained_variance(values, torch.ones(1, 4), mask).item() == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, a, m: fn.dppo(x, a, a, mask=m),
        lambda x, a, m: fn.sft(x, mask=m),
        lambda x, a, m: fn.dft(x, mask=m),
        lambda x, a, m: fn.value_loss(x, x, a, mask=m),
        lambda x, a, m: fn.kl_estimate(x, a, "k3", mask=m),
    ],
)
def test_masked_nan_reaches_no_value_and_no_gradient(loss):
    x = torch.tensor([[-0.5, NAN]], requires_grad=True)
    value = loss(x, torch.tensor([[-0.7, NAN]]), torch.tensor([[True, False]]))
    assert value[0, 1] == 0
    value.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0, 1] == 0


@pytest.mark.parametrize(
    ("old", "new", "advantage", "divergence", "stopped"),
    [
        (0.5, 0.9, 1.0, "tv", True),  # moved up by .4, and A > 0 would go on
        (0.5, 0.9, -1.0, "tv", False),  # A < 0 leads back
        (0.5, 0.1, -1.0, "tv", True),
        (0.5, 0.1, 1.0, "tv", False),
        (0.001, 0.1, 1.0, "tv", False),  # a ratio of 100, but a move of .099: what a clipped ratio would stop
        # KL of two outcomes: .5 log(.5/.9) + .5 log(.5/.1) = .511; .001 log(.001/.1) + .999 log(.999/.9) = .0997
        (0.5, 0.9, 1.0, "kl", True),
        (0.001, 0.1, 1.0, "kl", False),
    ],
)
def test_dppo_stops_what_leads_out_of_the_trust_region(old, new, advantage, divergence, stopped):
    old, advantages = torch.tensor([math.log(old)], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    value, gradient = slope(lambda x: fn.dppo(x, old, advantages, 0.2, divergence), math.log(new))
    weight = 0.0 if stopped else min(math.exp(math.log(new) - old.item()), 20.0)
    assert gradient == pytest.approx(-weight * advantages.item())
    assert value == pytest.approx(-weight * advantages.item() * math.log(new))


def test_divergence_region_measures_two_outcomes():
    old, new = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)
    distance = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    for limit, expected in ((distance - 1e-9, True), (distance + 1e-9, False)):
        below, above = fn.divergence_region(new.log(), old.log(), torch.tensor([1.0, -1.0]), limit, "kl")
        assert above.tolist() == [expected, False]
        assert below.tolist() == [False, expected]


def test_a_token_that_is_certain_gives_finite_divergences():
    logp = torch.zeros(1, requires_grad=True)
    loss = fn.dppo(logp, torch.tensor([-1e-3]), torch.ones(1), 0.05, "kl")
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()
