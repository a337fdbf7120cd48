"""KL estimators, their gradients and their places."""

import math

import pytest
import torch

from agilerl import functional as fn

ESTIMATORS = ["k1", "k2", "k3", "k3+"]


def value_and_slope(estimator, difference, clamp=None, dtype=torch.float64):
    logp = torch.tensor([difference], dtype=dtype, requires_grad=True)
    kl = fn.kl_estimate(logp, torch.zeros(1, dtype=dtype), estimator, clamp)
    kl.sum().backward()
    return kl.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # pi - ref = 5, so exp(ref - pi) = e^-5
        ("k1", 5.0, 1.0),
        ("k2", 12.5, 5.0),
        ("k3", math.exp(-5) + 4, 1 - math.exp(-5)),  # 0.993; the reversed form has 147
        ("k3+", math.exp(-5) + 4, 5.0),
    ],
)
def test_estimators_by_hand(estimator, value, gradient):
    assert value_and_slope(estimator, 5.0) == pytest.approx((value, gradient))


def test_estimators_agree_with_the_true_kl_in_expectation():
    g = torch.Generator().manual_seed(0)
    pi, ref = torch.log_softmax(torch.randn(2, 50, dtype=torch.float64, generator=g), -1)
    true = (pi.exp() * (pi - ref)).sum()
    for estimator in ("k1", "k3", "k3+"):
        torch.testing.assert_close((pi.exp() * fn.kl_estimate(pi, ref, estimator)).sum(), true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_huge_difference_stays_finite_and_clamps(estimator, dtype):
    for difference in (-500.0, 500.0):
        assert all(math.isfinite(v) for v in value_and_slope(estimator, difference, dtype=dtype))
        value, gradient = value_and_slope(estimator, difference, 10.0, dtype)
        assert abs(value) == 10.0
        assert gradient == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_never_leads_away_from_the_reference(dtype):
    for difference in (-1.0, -59.0, -60.0):
        value, gradient = value_and_slope("k3", difference, dtype=dtype)
        assert value == pytest.approx(math.expm1(-difference) + difference, rel=1e-6)
        assert gradient == pytest.approx(-math.expm1(-difference), rel=1e-6)
    at_the_limit = value_and_slope("k3", -60.0, dtype=dtype)[0]
    for difference in (-60.1, -61.0, -500.0):
        assert value_and_slope("k3", difference, dtype=dtype) == (at_the_limit, 0.0)


def test_no_gradient_reaches_the_reference():
    pi, ref = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    fn.kl_estimate(pi, ref, "k3").sum().backward()
    assert ref.grad is None


def test_advantage_shaping_by_hand():
    nan = float("nan")
    kl, mask = torch.tensor([[1.0, 3.0, nan]], requires_grad=True), torch.tensor([[True, True, False]])
    found = fn.kl_shaped_advantages(torch.tensor([[10.0, 10.0, nan]]), kl, mask, 0.5)
    assert found.tolist() == [[10.5, 9.5, 0.0]]  # 10 + .5 (2 - 1), 10 + .5 (2 - 3)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1 * 1.002),
        (60.0, 0.1 * 1.002),
        (5.5, 0.1 * 1.001),
        (0.0, 0.1 * 0.998),
        (5.0, 0.1),
        (math.nan, 0.1),
    ],
)
def test_adaptive_coefficient(kl, expected):
    # target 5, 100 of 10,000 samples: 1 + clip(kl / 5 - 1, -.2, .2) / 100
    assert fn.adaptive_kl_coefficient(0.1, kl, 5.0, horizon=10_000, samples=100) == pytest.approx(expected)
