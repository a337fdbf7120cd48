"""Sums, means and whitening under a mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.functional import fill_masked, masked_mean, masked_sum, masked_whiten, top_entropy_mask

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


def test_sums_and_means_by_hand():
    assert masked_sum(X, MASK) == 7  # 1 + 2 + 4
    assert masked_mean(X, MASK) == pytest.approx(7 / 3)
    assert masked_sum(X, MASK, -1).tolist() == [3, 4, 0]
    assert masked_mean(X, MASK, 1).tolist() == [1.5, 4, 0]  # no valid position: 0, not 0 / 0
    assert masked_sum(X, MASK, 0).tolist() == [5, 2, 0]
    assert masked_mean(torch.ones(3, 1), MASK, 1).tolist() == [1, 1, 0]  # broadcast over the mask


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean, masked_whiten])
def test_masked_nan_reaches_no_gradient(reduce):
    x = X.clone().requires_grad_()
    (reduce(x.exp(), MASK) * 2.0).sum().backward()
    # exp of a masked NaN has a NaN gradient, unless it is filled first: 0 * NaN is the caller's to avoid.
    assert x.grad[MASK].isfinite().all()
    x = X.clone().requires_grad_()
    (reduce(fill_masked(x, MASK).exp(), MASK) * 2.0).sum().backward()
    assert x.grad[~MASK].tolist() == [0.0] * 6


def test_filling_keeps_values_and_types():
    assert fill_masked(X, None) is X
    assert fill_masked(X, MASK, 9.0)[1].tolist() == [4, 9, 9]
    assert fill_masked(torch.arange(3), torch.tensor([True, False, True])).dtype == torch.int64


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 70), padding=st.integers(0, 70))
def test_padding_changes_no_bit_of_a_rows_sum(seed, length, padding):
    x = torch.randn(4, length, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(4, length, dtype=torch.bool)
    wide = torch.nn.functional.pad(x, (0, padding), value=NAN)
    wide_mask = torch.nn.functional.pad(mask, (0, padding))
    assert torch.equal(masked_sum(wide, wide_mask, -1), masked_sum(x, mask, -1))
    assert torch.equal(masked_sum(wide, wide_mask), masked_sum(x, mask))


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_the_gradients_of_sums_are_right(dim):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.arange(4) < torch.tensor([[4], [2], [0]])
    assert torch.autograd.gradcheck(lambda x: masked_sum(x.square(), mask, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda x: masked_sum(x.square(), mask, dim), (x,))
    assert torch.autograd.gradcheck(lambda x: masked_whiten(x, mask), (x,))


def test_whitening_by_hand():
    # values 1, 2, 4: mean 7/3, var (16/9 + 1/9 + 25/9) / 2 = 7/3
    white = masked_whiten(X, MASK)
    expected = [(v - 7 / 3) / (7 / 3 + 1e-8) ** 0.5 for v in (1, 2, 4)]
    assert white[MASK].tolist() == pytest.approx(expected, rel=1e-6)
    assert white[~MASK].tolist() == [0.0] * 6
    kept = masked_whiten(X, MASK, shift_mean=False)
    assert kept[MASK].tolist() == pytest.approx([v + 7 / 3 for v in expected], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1000.3, -7e-5])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_whitening_equal_values_gives_exactly_zero(value, count, dtype):
    mask = torch.arange(10)[None] < count
    white = masked_whiten(torch.full((1, 10), value, dtype=dtype), mask)
    assert white.dtype == dtype
    assert torch.equal(white, torch.zeros(1, 10, dtype=dtype))


def test_whitening_over_a_part_scales_the_rest():
    # Over 1, 2, 4: mean 7/3, variance 7/3. The rest is divided alike and not shifted, so 0 stays 0.
    over = torch.tensor([[True, True], [True, False], [False, False]])
    x = torch.tensor([[1.0, 2.0], [4.0, 0.0], [3.0, 9.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    white = masked_whiten(x, mask, over=over)
    scale = (7 / 3 + 1e-8) ** -0.5
    expected = [(1 - 7 / 3) * scale, (2 - 7 / 3) * scale, (4 - 7 / 3) * scale, 0.0, 3 * scale, 0.0]
    assert white.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(masked_whiten(x, mask, over=mask), masked_whiten(x, mask))
    assert torch.equal(masked_whiten(x, mask, over=torch.zeros_like(mask)), torch.where(mask, x, 0.0))


def test_top_entropy_tokens():
    kept = top_entropy_mask(X, MASK, 2.0)
    assert kept.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
