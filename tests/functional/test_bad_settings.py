"""Settings that a function does not have, or that do not fit together, are told in a sentence."""

from collections.abc import Callable

import pytest
import torch

from agilerl import functional as fn

ONES, ROWS, MASK = torch.ones(2), torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool)
GROUP = torch.zeros(2, dtype=torch.int64)
TURNS = torch.tensor([[0, 0, -1, 1, 1], [0, -1, -1, -1, -1]])


def preference(losses: dict[str, float], beta: float = 0.5) -> torch.Tensor:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    return fn.preference_loss(fn.PreferenceScores(zero, zero, zero, zero, one, one), losses, beta, pairs=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fn.group_advantages(ONES, GROUP, norm="std"), "norm must be one of"),
        (lambda: fn.group_advantages(torch.ones(2, 1), GROUP), r"expected rewards \[B\]"),
        (lambda: fn.turn_advantages(ONES, GROUP, TURNS), r"turn values \[B, K\]"),
        (lambda: fn.pool_turn_values(ROWS, TURNS, 2, "last"), "reduction must be"),
        (lambda: fn.overlong_penalty(torch.tensor([3]), 10, 0), r"cache .* 1 and"),
        (lambda: fn.overlong_penalty(torch.tensor([3]), 10, 11), r"cache .* 1 and"),
        (lambda: fn.aggregate(ROWS, MASK, "mean", 1.0), "loss_norm must be one of"),
        (lambda: fn.normaliser(MASK, "mean"), "loss_norm must be one of"),
        (lambda: fn.normaliser(MASK, "fixed-length"), "needs max_length"),
        (lambda: fn.normaliser(MASK, "fixed-length", max_length=0), "needs max_length"),
        (lambda: fn.kl_estimate(ONES, ONES, "kl"), r"KL estimator .*k1, k2, k3"),
        (lambda: fn.adaptive_kl_coefficient(0.1, 1.0, 0.0, horizon=1.0, samples=1), "target and horizon"),
        (lambda: fn.pool_log_ratio(ROWS, MASK, "turn"), "needs turn_ids"),
        (lambda: fn.pool_log_ratio(ROWS, MASK, "sequence"), "level must be"),
        (lambda: fn.pool_log_ratio(ROWS, MASK, "token", reduction="max"), "reduction must be"),
        (lambda: fn.mismatch_weights(ROWS, ROWS, MASK, "sequence_mask"), "mode must be"),
        (lambda: fn.mismatch_weights(ROWS, ROWS, MASK, cap=0.0), "expected 0 <= floor < cap"),
        (lambda: preference({"dpo": 1.0}), "unknown preference loss"),
        (lambda: preference({"sft": 1.0}), "needs chosen_tokens"),
        (lambda: preference({"sigmoid": 1.0}, 0.0), "beta must be greater"),
        (lambda: preference({"cdpo": 1.0}), "cdpo needs label_smoothing"),
        (lambda: fn.PreferenceOptions(label_smoothing=0.5), "label_smoothing must be in"),
        (lambda: fn.PreferenceOptions(discopop_tau=0.0), "discopop_tau must be greater"),
    ],
)
def test_bad_settings_give_a_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
