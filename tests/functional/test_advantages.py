"""Advantages by hand, in any order, with missing grades; returns over turns with environment tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl import functional as fn

NAN = float("nan")
NORMS = ["mean_std", "mean_only", "batch_std", "rloo", "mean"]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), norm=st.sampled_from(NORMS))
def test_order_and_labels_of_groups_do_not_matter(seed, norm):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(12, generator=g)
    groups = torch.arange(12) // 3
    expected = fn.group_advantages(rewards, groups, norm=norm)
    order = torch.randperm(12, generator=g)
    labels = torch.tensor([40, -3, 7, 11])
    found = fn.group_advantages(rewards[order], labels[groups][order], norm=norm)
    torch.testing.assert_close(found, expected[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", ["mean_std", "mean_only", "rloo", "mean"])  # batch_std: its scale is that of the batch
def test_other_groups_change_no_bit(norm):
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=g), torch.arange(12) % 3
    whole = fn.group_advantages(rewards, groups, norm=norm)
    for group in range(3):
        rows = groups == group
        assert torch.equal(fn.group_advantages(rewards[rows], groups[rows], norm=norm), whole[rows])


@pytest.mark.parametrize("norm", NORMS)
def test_ungraded_rows_are_left_out(norm):
    graded = fn.group_advantages(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 1]), norm=norm)
    rewards = torch.tensor([1.0, NAN, 0.0, 3.0, float("inf"), 2.0])
    found = fn.group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), norm=norm)
    assert torch.equal(found[[0, 2, 3, 5]], graded)
    assert found[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("value", [0.1, 1e6 + 0.3, 1.0])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(norm, dtype, value):
    rewards = torch.tensor([value] * 7 + [3.0]).to(dtype)
    groups = torch.tensor([0] * 7 + [1])
    found = fn.group_advantages(rewards, groups, norm=norm)
    assert found.tolist() == [0.0] * 8
    assert found.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert fn.zero_variance_groups(rewards, groups).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_spread_of_rounding_noise_counts_as_none(norm):
    rewards = torch.tensor([0.3, 0.3 + 1e-7, 1.0, 1.1], dtype=torch.float64)
    found = fn.group_advantages(rewards, torch.tensor([0, 0, 1, 1]), norm=norm)
    assert found[:2].tolist() == [0.0, 0.0]
    assert (found[2:] != 0).all()


def test_leave_one_out_is_the_difference_from_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    found = fn.group_advantages(rewards, torch.zeros(3, dtype=torch.int64), norm="rloo")
    assert found.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_maxrl_weighs_rare_successes_more():
    # One success of four: mean 1/4, so (1 - 1/4) / (1/4) = 3 and (0 - 1/4) / (1/4) = -1; three of four: 1/3 and -1.
    # A mean that is not above 0 has no such scale: 0.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, -1, 1, -1, 0], dtype=torch.float64)
    found = fn.group_advantages(rewards, torch.arange(12) // 4, norm="mean")
    assert found.tolist() == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0])


def test_no_rows():
    assert fn.group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


# Two rows of a group. Row 0 plays turns 0 and 1 with an environment token between; row 1 plays turn 0 only.
TURNS = torch.tensor([[0, 0, -1, 1, 1], [0, -1, -1, -1, -1]])
TURN_REWARDS = torch.tensor([[1.0, 4.0], [3.0, NAN]])
ONE_GROUP = torch.zeros(2, dtype=torch.int64)


def test_turn_advantages_by_hand():
    # Turn 0: mean 2, so -1 and 1. Turn 1 was played once: the trajectory's advantage, 5 - (5 + 3) / 2 = 1.
    found = fn.turn_advantages(TURN_REWARDS, ONE_GROUP, TURNS, norm="mean_only")
    assert found.tolist() == [[-1, -1, 0, 1, 1], [1, 0, 0, 0, 0]]
    alone = fn.turn_advantages(TURN_REWARDS, ONE_GROUP, TURNS, norm="mean_only", trajectory_fallback=False)
    assert alone.tolist() == [[-1, -1, 0, 0, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("norm", NORMS)
def test_one_turn_equals_the_trajectory(norm):
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, NAN]), torch.zeros(4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]]).bool()
    found = fn.turn_advantages(rewards[:, None], groups, torch.where(mask, 0, -1), norm=norm)
    assert torch.equal(found, fn.broadcast_rows(fn.group_advantages(rewards, groups, norm=norm), mask))


def test_a_reward_belongs_to_the_last_action_token_of_its_turn():
    found = fn.place_rewards(TURN_REWARDS, TURNS)
    assert found.tolist() == [[0, 1, 0, 0, 4], [3, 0, 0, 0, 0]]
    every_token = fn.broadcast_turns(TURN_REWARDS.nan_to_num(0), TURNS)
    assert every_token.tolist() == [[1, 1, 0, 4, 4], [3, 0, 0, 0, 0]]
    mask = TURNS >= 0
    assert fn.discounted_returns(found, mask, 1.0).tolist() == [[5, 5, 0, 4, 4], [3, 0, 0, 0, 0]]
    assert not torch.equal(fn.discounted_returns(every_token, mask, 1.0), fn.discounted_returns(found, mask, 1.0))


@pytest.mark.parametrize("function", [fn.place_rewards, fn.broadcast_turns])
def test_a_turn_without_a_reward_column_is_an_error(function):
    with pytest.raises(ValueError, match=r"turn_ids.*turn 1"):
        function(torch.ones(2, 1), TURNS)


GAE_MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]]).bool()
GAE_REWARDS = torch.tensor([[0.0, 99.0, 0.0, 2.0], [NAN, NAN, NAN, NAN]])
GAE_VALUES = torch.tensor([[0.5, NAN, 1.0, 1.5], [NAN, NAN, NAN, NAN]])


def test_gae_skips_environment_tokens():
    # gamma .5, lambda .5, valid positions 0, 2, 3 with V .5, 1, 1.5:
    # d3 = 2 - 1.5 = .5; d2 = .5 * 1.5 - 1 = -.25; d0 = .5 * 1 - .5 = 0
    # A3 = .5; A2 = -.25 + .25 * .5 = -.125; A0 = 0 + .25 * -.125 = -.03125
    advantages, returns = fn.gae(GAE_REWARDS, GAE_VALUES, GAE_MASK, 0.5, 0.5)
    assert advantages.tolist() == [[-0.03125, 0, -0.125, 0.5], [0, 0, 0, 0]]
    assert returns.tolist() == [[0.46875, 0, 0.875, 2.0], [0, 0, 0, 0]]  # A + V


def test_gae_bootstraps_from_a_given_last_value():
    # One position: A = r + gamma * bootstrap - V = 1 + .5 * 4 - 2
    ones = torch.ones(1, 1)
    advantages, _ = fn.gae(ones, 2 * ones, ones.bool(), 0.5, 0.9, bootstrap=torch.tensor([4.0]))
    assert advantages.item() == 1.0


def test_gae_over_turns():
    values = torch.tensor([[0.1, 0.2, NAN, 0.3, 0.4], [0.5, NAN, NAN, NAN, NAN]])
    final = fn.pool_turn_values(values, TURNS, 2)
    torch.testing.assert_close(final, torch.tensor([[0.2, 0.4], [0.5, 0.0]]))
    mean = fn.pool_turn_values(values, TURNS, 2, "mean")
    torch.testing.assert_close(mean, torch.tensor([[0.15, 0.35], [0.5, 0.0]]))
    advantages, _ = fn.gae(TURN_REWARDS, final, TURN_REWARDS.isfinite(), 1.0, 1.0)
    # A_1 = 4 - .4; A_0 = 1 + .4 - .2 + A_1 = 4.8; row 1: 3 - .5
    torch.testing.assert_close(advantages, torch.tensor([[4.8, 3.6], [2.5, 0.0]]))
    torch.testing.assert_close(fn.broadcast_turns(advantages, TURNS)[0], torch.tensor([4.8, 4.8, 0.0, 3.6, 3.6]))


def test_turn_values_carry_gradient_past_masked_nan():
    for reduction, expected in (("final_value", [0, 1, 0, 0, 1]), ("mean", [0.5, 0.5, 0, 0.5, 0.5])):
        values = torch.tensor([[1.0, 2.0, NAN, 3.0, 4.0]], requires_grad=True)
        fn.pool_turn_values(values, TURNS[:1], 2, reduction).sum().backward()
        assert values.grad.tolist() == [expected]


def test_return_batch_normalisation_by_hand():
    # Returns at gamma .5, rewards 0, 2 | 4: (1, 2) and 4. Mean 7/3, var 7/3 (ddof 1).
    rewards, mask = torch.tensor([[0.0, 2.0], [4.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    found = fn.rebn(rewards, mask, 0.5)
    expected = [(v - 7 / 3) / (7 / 3) ** 0.5 for v in (1, 2, 4)]
    assert found[mask].tolist() == pytest.approx(expected, rel=1e-6)
    assert found[1, 1] == 0


def test_reinforce_plus_plus_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    rewards = torch.tensor([1.0, 4.0, NAN])
    # Returns 1, 1 | 4, the third row has no grade: mean 2, var (1 + 1 + 4) / 2 = 3.
    expected = [-(3**-0.5), -(3**-0.5), 2 * 3**-0.5]
    found = fn.reinforce_plus_plus(rewards, mask)
    assert found[:2][mask[:2]].tolist() == pytest.approx(expected, rel=1e-6)
    assert found[2].tolist() == [0, 0, 0]
    # A penalty of 3 on row 1's only token makes the returns 1, 1 | 1: nothing to learn.
    penalty = torch.tensor([[0.0, 0.0, NAN], [3.0, NAN, NAN], [1.0, 1.0, 1.0]])
    assert torch.equal(fn.reinforce_plus_plus(rewards, mask, penalty=penalty), torch.zeros(3, 3))


def test_reinforce_plus_plus_baseline_subtracts_the_group_mean_first():
    mask = torch.ones(5, 1, dtype=torch.bool)
    rewards, groups = torch.tensor([1.0, 3.0, 11.0, 13.0, NAN]), torch.tensor([0, 0, 1, 1, 1])
    found = fn.reinforce_plus_plus_baseline(rewards, groups, mask)
    # Minus the mean: -1, 1, -1, 1; var 4/3.
    assert found[:, 0].tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5, -(0.75**0.5), 0.75**0.5, 0], rel=1e-6)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_overlong_penalty(length, expected):
    # Lmax 100, Lc 20: (100 - 20 - L) / 20 between 80 and 100 tokens.
    assert fn.overlong_penalty(torch.tensor([length]), 100, 20).item() == pytest.approx(expected)


def test_rows_without_an_advantage():
    advantages = torch.tensor([[0.0, NAN], [0.0, -0.2], [0.05, 0.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    assert fn.nonzero_advantage_rows(advantages, mask).tolist() == [False, True, True]
    assert fn.nonzero_advantage_rows(advantages, mask, 0.1).tolist() == [False, True, False]


def test_credit_carries_no_gradient():
    rewards = torch.tensor([1.0, 2.0], requires_grad=True)
    values = torch.ones(2, 3, requires_grad=True)
    assert not fn.group_advantages(rewards, ONE_GROUP).requires_grad
    assert not fn.gae(torch.ones(2, 3), values, torch.ones(2, 3).bool(), 1.0, 1.0)[1].requires_grad
