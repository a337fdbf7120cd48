"""Credit assignment: advantages from rewards, per group, per turn and per token. Nothing here carries a gradient."""

from typing import Literal, get_args

import torch
from torch import Tensor

from agilerl.functional.masks import ZERO_STD, fill_masked, masked_whiten, ordered_sum

AdvantageNorm = Literal["mean_std", "mean_only", "batch_std", "rloo", "mean"]


def group_advantages(
    rewards: Tensor, groups: Tensor, *, norm: AdvantageNorm = "mean_std", adv_eps: float = 1e-4
) -> Tensor:
    """Return group-relative advantages ``[B]`` from rewards ``[B]`` and integer group labels ``[B]`` in any order.

    | norm | formula | source |
    |---|---|---|
    | mean_std | ``(r - mean_g) / (std_g + adv_eps)`` | GRPO, arXiv 2402.03300 |
    | mean_only | ``r - mean_g`` | Dr.GRPO, arXiv 2503.20783 |
    | batch_std | ``(r - mean_g) / (std_batch + adv_eps)`` | arXiv 2508.08221 |
    | rloo | ``G / (G - 1) (r - mean_g)``: against the mean of the other rows | RLOO, arXiv 2402.14740 |
    | mean | ``(r - mean_g) / mean_g``: rare successes weigh more; 0 unless mean_g > 0 | MaxRL, arXiv 2602.02710 |

    Standard deviations have ddof 1. A group whose std is below 1e-6, and a group of one, give exactly 0. A reward that
    is not finite (NaN: no grade) is left out of all statistics and has the advantage 0. Raises ValueError for an
    unknown norm or if the shapes differ.
    """
    if norm not in get_args(AdvantageNorm):
        raise ValueError(f"norm must be one of {', '.join(get_args(AdvantageNorm))}, found {norm!r}")
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(f"expected rewards [B] and groups [B], found {list(rewards.shape)} and {list(groups.shape)}")
    centred, std, count, values = _group_statistics(rewards, groups)
    if norm == "mean_std":
        advantages = centred / (std + adv_eps)
    elif norm == "batch_std":
        advantages = centred / (_std(values, torch.isfinite(rewards)) + adv_eps)
    elif norm == "rloo":
        advantages = centred * count / (count - 1).clamp(min=1)  # a group of one becomes 0 below
    elif norm == "mean":
        # Of a row without a grade both are 0, and so is its advantage.
        mean = values - centred
        advantages = torch.where(mean > 0, centred / mean, 0.0)
    else:
        advantages = centred
    # Guarding the division is not enough: in a group of equal rewards, ``centred`` is the rounding error of the mean.
    advantages = torch.where((std < ZERO_STD) | (count < 2), torch.zeros_like(advantages), advantages)
    return advantages.to(_float(rewards))


