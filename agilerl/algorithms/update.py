"""One update of many agents: every micro-batch of every agent through one base, one backward, one stacked step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agilerl.algorithms.policy import record_batch
from agilerl.data import LossInputs, RolloutBatch
from agilerl.functional import MetricReducer
from agilerl.models.optim import adamw_step, zero_grad
from agilerl.runtime import AgentRows, Runtime

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = ["MICRO_TOKENS", "Experience", "Piece", "accumulate", "learn_together", "optim_step"]

MICRO_TOKENS = 4096
"""Padded tokens of one agent's micro-batch when the user gives no size: enough to fill a core, small in memory."""


@dataclass(frozen=True)
class Experience:
    """A whole batch of one agent, ready to be cut into optimizer windows."""

    batch: RolloutBatch
    advantages: Tensor
    """[B, L] advantage of each token, detached."""
    old_logp: Tensor | None = None
    """[B, L] log-probs of the sampling policy; None: the update is on-policy, so they are the current ones."""
    ref_logp: Tensor | None = None
    """[B, L] log-probs of the reference; None when no term needs them."""
    sampling_logp: Tensor | None = None
    """[B, L] log-probs reported by a foreign sampler."""
    idle: Tensor | None = None
    """[B] bool, True for rows whose gradient is exactly zero: counted in every normaliser, never computed."""


@dataclass
class Piece:
    """One micro-batch of one agent and the window it belongs to."""

    agent: "LLMAlgorithm"
    experience: Experience
    rows: Tensor
    denominator: float
    metrics: MetricReducer
    finite: bool = True
    """Set to False when the loss of the piece is not finite."""


@dataclass
class _Window:
    """One optimizer step of one agent."""

    denominator: float
    micro_batches: list[Tensor]


@dataclass
class _Update:
    """What one agent does in this call of learn."""

    agent: "LLMAlgorithm"
    experience: Experience
    metrics: MetricReducer = field(default_factory=MetricReducer)
    windows: list[_Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        agent, batch, idle = self.agent, self.experience.batch, self.experience.idle
        if not len(batch):
            return
        micro_rows = agent.micro_rows(batch)
        for epoch in range(agent.config.update_epochs):
            order = agent.shuffle(len(batch), epoch)
            for rows in torch.split(order, agent.window_rows):
                denominator = agent.window_denominator(batch.action_mask[rows])
                busy = rows if idle is None else rows[~idle[rows]]
                self.windows.append(_Window(denominator, list(torch.split(busy, micro_rows)) if len(busy) else []))


def learn_together(agents: Sequence["LLMAlgorithm"], batches: Sequence[RolloutBatch]) -> list[dict[str, float]]:
    """Train each agent on its own batch, all agents of one runtime together; returns each agent's metrics.

    Agents need not agree on anything: an agent with fewer optimizer steps simply drops out of the later rounds. What
    an agent computes depends on its own rows alone, so the result is the one it would have reached on its own.
    """
    runtime = agents[0].runtime
    updates = [_Update(agent, agent.prepare(batch)) for agent, batch in zip(agents, batches)]
    for update, batch in zip(updates, batches):
        record_batch(batch, update.metrics)
    zero_grad(runtime.store)
    for step in range(max((len(u.windows) for u in updates), default=0)):
        active = [u for u in updates if step < len(u.windows)]
        pieces = [
            [
                Piece(u.agent, u.experience, rows, u.windows[step].denominator, u.metrics)
                for rows in u.windows[step].micro_batches
            ]
            for u in active
        ]
        for k in range(max((len(own) for own in pieces), default=0)):
            for pack in _packs([own[k] for own in pieces if k < len(own)], runtime.max_tokens):
                accumulate(runtime, pack)
        healthy = [all(piece.finite for piece in own) for own in pieces]
        optim_step([u.agent for u in active], healthy, [u.metrics for u in active])
    return [_finish(u) for u in updates]


def _packs(pieces: Sequence[Piece], max_tokens: int) -> list[list[Piece]]:
    """Group micro-batches of equal padded length into forward passes of at most ``max_tokens`` tokens.

    Lengths never mix: a row's bits in the backward pass of attention depend on the padded length.
    """
    by_length: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda p: p.agent.slot):
        by_length.setdefault(piece.experience.batch.select(piece.rows).ids.shape[1], []).append(piece)
    packs: list[list[Piece]] = []
    for length, group in by_length.items():
        packs.append([])
        for piece in group:
            if packs[-1] and (sum(len(p.rows) for p in packs[-1]) + len(piece.rows)) * length > max_tokens:
                packs.append([])
            packs[-1].append(piece)
    return packs


def accumulate(runtime: Runtime, pieces: Sequence[Piece]) -> None:
    """Add the gradients of some micro-batches to the store: one forward, each agent's own loss, one backward.

    The pieces have equal padded length. The total is the plain sum of the agents' losses: each is divided by its own
    window's denominator already, and a loss that is not finite reaches no other agent's gradient.
    """
    parts = [
        AgentRows(p.agent.slot, p.experience.batch.select(p.rows), getattr(p.agent.config, "temperature", 1.0))
        for p in pieces
    ]
    losses = []
    for piece, part, (logp, entropy) in zip(pieces, parts, runtime.token_logprobs(parts, entropy=True)):
        loss = piece.agent.objective(_inputs(piece, part.batch, logp, entropy), piece.metrics)
        piece.finite = bool(torch.isfinite(loss))
        losses.append(loss)
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def _inputs(piece: Piece, batch: RolloutBatch, logp: Tensor, entropy: Tensor | None) -> LossInputs:
    e, width, device = piece.experience, logp.shape[1], logp.device

    def rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[piece.rows.to(values.device), :width].to(device)

    old, advantages = rows(e.old_logp), rows(e.advantages)
    assert advantages is not None
    return LossInputs(
        logp=logp,
        mask=batch.action_mask.to(device),
        old_logp=logp.detach() if old is None else old,
        advantages=advantages,
        denominator=piece.denominator,
        ref_logp=rows(e.ref_logp),
        sampling_logp=rows(e.sampling_logp),
        entropy=entropy,
        turn_ids=batch.turn_ids.to(device),
    )


def optim_step(
    agents: Sequence["LLMAlgorithm"], healthy: Sequence[bool], metrics: Sequence[MetricReducer] | None = None
) -> list[bool]:
    """Clip, step and clear the accumulated gradients of some agents; returns which of them took the step."""
    store = agents[0].runtime.store
    settings = [agent.optimizer_settings() for agent in agents]
    norms, applied = adamw_step(store, [a.slot for a in agents], settings, healthy)
    zero_grad(store)
    for i, agent in enumerate(agents):
        agent.skipped_steps += not applied[i]
        if metrics is not None:
            metrics[i].add("grad_norm", norms[i])
            metrics[i].add("learning_rate", settings[i].lr)
    return applied


def _finish(update: _Update) -> dict[str, float]:
    agent, batch = update.agent, update.experience.batch
    epochs = agent.config.update_epochs
    agent.tokens["trained"] += epochs * int(batch.lengths.sum())
    agent.steps += len(batch)
    agent.updates += 1
    values = update.metrics.result()
    # The sum over all optimizer windows; a window's loss is what one step minimised.
    values["loss"] = values.get("loss", 0.0) / max(len(update.windows), 1)
    values["skipped_steps"] = float(agent.skipped_steps)
    values["num_tokens"] = float(agent.tokens["trained"])
    values["mean_loss"], values["mean_kl"] = values["loss"], values.get("kl", 0.0)
    return values
