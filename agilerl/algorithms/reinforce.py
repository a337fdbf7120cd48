"""REINFORCE (Williams, 1992) on batch-normalised returns (arXiv 2510.01051), and REINFORCE++ (arXiv 2501.03262)."""

from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.config import PolicyConfig, RolloutLLMConfig, SurrogateConfig
from agilerl.algorithms.credit import (
    check_turn_rewards,
    check_whole_episodes,
    per_turn_sums,
    shaped_advantages,
    shaped_rewards,
)
from agilerl.data import RolloutBatch
from agilerl.functional import (
    broadcast_rows,
    broadcast_turns,
    fill_masked,
    place_rewards,
    rebn,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from agilerl.hpo.parameters import Evolve


class REINFORCEConfig(PolicyConfig, SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of REINFORCE."""

    algorithm: ClassVar[str] = "REINFORCE"
    loss_type: ClassVar[Literal["grpo"]] = "grpo"  # type: ignore[misc]  # fixed: no hyperparameter here
    group_size: Annotated[int, Field(ge=1), Evolve(1, 32)] = 8
    """Completions sampled for each prompt; 1 is enough, unless a group's mean is the baseline."""
    gamma: Annotated[float, Field(ge=0, le=1), Evolve(0.9, 1.0, scale="linear")] = 1.0
    """Discount from one unit of credit to the next: from token to token, or from turn to turn."""
    advantage_estimator: Literal["rebn", "reinforce++", "reinforce++-baseline"] = "rebn"
    """``rebn``: returns, z-scored over the batch. ``reinforce++``: the same with one reward a completion, at its last
    token; ``reinforce++-baseline``: minus the mean of its prompt's completions first."""
    advantage_granularity: Literal["auto", "token", "turn", "trajectory"] = "auto"
    """Unit that has one return; ``auto``: the unit over which the ratio is pooled."""
    ratio_pooling: Literal["mean", "sum"] = "mean"
    """How a turn's or trajectory's ratio pools its tokens' log-ratios; the sum is the ratio of probabilities."""

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        if self.advantage_estimator != "rebn" and self.advantage_level != "token":
            raise ValueError(
                f"advantage_estimator={self.advantage_estimator!r} gives a return to every token, found advantages by "
                f"{self.advantage_level}; use advantage_granularity='token', or advantage_estimator='rebn'"
            )
        if self.gamma != 1 and self.advantage_level == "trajectory":
            raise ValueError(
                f"gamma={self.gamma} discounts from unit to unit, but a trajectory is a single one; leave it at 1, or "
                "use advantage_granularity='token' or 'turn'"
            )
        if self.advantage_estimator == "reinforce++-baseline" and self.group_size < 2:
            raise ValueError(
                "advantage_estimator='reinforce++-baseline' subtracts the mean of the group, found group_size="
                f"{self.group_size}; use at least 2, or advantage_estimator='reinforce++'"
            )
        return self

    @property
    def advantage_level(self) -> Literal["token", "turn", "trajectory"]:
        """Unit that gets one advantage."""
        return self.ratio_level if self.advantage_granularity == "auto" else self.advantage_granularity

    @property
    def uses_turns(self) -> bool:
        """Whether something is computed turn by turn."""
        return "turn" in (self.ratio_level, self.advantage_level)

    @property
    def pooling(self) -> Literal["mean", "sum"]:
        """How a unit's log-ratios are pooled."""
        return self.ratio_pooling


def reinforce_credit(c: REINFORCEConfig, batch: RolloutBatch, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return whitened returns ``[B, L]``, 0 off the action mask; ``kl`` ``[B, L]`` is the detached KL of tokens.

    A KL that is placed in the reward is subtracted where it arises: at its own token, turn or trajectory.
    """
    check_whole_episodes("REINFORCE", batch)
    mask = batch.action_mask
    penalty = kl_coef * kl if kl is not None and c.kl_placement == "reward" else None
    # Without the KL, which is subtracted below from what it belongs to.
    rewards = shaped_rewards(c, batch, None, kl_coef)
    if c.advantage_estimator == "rebn":
        advantages = _returns(c, rewards, batch, penalty)
    else:
        whole = rewards.nansum(dim=1)
        advantages = (
            reinforce_plus_plus(whole, mask, gamma=c.gamma, penalty=penalty)
            if c.advantage_estimator == "reinforce++"
            else reinforce_plus_plus_baseline(whole, batch.groups, mask, gamma=c.gamma, penalty=penalty)
        )
    return shaped_advantages(c, advantages, mask, kl, kl_coef)


def _returns(c: REINFORCEConfig, rewards: Tensor, batch: RolloutBatch, penalty: Tensor | None) -> Tensor:
    """Return discounted returns ``[B, L]``, z-scored over all cells: tokens, turns or trajectories."""
    mask, turns = batch.action_mask, rewards.shape[1]
    if c.advantage_level == "token":
        if turns > 1:
            check_turn_rewards(batch)
        # One reward for several turns belongs to the last action of all.
        at_token = place_rewards(rewards, batch.turn_ids if turns > 1 else torch.where(mask, 0, -1))
        return rebn(at_token if penalty is None else at_token - penalty, mask, c.gamma)
    by_turn = rewards if penalty is None else rewards - per_turn_sums(penalty, batch.turn_ids, turns)
    if c.advantage_level == "turn":
        check_turn_rewards(batch)
        played = torch.stack([(batch.turn_ids == k).any(dim=1) for k in range(turns)], dim=1)
        cells = rebn(fill_masked(by_turn, by_turn.isfinite()), played, c.gamma)
        return broadcast_turns(cells, batch.turn_ids)
    whole = by_turn.nansum(dim=1, keepdim=True)  # (rows, 1): a trajectory is one cell
    return broadcast_rows(rebn(whole, torch.ones_like(whole, dtype=torch.bool), c.gamma)[:, 0], mask)
