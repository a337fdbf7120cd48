"""Properties of the composed losses that need no model and no oracle."""

import pytest
import torch

from agilerl import functional as fn

MODES = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"]
OBJECTIVES = ["grpo", "gspo", "turn", "rloo", "cispo", "reinforce"]


def batch(seed=0, rows=8, length=6, dtype=torch.float64, on_policy=False):
    """Rows of ragged length, one of them empty, two turns with an environment token between them, groups of four."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=g)
    lengths[0], lengths[1], lengths[-1] = length, 0, 1
    mask = torch.arange(length) < lengths[:, None]
    mask[:, 2] = False
    turn_ids = torch.where(mask, (torch.arange(length) > 2).long(), -1)
    logp = -torch.rand(rows, length, generator=g, dtype=dtype) - 0.1
    noise = torch.randn(2, rows, length, generator=g, dtype=dtype)
    return {
        "logp": logp,
        "old": logp.clone() if on_policy else logp - 0.3 * noise[0],
        "ref": logp + 0.3 * noise[1],
        "mask": mask,
        "turn_ids": turn_ids,
        "rewards": torch.randn(rows, generator=g, dtype=dtype),
        "groups": torch.arange(rows) // 4,
    }


def tokens(b, objective="grpo", beta=0.0, advantages=None):
    if advantages is None:
        advantages = fn.group_advantages(b["rewards"], b["groups"])
    advantages = fn.broadcast_rows(advantages, b["mask"])
    level = {"gspo": "trajectory", "rloo": "trajectory", "turn": "turn"}.get(objective, "token")
    lr = fn.log_ratio(b["logp"], b["old"], b["mask"])
    reduction = "sum" if objective == "rloo" else "mean"
    lr = fn.pool_log_ratio(lr, b["mask"], level, turn_ids=b["turn_ids"], reduction=reduction)
    ratio = fn.importance_ratio(lr)
    if objective == "cispo":
        loss = fn.cispo(ratio, advantages, b["logp"], mask=b["mask"])
    elif objective == "reinforce":
        loss = fn.reinforce(b["logp"], advantages, mask=b["mask"])
    else:
        loss = fn.clipped_surrogate(ratio, advantages, 0.2, 0.2, mask=b["mask"])
    if beta:
        loss = loss + beta * fn.kl_estimate(b["logp"], b["ref"], "k3", mask=b["mask"])
    return loss


def gradient(b, objective="grpo", mode="seq-mean-token-mean", splits=1, beta=0.0, advantages=None):
    """Gradient of the log-probs, accumulated over micro-batches; advantages and denominator are the window's."""
    logp = b["logp"].clone().requires_grad_()
    if advantages is None:
        advantages = fn.group_advantages(b["rewards"], b["groups"])
    denominator = fn.normaliser(b["mask"], mode, max_length=16)
    total = 0.0
    for rows in torch.arange(len(logp)).chunk(splits):
        part = {name: value[rows] for name, value in (b | {"logp": logp}).items()}
        loss = fn.aggregate(tokens(part, objective, beta, advantages[rows]), part["mask"], mode, denominator)
        loss.backward()
        total += float(loss.detach())
    return logp.grad, total


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_accumulate_the_same_gradient(objective, mode, splits):
    whole, value = gradient(batch(), objective, mode, beta=0.1)
    parts, parts_value = gradient(batch(), objective, mode, splits, beta=0.1)
    # Rows do not interact once the denominator is fixed: not close, equal.
    assert torch.equal(parts, whole)
    assert parts_value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_normalisers_of_parts_add_up(mode):
    mask = batch()["mask"]
    parts = [fn.normaliser(part, mode, max_length=16) for part in mask.chunk(4)]
    assert sum(parts) == fn.normaliser(mask, mode, max_length=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_changes_no_bit(objective, dtype):
    b = batch(dtype=dtype)
    junk = {"logp": float("nan"), "old": float("inf"), "ref": float("nan"), "mask": False, "turn_ids": -1}
    padded = b | {k: torch.nn.functional.pad(b[k], (0, 27), value=v) for k, v in junk.items()}
    narrow, wide = gradient(b, objective, beta=0.1), gradient(padded, objective, beta=0.1)
    assert torch.equal(wide[0][:, :6], narrow[0])
    assert torch.equal(wide[0][:, 6:], torch.zeros(8, 27, dtype=dtype))
    assert wide[1] == narrow[1]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nan_in_one_row_leaves_the_others_alone(objective):
    clean, sick = batch(), batch()
    sick["logp"][3] = float("nan")
    a, _ = gradient(clean, objective, beta=0.1)
    b, value = gradient(sick, objective, beta=0.1)
    others = torch.arange(8) != 3
    assert torch.equal(a[others], b[others])
    assert value != value  # NaN: the sickness itself is not hidden


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_nan_and_infinity_reach_nothing(objective):
    b = batch()
    expected, value = gradient(b, objective, beta=0.1)
    for name, junk in (("logp", float("nan")), ("old", float("inf")), ("ref", float("-inf"))):
        b[name] = b[name].masked_fill(~b["mask"], junk)
    found, found_value = gradient(b, objective, beta=0.1)
    assert torch.equal(found, expected)
    assert found_value == value


def test_gradient_on_policy_is_minus_advantage_over_length_over_rows():
    b = batch(on_policy=True)
    found, _ = gradient(b)
    advantages = fn.group_advantages(b["rewards"], b["groups"])
    lengths = b["mask"].sum(1).clamp(min=1)
    expected = torch.where(b["mask"], (-advantages / lengths / 8)[:, None], 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_objectives_agree_with_reinforce(mode):
    b = batch(on_policy=True)
    expected, _ = gradient(b, "reinforce", mode)
    assert expected.abs().max() > 0
    for objective in ("grpo", "cispo"):
        assert torch.equal(gradient(b, objective, mode)[0], expected)
    # A pooled ratio shares a unit's gradient; its tokens have the same advantage here, so nothing changes.
    for objective in ("gspo", "turn"):
        torch.testing.assert_close(gradient(b, objective, mode)[0], expected, rtol=1e-14, atol=1e-17)


def test_a_policy_equal_to_its_reference_has_no_kl():
    b = batch(dtype=torch.float32)
    for estimator in ("k1", "k2", "k3", "k3+"):
        assert torch.equal(fn.kl_estimate(b["logp"], b["logp"].clone(), estimator), torch.zeros(8, 6))


def test_each_agents_rows_may_have_their_own_denominator():
    b = batch()
    loss, mask = tokens(b), b["mask"]
    agents = torch.arange(8) // 4
    own = [fn.normaliser(mask[agents == a], "token-mean") for a in (0, 1)]
    apart = sum(fn.aggregate(loss[agents == a], mask[agents == a], "token-mean", own[a]) for a in (0, 1))
    together = fn.aggregate(loss, mask, "token-mean", torch.tensor(own)[agents])
    torch.testing.assert_close(together, apart, rtol=1e-14, atol=0)
    logp = b["logp"].clone().requires_grad_()
    fn.aggregate(tokens(b | {"logp": logp}), mask, "token-mean", torch.tensor(own)[agents]).backward()
    one = logp.detach()[:4].requires_grad_()
    part = {k: v[:4] for k, v in b.items()} | {"logp": one}
    fn.aggregate(tokens(part), mask[:4], "token-mean", own[0]).backward()
    assert torch.equal(logp.grad[:4], one.grad)
