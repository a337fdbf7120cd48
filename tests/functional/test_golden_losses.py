"""Every number of golden.txt, reproduced from the package's own functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl import functional as fn

LINES = (Path(__file__).parent / "golden.txt").read_text().splitlines()
FIXTURE = json.loads(LINES[0])
GOLDEN = {key: json.loads(value) for key, _, value in (line.rpartition(" = ") for line in LINES[1:])}
BETA, DPO_BETA, SMOOTHING = 0.04, 0.1, 0.1


class Inputs:
    """The fixture as tensors. Rows 0, 1 and rows 2, 3 are the groups, and the (chosen, rejected) pairs of DPO."""

    def __init__(self, dtype: torch.dtype) -> None:
        lengths = torch.tensor(FIXTURE["LEN"])
        self.mask = torch.arange(5) < lengths[:, None]
        # NaN at every masked position: golden numbers must come out regardless.
        self.logp, self.old, self.ref, self.sampled = (
            torch.tensor(FIXTURE[name], dtype=dtype).masked_fill(~self.mask, float("nan"))
            for name in ("LP", "OLD", "REF", "SMP")
        )
        self.logp.requires_grad_()
        self.rewards = torch.tensor(FIXTURE["R"], dtype=dtype)
        self.groups = torch.tensor([7, 7, 3, 3])
        self.dtype = dtype

    def advantages(self, **options: Any) -> torch.Tensor:
        return fn.group_advantages(self.rewards, self.groups, **options)

    def aggregate(self, loss: torch.Tensor, mode: str, max_length: int = 8) -> torch.Tensor:
        return fn.aggregate(loss, self.mask, mode, fn.normaliser(self.mask, mode, max_length=max_length))

    def ratio(self, level: str = "token", reduction: str = "mean") -> torch.Tensor:
        lr = fn.log_ratio(self.logp, self.old, self.mask)
        return fn.importance_ratio(fn.pool_log_ratio(lr, self.mask, level, reduction=reduction))


def clipped(mode="seq-mean-token-mean", *, low=0.2, high=0.2, level="token", kl=None, swap=False, cap=None, **options):
    def compute(x: Inputs) -> torch.Tensor:
        advantages = fn.broadcast_rows(x.advantages(), x.mask)
        loss = fn.clipped_surrogate(x.ratio(level), advantages, low, high, mask=x.mask, **options)
        if cap is not None:
            loss = loss * fn.mismatch_weights(x.old, x.sampled, x.mask, "token_truncate", cap)
        if kl is not None:
            pair = (x.ref, x.logp) if swap else (x.logp, x.ref)
            loss = loss + BETA * fn.kl_estimate(*pair, kl, mask=x.mask)
        return x.aggregate(loss, mode)

    return compute


def cispo(mode="token-mean", clip_max=5.0, clip_min=None):
    def compute(x: Inputs) -> torch.Tensor:
        advantages = fn.broadcast_rows(x.advantages(), x.mask)
        return x.aggregate(fn.cispo(x.ratio(), advantages, x.logp, clip_max, clip_min, mask=x.mask), mode)

    return compute


def rloo(x: Inputs) -> torch.Tensor:
    advantages = fn.broadcast_rows(x.advantages(norm="rloo"), x.mask)
    loss = fn.clipped_surrogate(x.ratio("trajectory", "sum"), advantages, 0.2, 0.2, mask=x.mask)
    return x.aggregate(loss, "seq-mean-token-mean")


def mean_kl(estimator: str, swap: bool = False):
    def compute(x: Inputs) -> torch.Tensor:
        pair = (x.ref, x.logp) if swap else (x.logp, x.ref)
        return x.aggregate(fn.kl_estimate(*pair, estimator, mask=x.mask), "token-mean")

    return compute


def gradient(loss: Callable[[Inputs], torch.Tensor]):
    return lambda x: torch.autograd.grad(loss(x), x.logp)[0]


def scores(x: Inputs) -> fn.PreferenceScores:
    chosen, rejected = [0, 2], [1, 3]
    pairs = [(t[chosen], t[rejected]) for t in (x.logp, x.ref, x.mask)]
    return fn.preference_scores(*pairs)


def preference(losses: dict[str, float], label_smoothing: float = 0.0):
    def compute(x: Inputs) -> torch.Tensor:
        options = fn.PreferenceOptions(label_smoothing=label_smoothing)
        return fn.preference_loss(scores(x), losses, DPO_BETA, pairs=2, chosen_tokens=9, options=options)

    return compute


def critic_row(x: Inputs):
    values = torch.tensor([[0.1, 0.2, 0.15, 0.3, 0.25]], dtype=x.dtype)
    return torch.tensor([[0.0, 0, 0, 0, 1]], dtype=x.dtype), values, torch.ones(1, 5, dtype=torch.bool)


def gae(gamma: float, lam: float):
    def compute(x: Inputs) -> dict[str, torch.Tensor]:
        advantages, returns = fn.gae(*critic_row(x), gamma, lam)
        return {"adv": advantages[0], "ret": returns[0]}

    return compute


def whitened_gae(x: Inputs) -> torch.Tensor:
    rewards, values, mask = critic_row(x)
    return fn.masked_whiten(fn.gae(rewards, values, mask, 1.0, 0.95)[0], mask)[0]


def value_loss(x: Inputs) -> torch.Tensor:
    rewards, values, mask = critic_row(x)
    returns = fn.gae(rewards, values, mask, 1.0, 0.95)[1]
    new = torch.tensor([[0.4, 0.1, 0.5, 0.3, 0.0]], dtype=x.dtype)
    loss = fn.value_loss(new, values, returns, 0.2, mask=mask)
    return fn.aggregate(loss, mask, "token-mean", fn.normaliser(mask, "token-mean"))


def returns(gamma: float, *, placed: bool = True):
    def compute(x: Inputs) -> torch.Tensor:
        turn_ids, mask = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)
        reward = torch.ones(1, 1, dtype=x.dtype)
        rewards = fn.place_rewards(reward, turn_ids) if placed else fn.broadcast_turns(reward, turn_ids)
        return fn.discounted_returns(rewards, mask, gamma)[0]

    return compute


CASES: dict[str, Callable[[Inputs], Any]] = {
    "adv_trl_eps1e-4": lambda x: x.advantages(),
    "adv_eps1e-6 (tunix/verl)": lambda x: x.advantages(adv_eps=1e-6),
    "adv_eps1e-8 (agilerl)": lambda x: x.advantages(adv_eps=1e-8),
    "adv_mean_only (drgrpo/harmony)": lambda x: x.advantages(norm="mean_only"),
    "adv_rloo": lambda x: x.advantages(norm="rloo"),
    "adv_batch_std": lambda x: x.advantages(norm="batch_std"),
    "grpo b=0": clipped(),
    "bnpo/token-mean b=0 (dapo single micro-batch)": clipped("token-mean"),
    "dr_grpo L=8 b=0 (std-scaled A)": clipped("fixed-length"),
    "seq-mean-token-sum b=0": clipped("seq-mean-token-sum"),
    "grpo b=.04 k3": clipped(kl="k3"),
    "grpo b=.04 k3 REVERSED (agilerl std path)": clipped(kl="k3", swap=True),
    "grpo b=.04 k1 (tunix 'kl')": clipped(kl="k1"),
    "grpo b=.04 k2": clipped(kl="k2"),
    "dapo clip-higher .2/.28": clipped("token-mean", high=0.28),
    "grpo delta=1.3": clipped(delta=1.3),
    "grpo dual-clip c=3 (inactive here)": clipped(dual_clip=3.0),
    "grpo dual-clip c=1.2 (active)": clipped(dual_clip=1.2),
    "gspo eps 3e-4/4e-4 (loss_type grpo, sequence)": clipped(level="trajectory", low=3e-4, high=4e-4),
    "gspo eps .2 (sequence)": clipped(level="trajectory"),
    "cispo eps_high=5 token-mean": cispo(),
    "cispo eps_high=1.2 token-mean": cispo(clip_max=1.2),
    "cispo two-sided [.8,1.2] token-mean": cispo(clip_max=1.2, clip_min=0.8),
    "cispo two-sided [.8,1.2] seq-mean": cispo("seq-mean-token-mean", 1.2, 0.8),
    "grpo + token TIS cap 2": clipped(cap=2.0),
    "grpo + token TIS cap 1.02": clipped(cap=1.02),
    "rloo A=loo eps .2": rloo,
    "mean_kl_token_k1": mean_kl("k1"),
    "mean_kl_token_k2": mean_kl("k2"),
    "mean_kl_token_k3": mean_kl("k3"),
    "mean_kl_token_k3_reversed": mean_kl("k3", swap=True),
    "grad d(grpo b=.04 k3)/dlogp": gradient(clipped(kl="k3")),
    "grad d(gspo eps .2)/dlogp": gradient(clipped(level="trajectory")),
    "grad d(cispo eps_high=5, token-mean)/dlogp (weight detached)": gradient(cispo()),
    "dpo logratios chosen/rejected": lambda x: torch.stack([scores(x).chosen, scores(x).rejected]),
    "dpo sigmoid b=.1": preference({"sigmoid": 1.0}),
    "dpo sigmoid b=.1 label_smoothing=.1 (cDPO; TRL 'robust' differs)": preference({"cdpo": 1.0}, SMOOTHING),
    "dpo robust b=.1 ls=.1": preference({"robust": 1.0}, SMOOTHING),
    "dpo hinge b=.1": preference({"hinge": 1.0}),
    "dpo ipo b=.1 (len-normalised)": preference({"ipo": 1.0}),
    "dpo apo_zero b=.1": preference({"apo_zero": 1.0}),
    "dpo NLL chosen token-mean": preference({"sft": 1.0}),
    "dpo RPO (sigmoid + 1.0*NLL) = agilerl default": preference({"sigmoid": 1.0, "sft": 1.0}),
    "gae g=1 lam=0.95": gae(1.0, 0.95),
    "gae g=1 lam=1": gae(1.0, 1.0),
    "gae g=0.99 lam=0.95": gae(0.99, 0.95),
    "whiten(gae 1,.95) rsqrt(var_ddof1+1e-8)": whitened_gae,
    "value loss .5*mean(max), clip .2": value_loss,
    "returns reward-at-last-token g=1": returns(1.0),
    "returns agilerl broadcast g=1 (length weighted)": returns(1.0, placed=False),
    "token_returns gamma=.9 reward at last": returns(0.9),
}


def test_no_golden_number_is_left_untested():
    assert set(CASES) == set(GOLDEN)
    assert len(GOLDEN) == len(LINES) - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("key", GOLDEN)
def test_golden_number(key, dtype):
    found, expected = CASES[key](Inputs(dtype)), GOLDEN[key]
    # 8 printed decimals; the golden gradients are central differences, good to 1e-9. In fp32, the rounding of dpo's
    # log-ratios is the limit: differences of sums of size 4.
    tolerance = {"atol": 2e-8, "rtol": 1e-8} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-6}
    for part, numbers in expected.items() if isinstance(expected, dict) else [(None, expected)]:
        actual = (found if part is None else found[part]).detach()
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, torch.tensor(numbers, dtype=dtype), **tolerance)


# What others got wrong, and what the default must therefore not give.