def distillation_advantages(logp: Tensor, teacher_logp: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Return ``-weight (d - b)`` ``[B, L]`` with ``d = log pi - log teacher``, 0 where ``mask`` is False; detached.

    As an advantage of tokens that pi has sampled, its policy gradient is in expectation that of
    ``-weight KL(pi || teacher)`` at each state that pi has reached (without the KL of states to come). The baseline b
    is the mean of d over the tokens of all other rows, which the row has no influence on: unbiased, of less variance.
    Source: on-policy distillation, Agarwal et al., arXiv 2306.13649.
    """
    gap = fill_masked(logp.detach(), mask) - fill_masked(teacher_logp.detach(), mask)
    sums, counts = ordered_sum(gap, 1), mask.sum(1)
    others = (ordered_sum(sums, 0) - sums) / (counts.sum() - counts).clamp(min=1)
    return fill_masked(-weight * (gap - others[:, None]), mask)


def zero_variance_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return a bool ``[B]``: rows of groups without a learning signal (std below 1e-6, or fewer than two grades)."""
    _, std, count, _ = _group_statistics(rewards, groups)
    return (std < ZERO_STD) | (count < 2)


def informative_groups(advantages: Tensor, groups: Tensor) -> Tensor:
    """Return a bool ``[E, K]``: cells of groups in which some member has a non-zero advantage in that column.

    ``advantages [E, K]`` are those of ``group_advantages`` (K = 1) or of turns, ``groups [E]`` integer labels. In every
    other group all members earned the same reward, or there is only one member.
    """
    _, index = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    labels = torch.arange(int(index.max()) + 1 if len(index) else 0, device=index.device)
    # (groups, rows), then (groups, rows, columns).
    member = index == labels[:, None]
    informative: Tensor = (member.unsqueeze(-1) & (advantages != 0)).any(1)
    return informative.index_select(0, index)


def turn_advantages(
    rewards: Tensor,
    groups: Tensor,
    turn_ids: Tensor,
    *,
    norm: AdvantageNorm = "mean_std",
    adv_eps: float = 1e-4,
    trajectory_fallback: bool = True,
) -> Tensor:
    """Return advantages ``[B, L]`` per turn, given to each token of the turn, 0 where ``turn_ids`` is -1.

    ``rewards [B, K]`` holds each turn's reward, NaN for turns that the row does not have; ``groups [B]``;
    ``turn_ids [B, L]``. A turn's reward is compared with the same turn of the group's other members that played it
    (statistics as in ``group_advantages``; ``batch_std`` is that of the turn). If fewer than two members played it, the
    advantage of the row's summed reward is used instead (``trajectory_fallback``), or 0.
    """
    _check_turns(rewards, turn_ids)
    graded = torch.isfinite(rewards)
    columns = []
    # A row without any grade has no return; the sum over none would be one of 0.
    whole = torch.where(graded.any(1), fill_masked(rewards, graded).sum(1), torch.nan)
    fallback = group_advantages(whole, groups, norm=norm, adv_eps=adv_eps)
    for turn in range(rewards.shape[1]):
        column = rewards[:, turn]
        advantages = group_advantages(column, groups, norm=norm, adv_eps=adv_eps)
        if trajectory_fallback:
            _, _, count, _ = _group_statistics(column, groups)
            # A row that did not play this turn keeps its 0: informative_groups looks at cells without tokens too.
            advantages = torch.where((count < 2) & graded[:, turn], fallback, advantages)
        columns.append(advantages)
    return broadcast_turns(torch.stack(columns, 1), turn_ids)


def broadcast_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Give each row's value ``[B]`` to its valid positions ``[B, L]``, 0 elsewhere."""
    return fill_masked(values.unsqueeze(-1).expand(mask.shape), mask)


def broadcast_turns(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Give each turn's value ``[B, K]`` to its tokens ``[B, L]``, 0 where ``turn_ids`` is -1."""
    _check_turns(values, turn_ids)
    return fill_masked(values.gather(1, turn_ids.clamp(min=0)), turn_ids >= 0)


def place_rewards(turn_rewards: Tensor, turn_ids: Tensor) -> Tensor:
    """Put each turn's reward ``[B, K]`` on the last action token of its turn: ``[B, L]``, 0 elsewhere.

    On every token of the turn, the rewards would add up to returns that grow with its length: 5, 4, 3, 2, 1 instead of
    1, 1, 1, 1, 1. A NaN (no grade) becomes 0, so leave rows without a grade out of the mask. The reward of a turn
    without action tokens is dropped.
    """
    _check_turns(turn_rewards, turn_ids)
    member, positions = _members(turn_ids, turn_rewards.shape[1])
    # A turn without action tokens is at -1, where no token is.
    last = torch.where(member, positions[:, None], -1).amax(1)
    here = broadcast_turns(last, turn_ids) == positions
    return fill_masked(broadcast_turns(turn_rewards.nan_to_num(nan=0.0), turn_ids), here & (turn_ids >= 0))


def pool_turn_values(
    values: Tensor, turn_ids: Tensor, turns: int, reduction: Literal["final_value", "mean"] = "final_value"
) -> Tensor:
    """Return one value per turn ``[B, turns]`` from values per token ``[B, L]``, 0 for turns that a row does not have.

    ``final_value``: the value at the turn's last action token; ``mean``: over its action tokens. With ``gae`` over the
    turn axis this gives turn-level advantages. Differentiable, so the value loss can use it as well.
    """
    if reduction not in ("final_value", "mean"):
        raise ValueError(f"reduction must be 'final_value' or 'mean', found {reduction!r}")
    member, positions = _members(turn_ids, turns)
    if reduction == "final_value":
        last = torch.where(member, positions[:, None], -1).amax(1)
        return fill_masked(fill_masked(values, turn_ids >= 0).gather(1, last.clamp(min=0)), last >= 0)
    sums = ordered_sum(fill_masked(values.unsqueeze(-1), member), 1)
    return sums / member.sum(1).clamp(min=1)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns ``[B, L]`` of generalised advantage estimation, 0 where ``mask`` is False.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``R_t = A_t + V_t``, where t + 1 is
    the next *valid* position: environment tokens are skipped, they are neither discounted nor bootstrapped from.
    After the last one the value is ``bootstrap [B]`` (None: 0, the episode is over). Rewards on masked positions are
    ignored. L may also count turns. Source: Schulman et al., arXiv 1506.02438.
    """
    rewards, values = fill_masked(rewards.detach(), mask), fill_masked(values.detach(), mask)
    advantages = torch.zeros_like(values)
    carry = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(values.shape[0])
    following = carry if bootstrap is None else bootstrap.detach().to(values)
    for t in range(values.shape[1] - 1, -1, -1):
        valid, value = mask[:, t], values[:, t]
        advantage = rewards[:, t] + gamma * following - value + gamma * lam * carry
        advantages[:, t] = fill_masked(advantage, valid)
        # Past an environment token both stay as they are: gamma and lambda count action tokens only.
        carry = torch.where(valid, advantage, carry)
        following = torch.where(valid, value, following)
    return advantages, fill_masked(advantages + values, mask)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return ``R_t = r_t + gamma R_{t+1}`` ``[B, L]`` over the valid positions, 0 elsewhere."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def rebn(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return batch normalisation of returns: discounted returns, z-scored over all valid cells of the batch ``[B, L]``.

    Source: GEM, arXiv 2510.01051.
    """
    return masked_whiten(discounted_returns(rewards, mask, gamma), mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, penalty: Tensor | None = None) -> Tensor:
    """Return whitened returns ``[B, L]`` of rewards ``[B]``, each placed on its row's last valid token.

    ``penalty [B, L]`` (``beta * kl`` per token) is subtracted from the token rewards first. Rows whose reward is NaN
    (no grade) are left out and get 0. Source: REINFORCE++, arXiv 2501.03262.
    """
    graded = torch.isfinite(rewards)
    mask = mask & graded.unsqueeze(-1)
    # All action tokens as one turn, so that the reward is on the last of them.
    token_rewards = place_rewards(fill_masked(rewards, graded).unsqueeze(-1), torch.where(mask, 0, -1))
    if penalty is not None:
        token_rewards = token_rewards - fill_masked(penalty.detach(), mask)
    return rebn(token_rewards, mask, gamma)


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, mask: Tensor, *, gamma: float = 1.0, penalty: Tensor | None = None
) -> Tensor:
    """Return ``reinforce_plus_plus`` of rewards minus their group's mean (a group of one or without spread: 0).

    As in the paper, the normalisation is that of the whole batch: if completions differ in length, its mean over tokens
    is not 0, and a group of equal rewards gets minus that mean, divided by the batch's spread.
    """
    centred = group_advantages(rewards, groups, norm="mean_only")
    # group_advantages gives a row without a grade 0, which would count as a reward of 0.
    centred = torch.where(torch.isfinite(rewards), centred, torch.nan)
    return reinforce_plus_plus(centred, mask, gamma=gamma, penalty=penalty)


def nonzero_advantage_rows(advantages: Tensor, mask: Tensor, eps: float = 0.0) -> Tensor:
    """Return a bool ``[B]``: rows with a valid position where ``|A| > eps``; the others have no policy gradient."""
    return (fill_masked(advantages, mask).abs() > eps).any(-1)


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Return DAPO's soft length punishment in [-1, 0] for completion lengths ``[B]`` in tokens.

    0 up to ``max_length - cache``; then ``(max_length - cache - length) / cache``; -1 beyond ``max_length``.
    Raises ValueError unless 0 < cache <= max_length. Source: arXiv 2503.14476, eq. 13.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache must be between 1 and max_length = {max_length} tokens, found {cache}")
    return ((max_length - cache - lengths.to(torch.float32)) / cache).clamp(-1.0, 0.0)


def _group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, per row, reward minus group mean, group std and number of grades; and the filled rewards; in fp64."""
    graded = torch.isfinite(rewards)
    values = fill_masked(rewards.detach().double(), graded)
    _, index = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    labels = torch.arange(int(index.max()) + 1 if len(index) else 0, device=index.device)
    # (groups, rows). A sum in order passes over the zeros of other groups exactly, so that on a CPU the bits of a
    # group's statistics do not depend on what else is in the batch.
    member = (index == labels[:, None]) & graded
    count = member.sum(1)
    mean = ordered_sum(fill_masked(values.expand(member.shape), member), 1) / count.clamp(min=1)
    centred = fill_masked(values - mean[index], graded)
    squares = ordered_sum(fill_masked(centred.square().expand(member.shape), member), 1)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return centred, std[index], count[index], values


def _std(values: Tensor, valid: Tensor) -> Tensor:
    number = valid.sum()
    mean = ordered_sum(fill_masked(values, valid), 0) / number.clamp(min=1)
    squares = ordered_sum(fill_masked((values - mean).square(), valid), 0)
    return (squares / (number - 1).clamp(min=1)).sqrt()


def _float(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.float32


def _members(turn_ids: Tensor, turns: int) -> tuple[Tensor, Tensor]:
    """Return bool ``[B, L, turns]``, True where the token belongs to the turn, and positions ``[L]``."""
    labels = torch.arange(turns, device=turn_ids.device)
    return turn_ids.unsqueeze(-1) == labels, torch.arange(turn_ids.shape[1], device=turn_ids.device)


def _check_turns(values: Tensor, turn_ids: Tensor) -> None:
    if values.dim() != 2 or turn_ids.dim() != 2 or values.shape[0] != turn_ids.shape[0]:
        raise ValueError(
            f"expected turn values [B, K] and turn_ids [B, L], found {list(values.shape)} and {list(turn_ids.shape)}"
        )
    highest = int(turn_ids.max()) if turn_ids.numel() else -1
    if highest >= values.shape[1]:
        raise ValueError(
            f"turn_ids name turn {highest}, but there are values for turns 0 to {values.shape[1] - 1} only"
        )
