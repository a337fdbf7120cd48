"""The DPO family: values by hand, gradients in the right direction, independence of the split."""

import math

import pytest
import torch

from agilerl import functional as fn

BETA = 0.5


def sigma(x):
    return 1 / (1 + math.exp(-x))


def scores(chosen, rejected, tokens=(4, 2), ref=0.0):
    """Pairs with the given log-ratios over a reference of ``ref``."""
    c, r = (torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected))
    base = torch.full_like(c, ref)
    count = torch.ones_like(c, dtype=torch.int64)
    return fn.PreferenceScores(
        (c + base).requires_grad_(), (r + base).requires_grad_(), base, base, tokens[0] * count, tokens[1] * count
    )


# c = 0.6, r = -0.4, so Delta = 1 and z = beta Delta = 0.5; beta c = 0.3, beta r = -0.2.
L, Lm = math.log(sigma(0.5)), math.log(sigma(-0.5))
M = sigma(0.5 / 0.05)
BY_HAND = {
    "sigmoid": -L,
    "cdpo": -0.9 * L - 0.1 * Lm,
    "robust": (-0.9 * L + 0.1 * Lm) / 0.8,
    "hinge": 0.5,
    "ipo": (0.6 / 4 + 0.4 / 2 - 1) ** 2,  # 1 / (2 beta) = 1
    "apo_zero": 1 - sigma(0.3) + sigma(-0.2),
    "apo_down": sigma(0.3) + 1 - sigma(0.5),
    "sppo_hard": (0.6 - 1) ** 2 + (-0.4 + 1) ** 2,
    "nca_pair": -math.log(sigma(0.3)) - 0.5 * math.log(sigma(-0.3)) - 0.5 * math.log(sigma(0.2)),
    "exo_pair": sigma(0.5) * (L - math.log(0.9)) + sigma(-0.5) * (Lm - math.log(0.1)),
    "bco_pair": -math.log(sigma(0.3 - 0.05)) - math.log(sigma(0.05 + 0.2)),  # baseline (0.3 - 0.2) / 2
    "aot": -L,
    "aot_pair": -L,
    "discopop": -L * (1 - M) + math.exp(-0.5) * M,
}
# Without a reference: log-probs of -1.4 in 4 tokens and -2.4 in 2, so -0.35 and -1.2 a token.
ODDS = -0.35 - math.log(1 - math.exp(-0.35)) + 1.2 + math.log(1 - math.exp(-1.2))
FREE = {
    "simpo": -math.log(sigma(0.5 * 0.85 - 0.5)),  # gamma 0.5
    "cpo": -math.log(sigma(0.5)),
    "orpo": -0.5 * math.log(sigma(ODDS)),
}
SMOOTHED = {"cdpo", "robust", "exo_pair"}


def options(name):
    return fn.PreferenceOptions(label_smoothing=0.1 if name in SMOOTHED else 0.0)


def test_no_loss_is_left_untested():
    assert {*BY_HAND, *FREE} == set(fn.PREFERENCE_LOSSES)


@pytest.mark.parametrize("name", FREE)
def test_losses_without_a_reference_by_hand(name):
    found = fn.PREFERENCE_LOSSES[name](scores([0.6], [-0.4], ref=-2.0), BETA, fn.PreferenceOptions())
    assert found.tolist() == pytest.approx([FREE[name]])


def test_certain_completions_have_finite_odds():
    s = scores([0.0], [-0.4])
    fn.preference_loss(s, {"orpo": 1.0}, BETA, pairs=1).backward()
    assert s.policy_chosen.grad.isfinite().all()
    assert s.policy_rejected.grad.isfinite().all()


def test_tokens_beyond_the_common_length_count_less():
    logp = torch.tensor([[-1.0, -2.0, -4.0, -8.0]], dtype=torch.double, requires_grad=True)
    other = torch.tensor([[-3.0, -5.0, 9.0, 9.0]], dtype=torch.double, requires_grad=True)
    ref = torch.full_like(logp, -1.0).detach()
    masks = (torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, True, False, False]]))
    s = fn.preference_scores((logp, other), (ref, ref), masks, ld_alpha=0.25)
    assert (s.policy_chosen.item(), s.ref_chosen.item()) == (-1 - 2 - 0.25 * 12, -2 - 0.25 * 2)
    assert (s.policy_rejected.item(), s.ref_rejected.item()) == (-8, -2)
    fn.preference_loss(s, {"sft": 1.0}, BETA, pairs=1, chosen_tokens=4).backward()
    assert logp.grad.tolist() == [[-0.25] * 4]  # the likelihood is that of all tokens


