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
from agilerl.runtime import AgentRows, Runtime, TokenOutputs

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
    old_values: Tensor | None = None
    """[B, L] the critic's values before the update; None without a critic."""
    returns: Tensor | None = None
    """[B, L] targets of the critic."""
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
            for rows in torch.split(_order(agent, len(batch), epoch), agent.window_rows):
                denominator = agent.window_denominator(batch.action_mask[rows])
                busy = rows if idle is None else rows[~idle[rows]]
                self.windows.append(_Window(denominator, list(torch.split(busy, micro_rows)) if len(busy) else []))


def _order(agent: "LLMAlgorithm", rows: int, epoch: int) -> Tensor:
    """Return the rows of one epoch in random order; rows that belong together (a pair) stay side by side."""
    unit = agent.rows_per_unit
    units = agent.shuffle(rows // unit, epoch)
    return (units[:, None] * unit + torch.arange(unit)).flatten()


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
    batches = [p.experience.batch.select(p.rows) for p in pieces]
    parts = [
        AgentRows(p.agent.slot, batch, getattr(p.agent.config, "temperature", 1.0)) for p, batch in zip(pieces, batches)
    ]
    critics = [i for i, p in enumerate(pieces) if p.agent.critic_slot is not None]
    parts += [AgentRows(pieces[i].agent.critic_slot, batches[i], 1.0, values=True) for i in critics]
    outputs = runtime.forward(parts, entropy=True)
    values = {i: output.values for i, output in zip(critics, outputs[len(pieces) :])}
    losses = []
    for i, (piece, output) in enumerate(zip(pieces, outputs)):
        loss = piece.agent.objective(_inputs(piece, batches[i], output, values.get(i)), piece.metrics)
        piece.finite = bool(torch.isfinite(loss))
        losses.append(loss)
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def _inputs(piece: Piece, batch: RolloutBatch, output: TokenOutputs, values: Tensor | None) -> LossInputs:
    e, logp = piece.experience, output.logp
    assert logp is not None
    width, device = logp.shape[1], logp.device

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
        entropy=output.entropy,
        turn_ids=batch.turn_ids.to(device),
        values=values,
        old_values=rows(e.old_values),
        returns=rows(e.returns),
    )


def optim_step(
    agents: Sequence["LLMAlgorithm"], healthy: Sequence[bool], metrics: Sequence[MetricReducer] | None = None
) -> list[bool]:
    """Clip, step and clear the accumulated gradients of some agents; returns which of them took the step."""
    store = agents[0].runtime.store
    owners, slots, settings = [], [], []
    for i, agent in enumerate(agents):
        for slot, setting in agent.optimizer_settings().items():
            owners.append(i)
            slots.append(slot)
            settings.append(setting)
    norms, applied = adamw_step(store, slots, settings, [healthy[i] for i in owners])
    zero_grad(store)
    stepped = [all(a for a, owner in zip(applied, owners) if owner == i) for i in range(len(agents))]
    for i, agent in enumerate(agents):
        agent.skipped_steps += not stepped[i]
        if metrics is not None:
            first = owners.index(i)
            metrics[i].add("grad_norm", norms[first])
            metrics[i].add("learning_rate", settings[first].lr)
    return stepped


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
