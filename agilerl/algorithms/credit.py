"""Credit: from the rewards of a batch to the advantage of each token, as far as algorithms share it."""

import torch
from torch import Tensor

from agilerl.algorithms.config import GroupConfig, PolicyConfig, SurrogateConfig
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import (
    broadcast_rows,
    broadcast_turns,
    fill_masked,
    group_advantages,
    informative_groups,
    kl_shaped_advantages,
    masked_sum,
    masked_whiten,
    overlong_penalty,
    turn_advantages,
)


def shaped_rewards(c: PolicyConfig, batch: RolloutBatch, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return the turn rewards ``[B, K]`` less the punishment of length and, if ``kl`` is placed here, less the KL.

    ``kl`` ``[B, L]`` is the detached KL of each token.
    """
    rewards, turns = batch.rewards, batch.rewards.shape[1]
    if c.overlong_cache_tokens is not None and c.max_output_tokens is not None:
        # At least one: without an action token all turns are -1, and per_turn_sums needs one to sum over.
        played = max(int(batch.turn_ids.max()) + 1, 1) if len(batch) else 1
        lengths = per_turn_sums(batch.action_mask.float(), batch.turn_ids, played)
        punishment = overlong_penalty(lengths, c.max_output_tokens, c.overlong_cache_tokens)
        for k in range(played):
            # As in per_turn_sums, turns beyond the last column of rewards join it.
            column = min(k, turns - 1)
            rewards = rewards.index_add(1, torch.tensor([column]), punishment[:, k : k + 1])
    if kl is not None and c.kl_placement == "reward":
        rewards = rewards - kl_coef * per_turn_sums(kl, batch.turn_ids, turns)
    return rewards


def group_credit(c: GroupConfig, batch: RolloutBatch, shaped: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages relative to the group ``[B, L]``, and a bool ``[B, L]``: tokens of groups that differ.

    ``shaped`` ``[B, K]`` are the rewards of :func:`shaped_rewards`.
    """
    heads, places = batch.heads()
    rewards = shaped
    if batch.episodes is not None:  # the rows of an episode share what each adds or subtracts
        change = (shaped - batch.rewards).nan_to_num(nan=0.0)  # NaN: turns that a row does not have
        rewards = batch.rewards[heads] + torch.zeros_like(batch.rewards[heads]).index_add(0, places, change)
    groups = batch.groups[heads]
    if c.advantage_level == "turn":
        check_turn_rewards(batch)
        # Each turn stands for a token of its own, so the result is [E, K].
        by_turn = turn_advantages(
            rewards,
            groups,
            torch.arange(rewards.shape[1], device=rewards.device).expand(rewards.shape),
            norm=c.adv_norm,
            adv_eps=c.adv_eps,
            trajectory_fallback=c.turn_advantage_trajectory_fallback,
        )
        telling = informative_groups(by_turn, groups)
        return broadcast_turns(by_turn[places], batch.turn_ids), broadcast_turns(telling[places], batch.turn_ids)
    mask = batch.action_mask
    by_episode = group_advantages(rewards.nansum(dim=1), groups, norm=c.adv_norm, adv_eps=c.adv_eps)
    telling = informative_groups(by_episode[:, None], groups)
    return broadcast_rows(by_episode[places], mask), broadcast_rows(telling[places, 0], mask)


def shaped_advantages(
    c: SurrogateConfig,
    advantages: Tensor,
    mask: Tensor,
    kl: Tensor | None,
    kl_coef: float,
    *,
    whiten: Tensor | None = None,
) -> Tensor:
    """Return advantages ``[B, L]``, with the KL if it is placed here, whitened and clamped as configured.

    ``kl`` ``[B, L]`` is the detached KL of each token; ``whiten`` ``[B, L]`` marks the tokens to whiten, None: none.
    """
    kl = None if kl is None else kl.to(advantages.device)
    if kl is not None and c.kl_placement == "advantage":
        advantages = fill_masked(advantages - kl_coef * kl, mask)
    if kl is not None and c.use_kl_advantage_shaping:
        advantages = kl_shaped_advantages(advantages, kl, mask, kl_coef)
    if whiten is not None:
        # A group whose completions all earned the same teaches nothing: whitening must not move it off 0.
        advantages = masked_whiten(advantages, mask, over=whiten)
    return advantages if c.adv_clip_range is None else advantages.clamp(-c.adv_clip_range, c.adv_clip_range)


def per_turn_sums(values: Tensor, turn_ids: Tensor, turns: int) -> Tensor:
    """Return the sums ``[B, turns]`` of token values ``[B, L]`` over each turn; turns beyond the last join it."""
    last = turn_ids.clamp(max=turns - 1)
    return torch.stack([masked_sum(values, last == k, -1) for k in range(turns)], dim=1)


def check_turn_rewards(batch: RolloutBatch) -> None:
    """Raise ConfigError unless every turn of the batch has a column of rewards."""
    turns, played = batch.rewards.shape[1], int(batch.turn_ids.max()) + 1 if len(batch) else 0
    if played > turns:
        raise ConfigError(
            f"credit by turn needs a reward for each turn, found {played} turns and rewards for {turns}; give rewards "
            "[rows, turns], or advantage_granularity='trajectory'"
        )


def check_whole_episodes(algorithm: str, batch: RolloutBatch) -> None:
    """Raise ConfigError if an episode has several rows, for credit that runs from token to token."""
    if batch.episodes is not None:
        raise ConfigError(
            f"{algorithm} carries credit from token to token, found episodes whose context was rewritten on the way "
            "(a sliding window, a chat template that changes earlier turns, an agent program that branches), which are "
            "several rows each; use GRPO, or let transcripts grow only"
        )