def test_pairs_that_the_policy_would_say_weigh_more():
    logp = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]], requires_grad=True)
    collision = torch.tensor([[0.5, 1.5], [2.0, float("nan")]])
    masks = torch.tensor([[True, True], [True, False]])
    (pc, pr), (hc, hr), (mc, mr) = (x[:, None] for x in (logp, collision, masks))
    s = fn.preference_scores((pc, pr), (torch.zeros_like(pc), torch.zeros_like(pr)), (mc, mr), collision=(hc, hr))
    weight = math.exp((-0.5 - 0.5) / 2) * math.exp(-1.0)
    assert s.weights.tolist() == pytest.approx([weight])
    assert not s.weights.requires_grad
    plain = fn.preference_scores((pc, pr), (torch.zeros_like(pc), torch.zeros_like(pr)), (mc, mr))
    loss, other = (fn.preference_loss(x, {"hinge": 1.0}, BETA, pairs=1).item() for x in (s, plain))
    assert loss == pytest.approx(weight * other)


@pytest.mark.parametrize("ref", [0.0, -7.0])
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name, ref):
    found = fn.PREFERENCE_LOSSES[name](scores([0.6], [-0.4], ref=ref), BETA, options(name))
    assert found.shape == (1,)
    assert found.item() == pytest.approx(BY_HAND[name])


@pytest.mark.parametrize("name", [*BY_HAND, *FREE])
def test_a_step_separates_the_pair(name):
    s = scores([0.6], [-0.4], ref=-2.0)
    fn.preference_loss(s, {name: 1.0}, BETA, pairs=1, options=options(name)).backward()
    # Down the gradient, the chosen log-prob gains on the rejected one.
    assert s.policy_rejected.grad.item() - s.policy_chosen.grad.item() > 0


def test_discopop_rises_where_training_starts():
    # Part of the published loss, not a slip: at Delta = 0, (1 - log 2) / (4 tau) outweighs both falling branches.
    s = scores([0.0], [0.0])
    fn.preference_loss(s, {"discopop": 1.0}, BETA, pairs=1).backward()
    slope = (1 - math.log(2)) / (4 * 0.05) - 0.5 * 0.5 - 0.5 * 1.0
    assert s.policy_chosen.grad.item() == pytest.approx(BETA * slope)


@pytest.mark.parametrize("name", [*BY_HAND, *FREE])
def test_gradients_by_finite_differences(name):
    s = scores([0.6, -0.3], [-0.4, 0.9], ref=-2.0)

    def loss(chosen, rejected):
        moved = fn.PreferenceScores(chosen, rejected, s.ref_chosen, s.ref_rejected, s.chosen_tokens, s.rejected_tokens)
        fixed = fn.PreferenceOptions(options(name).label_smoothing, reward_baseline=0.05)
        return fn.PREFERENCE_LOSSES[name](moved, BETA, fixed)

    assert torch.autograd.gradcheck(loss, (s.policy_chosen, s.policy_rejected))


def test_aot_compares_quantiles_not_pairs():
    a = fn.PREFERENCE_LOSSES["aot_pair"](scores([1.0, 2.0], [0.0, 0.5]), BETA, fn.PreferenceOptions())
    b = fn.PREFERENCE_LOSSES["aot_pair"](scores([2.0, 1.0], [0.0, 0.5]), BETA, fn.PreferenceOptions())
    assert torch.equal(a, b)


def test_scores_are_sums_over_completion_tokens():
    nan = float("nan")
    logp = torch.tensor([[-1.0, -2.0, nan]], requires_grad=True)
    other = torch.tensor([[-3.0, nan, nan]], requires_grad=True)
    ref = torch.tensor([[-0.5, -0.5, nan]])
    masks = (torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]]))
    s = fn.preference_scores((logp, other), (ref, ref), masks)
    assert (s.chosen.item(), s.rejected.item(), s.delta.item()) == (-2.0, -2.5, 0.5)
    assert (s.chosen_tokens.item(), s.rejected_tokens.item()) == (2, 1)
    fn.preference_loss(s, {"sigmoid": 1.0}, BETA, pairs=1).backward()
    assert logp.grad[0, 2] == 0
    assert logp.grad[0, 0] == pytest.approx(-BETA * sigma(-0.25))


def test_mixtures_split_into_micro_batches():
    chosen, rejected = [0.6, -0.2, 0.1, 0.9], [-0.4, 0.3, 0.2, 0.0]
    mixture = {"sigmoid": 0.8, "ipo": 0.2, "bco_pair": 0.5, "sft": 1.0}
    settings = {"pairs": 4, "chosen_tokens": 16.0, "options": fn.PreferenceOptions(reward_baseline=0.1)}
    whole = fn.preference_loss(scores(chosen, rejected), mixture, BETA, **settings)
    parts = [fn.preference_loss(scores([c], [r]), mixture, BETA, **settings) for c, r in zip(chosen, rejected)]
    torch.testing.assert_close(sum(parts), whole)


def test_metrics():
    found = fn.preference_metrics(scores([0.6, -1.0], [-0.4, 0.0], ref=-2.0), BETA)
    assert found["rewards/chosen"].tolist() == pytest.approx([0.3, -0.5])
    assert found["rewards/margins"].tolist() == pytest.approx([0.5, -0.5])
    assert found["rewards/accuracies"].tolist() == [1, 0]
    assert found["logps/rejected"].tolist() == pytest.approx([-2.4, -2.0])
    assert not any(value.requires_grad for value in found.values())
