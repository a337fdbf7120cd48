"""Pooling of log-ratios and the weights against engine mismatch."""

import math

import pytest
import torch

from agilerl.functional import importance_ratio, log_ratio, mismatch_weights, pool_log_ratio

NAN = float("nan")
LR = torch.tensor([[0.1, 0.3, NAN, 0.8], [0.5, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
TURNS = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1], [-1, -1, -1, -1]])


@pytest.mark.parametrize(
    ("level", "reduction", "first_row"),
    [
        ("token", "mean", [0.1, 0.3, 0.0, 0.8]),
        ("turn", "mean", [0.2, 0.2, 0.0, 0.8]),
        ("turn", "sum", [0.4, 0.4, 0.0, 0.8]),
        ("trajectory", "mean", [0.4, 0.4, 0.0, 0.4]),
        ("trajectory", "sum", [1.2, 1.2, 0.0, 1.2]),
    ],
)
def test_pooling_by_hand(level, reduction, first_row):
    pooled = pool_log_ratio(LR, MASK, level, turn_ids=TURNS, reduction=reduction)
    assert pooled[0].tolist() == pytest.approx(first_row)
    assert pooled[1:].tolist() == [[0.5, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_turn_is_the_trajectory_and_one_token_turns_are_tokens(reduction):
    one = torch.where(MASK, 0, -1)
    each = torch.where(MASK, torch.arange(4), -1)

    def pooled(level, turn_ids=None):
        lr = LR.clone().requires_grad_()
        out = pool_log_ratio(lr, MASK, level, turn_ids=turn_ids, reduction=reduction)
        (out * torch.arange(12.0).view(3, 4)).sum().backward()
        return out.detach(), lr.grad

    for a, b in zip(pooled("turn", one), pooled("trajectory")):
        assert torch.equal(a, b)
    for a, b in zip(pooled("turn", each), pooled("token")):
        assert torch.equal(a, b)


def test_each_token_of_a_unit_receives_the_gradient_of_all():
    lr = LR.clone().requires_grad_()
    out = pool_log_ratio(lr, MASK, "trajectory")
    (out * torch.tensor([1.0, 2.0, 100.0, 4.0])).sum().backward()
    assert lr.grad[0].tolist() == pytest.approx([7 / 3, 7 / 3, 0, 7 / 3])  # (1 + 2 + 4) / 3; the masked 100 is not in
    lr = LR.double().nan_to_num(0).requires_grad_()
    for level in ("token", "turn", "trajectory"):
        assert torch.autograd.gradcheck(lambda x, level=level: pool_log_ratio(x, MASK, level, turn_ids=TURNS), (lr,))


def test_log_ratio_sends_no_gradient_to_the_old_policy():
    logp, old = torch.zeros(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    log_ratio(logp, old, MASK).sum().backward()
    assert old.grad is None
    assert torch.equal(logp.grad, MASK.float())


def test_ratios_stay_finite():
    lr = torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)
    ratio = importance_ratio(lr)
    ratio.sum().backward()
    assert ratio.isfinite().all()
    assert lr.grad.isfinite().all()
    assert ratio[1] == 1


# w = exp(old - sampling) per token: 0.5, 1, 4 in the first row, so 2 for the sequence; 3 in the second.
OLD = torch.tensor([[0.5, 1.0, NAN, 4.0], [3.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]]).log()


@pytest.mark.parametrize(
    ("mode", "cap", "expected"),
    [
        ("off", 2.0, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ("token_truncate", 2.5, [[0.5, 1, 1, 2.5], [2.5, 1, 1, 1]]),
        ("token_mask", 2.5, [[0.5, 1, 1, 0], [0, 1, 1, 1]]),
        ("seq_truncate", 2.5, [[2, 2, 1, 2], [2.5, 1, 1, 1]]),
        ("seq_mask", 2.5, [[2, 2, 1, 2], [0, 1, 1, 1]]),
    ],
)
def test_mismatch_weights_by_hand(mode, cap, expected):
    old = OLD.clone().requires_grad_()
    weights = mismatch_weights(old, torch.zeros_like(OLD), MASK, mode, cap)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([*expected, [1, 1, 1, 1]], dtype=torch.float32))


def test_the_default_truncates_tokens_at_two():
    weights = mismatch_weights(torch.full((1, 1), math.log(9.0)), torch.zeros(1, 1), torch.ones(1, 1).bool())
    assert weights.item() == 2.0
