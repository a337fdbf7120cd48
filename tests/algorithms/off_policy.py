"""An agent ahead of the policy that sampled its batch, and losses said by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agilerl.algorithms import GRPO
from agilerl.data import LossInputs, RolloutBatch
from tests.algorithms.conftest import batch_of, make_agents

SETTINGS: dict[str, Any] = {"batch_size": 16, "beta": 0.05, "max_grad_norm": None, "update_epochs": 2, "lr": 3e-2}


def trained(prompts: int = 4, **changes: Any) -> tuple[GRPO, RolloutBatch]:
    """Return an agent and a batch that an earlier version of it has sampled, so that ratios are not 1 and some clip."""
    (agent,) = make_agents(1, **{**SETTINGS, **changes})
    batch = batch_of(agent, prompts)
    agent.learn(batch)
    return agent, batch


def by_hand(inputs: LossInputs, beta: float, clip_coef: float) -> Tensor:
    """GRPO's loss with nothing but torch."""
    ratio = torch.exp(inputs.logp - inputs.old_logp)
    surrogate = torch.minimum(ratio * inputs.advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * inputs.advantages)
    gap = inputs.ref_logp - inputs.logp
    loss = beta * ratio * (gap.exp() - gap - 1) - surrogate
    lengths = inputs.mask.sum(dim=1).clamp(min=1)
    return ((loss * inputs.mask).sum(dim=1) / lengths).sum() / inputs.denominator


def tangents(agent: GRPO, batch: RolloutBatch, loss: Callable[[LossInputs], Tensor] | None = None) -> Tensor:
    """Differentiate a loss with respect to the log-probs alone: what a user's own library would do."""
    experience = agent.prepare(batch)
    logp = agent.logprobs(batch).requires_grad_()
    inputs = LossInputs(
        logp=logp,
        mask=batch.action_mask,
        old_logp=experience.old_logp,
        advantages=experience.advantages,
        denominator=float(len(batch)),
        ref_logp=experience.ref_logp,
    )
    function = loss or partial(by_hand, beta=agent.beta, clip_coef=agent.clip_coef)
    (result,) = torch.autograd.grad(function(inputs), logp)
    return result
