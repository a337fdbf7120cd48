"""Aggregation over tokens and rows."""

import pytest
import torch

from agilerl.functional import LOSS_NORM_ALIASES, aggregate, aggregate_rows, normaliser

NAN = float("nan")
LOSS = torch.tensor([[1.0, 3.0, NAN, NAN], [6.0, NAN, NAN, NAN], [NAN] * 4])
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("seq-mean-token-mean", (2 + 6) / 3),  # the empty row is 0 and counts
        ("token-mean", 10 / 3),
        ("seq-mean-token-sum", (4 + 6) / 3),
        ("fixed-length", 10 / (3 * 8)),
    ],
)
def test_by_hand(mode, expected):
    denominator = normaliser(MASK, mode, max_length=8)
    assert aggregate(LOSS, MASK, mode, denominator).item() == pytest.approx(expected)
    # One agent's number and a value per row do the same arithmetic.
    per_row = aggregate(LOSS, MASK, mode, torch.full((3,), denominator))
    assert torch.equal(per_row, aggregate(LOSS, MASK, mode, denominator))
    rows = aggregate_rows(LOSS, MASK, mode)
    assert rows.shape == (3,)
    assert rows[2] == 0


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"])
def test_a_window_without_tokens_gives_zero(mode):
    loss = LOSS.clone().requires_grad_()
    nothing = torch.zeros_like(MASK)
    value = aggregate(loss, nothing, mode, normaliser(nothing, mode, max_length=8))
    value.backward()
    assert value == 0
    assert torch.equal(loss.grad, torch.zeros(3, 4))


def test_documented_names_map_to_modes():
    assert LOSS_NORM_ALIASES["micro_batch"] == "seq-mean-token-mean"
    assert LOSS_NORM_ALIASES["accumulation_window"] == "token-mean"
