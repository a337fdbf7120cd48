"""One update of many agents: every micro-batch of every agent through one base, one backward, one stacked step.

Two operations change an agent by training: :func:`accumulate` adds gradients, :func:`optim_step` spends them. Learning
is nothing but a sequence of the two, and so is whatever a user builds of ``agent.accumulate`` and ``agent.optim_step``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agilerl.algorithms.losses import LossFunction, compute_loss, loss_denominator
from agilerl.algorithms.policy import record_batch, record_idle
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import MemoryExhaustedError
from agilerl.functional import MetricReducer
from agilerl.models.memory import attempt
from agilerl.models.optim import adamw_step
from agilerl.models.slots import AdapterStore
from agilerl.rollouts.failures import Outcome
from agilerl.runtime import AgentRows, Runtime, TokenOutputs

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = [
    "MICRO_TOKENS",
    "Experience",
    "Piece",
    "accumulate",
    "accumulate_all",
    "clear_gradients",
    "learn_together",
    "optim_step",
]

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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What only the whole batch can tell, reported with the metrics of the update."""

    def __len__(self) -> int:
        return len(self.batch)

    def select(self, rows: Tensor | slice) -> "Experience":
        """Return the experience of some rows, cut to the shortest padded length that holds them."""
        batch = self.batch.select(rows)
        width = batch.action_mask.shape[1]
        picked: dict[str, Any] = {"batch": batch, "metrics": self.metrics}
        for name in (f.name for f in fields(self) if f.name not in picked):
            value = getattr(self, name)
            picked[name] = value if value is None else value[rows] if value.dim() == 1 else value[rows][:, :width]
        return Experience(**picked)


@dataclass
class Piece:
    """One micro-batch of one agent and the window it belongs to."""

    agent: "LLMAlgorithm"
    experience: Experience
    rows: Tensor
    denominator: float
    loss: LossFunction | None = None
    """Used in place of the agent's own; None: the agent's."""
    metrics: MetricReducer = field(default_factory=MetricReducer)
    """Of this micro-batch alone, until all of them have been computed."""
    is_finite: bool = True
    """Whether its loss was."""


@dataclass
class Share:
    """Rows of one agent that go into one optimizer step together."""

    agent: "LLMAlgorithm"
    experience: Experience
    rows: Tensor
    denominator: float
    metrics: MetricReducer
    loss: LossFunction | None = None
    """Used in place of the agent's own; None: the agent's."""

    def cut(self) -> tuple[list[Piece], int]:
        """Cut into micro-batches, without the rows that need no computation, whose action tokens are counted.

        Idle rows are idle under the algorithm's own objective only; another loss sees every row.
        """
        own = self.loss if self.loss is not None else self.agent.loss
        idle = self.experience.idle if own is None else None
        busy = self.rows if idle is None else self.rows[~idle[self.rows]]
        batch = self.experience.batch
        skipped = 0 if idle is None else int(batch.action_mask[self.rows[idle[self.rows]]].sum())
        parts = torch.split(busy, self.agent.micro_rows(batch)) if len(busy) else ()
        return [Piece(self.agent, self.experience, rows, self.denominator, self.loss) for rows in parts], skipped


@dataclass
class _Update:
    """What one agent does in this call of learn."""

    agent: "LLMAlgorithm"
    experience: Experience
    metrics: MetricReducer = field(default_factory=MetricReducer)
    outcome: Outcome = "ok"
    windows: list[Share] = field(default_factory=list)
    """One for each optimizer step."""

    def __post_init__(self) -> None:
        agent, batch = self.agent, self.experience.batch
        self.skipped_before = agent.skipped_steps
        if not len(batch):
            return
        for epoch in range(agent.config.update_epochs):
            for rows in torch.split(_order(agent, len(batch), epoch), agent.window_rows):
                denominator = loss_denominator(agent, None, batch.action_mask[rows])
                self.windows.append(Share(agent, self.experience, rows, denominator, self.metrics))


def _order(agent: "LLMAlgorithm", rows: int, epoch: int) -> Tensor:
    """Return the rows of one epoch in random order; rows that belong together (a pair) stay side by side."""
    unit = agent.rows_per_unit
    units = agent.shuffle(rows // unit, epoch)
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def learn_together(
    agents: Sequence["LLMAlgorithm"], batches: Sequence[RolloutBatch], sampled: Sequence[Outcome] | None = None
) -> list[dict[str, float]]:
    """Train each agent on its own batch, all agents of one runtime together; returns each agent's metrics.

    Agents need not agree on anything: an agent with fewer optimizer steps simply drops out of the later rounds. What
    an agent computes depends on its own rows alone, so the result is the one it would have reached on its own.
    ``sampled`` is what came of sampling the batches; an agent whose is not ok learns nothing. What came of the whole
    is in ``agent.outcome``.
    """
    runtime = agents[0].runtime
    found: Sequence[Outcome] = ["ok"] * len(agents) if sampled is None else sampled
    updates = [_begin(*own) for own in zip(agents, batches, found)]
    for update, batch in zip(updates, batches):
        record_batch(batch, update.metrics)
        for name, value in update.experience.metrics.items():
            update.metrics.add(name, value)
    clear_gradients(agents)
    for step in range(max((len(u.windows) for u in updates), default=0)):
        active = [u for u in updates if step < len(u.windows) and u.outcome == "ok"]
        unfit = accumulate_all(runtime, [u.windows[step] for u in active])
        for update in active:
            if update.agent in unfit:
                update.outcome = "oom"
        active = [u for u in active if u.outcome == "ok"]
        if active:
            optim_step([u.agent for u in active], [u.metrics for u in active])
    return [_finish(u) for u in updates]


def _begin(agent: "LLMAlgorithm", batch: RolloutBatch, outcome: Outcome) -> _Update:
    nothing = batch.select(slice(0, 0))
    if outcome == "nonfinite":
        agent.skipped_steps += 1
        agent.note_step(taken=False)
    if outcome != "ok":
        return _Update(agent, agent.prepare(nothing), outcome=outcome)
    try:
        return _Update(agent, agent.prepare(batch))
    except MemoryExhaustedError:
        return _Update(agent, agent.prepare(nothing), outcome="oom")


def accumulate_batch(
    agent: "LLMAlgorithm", experience: Experience, loss: LossFunction | None, denominator: float | None
) -> MetricReducer:
    """Add the gradient of one agent's rows, as a part of an optimizer step; returns the metrics of these rows.

    Without a ``denominator`` the rows are the whole step. Raises MemoryExhaustedError, the pending gradient being what
    it was, where memory does not hold the least of it.
    """
    metrics = MetricReducer()
    if denominator is None:
        denominator = loss_denominator(agent, loss, experience.batch.action_mask)
    share = Share(agent, experience, torch.arange(len(experience)), denominator, metrics, loss)
    if accumulate_all(agent.runtime, [share], keep_pending=True):
        raise MemoryExhaustedError(
            f"memory does not hold an update on {agent.rows_per_unit} x {experience.batch.ids.shape[1]} tokens"
        )
    return metrics


def accumulate_all(runtime: Runtime, shares: Sequence[Share], *, keep_pending: bool = False) -> list["LLMAlgorithm"]:
    """Add the gradients of each agent's rows, in as few forward passes as memory and ``runtime.max_tokens`` allow.

    All or nothing: the backward pass adds to the gradients layer by layer, so where memory runs out, they are put back
    to what they were (0, or with ``keep_pending`` whatever had been accumulated) and all is computed again in smaller
    passes. Returns the agents of which memory does not hold the least, without a gradient from here; the others' passes
    are what they would be without them.
    """
    store, unfit, left = runtime.store, list["LLMAlgorithm"](), list(shares)
    before = runtime.limits.train_tokens
    slots = [slot for share in shares for slot in share.agent.optimizer_settings()]
    pending = {slot: store.grad[slot].clone() for slot in slots if keep_pending}
    while True:
        cuts = [share.cut() for share in left]
        full = _accumulate_packs(runtime, [pieces for pieces, _ in cuts])
        if full is None:
            break
        for slot in slots:
            store.grad[slot] = pending.get(slot, 0.0)
        agent = _halve(runtime, full)
        if agent is not None:
            runtime.limits.train_tokens = before
            unfit.append(agent)
            left = [share for share in left if share.agent is not agent]
    for share, (pieces, idle_tokens) in zip(left, cuts):
        record_idle(idle_tokens, share.metrics)
        for piece in pieces:
            share.metrics.merge(piece.metrics)
            share.agent.gradient_is_finite &= piece.is_finite
    return unfit


def _accumulate_packs(runtime: Runtime, pieces: Sequence[Sequence[Piece]]) -> list[Piece] | None:
    """Add the gradients of each agent's micro-batches; returns the pack that memory did not hold, if there is one."""
    for k in range(max((len(own) for own in pieces), default=0)):
        for pack in _packs([own[k] for own in pieces if k < len(own)], runtime.limits.tokens(runtime.max_tokens)):
            if attempt(partial(accumulate, runtime, pack)) is None:
                return pack
    return None


def _halve(runtime: Runtime, full: Sequence[Piece]) -> "LLMAlgorithm | None":
    """Allow half the tokens of what memory did not hold; returns the agent that cannot make do with fewer."""
    first = full[0]
    length = first.experience.batch.select(first.rows).ids.shape[1]
    runtime.limits.train_tokens = max(1, sum(len(piece.rows) for piece in full) * length // 2)
    alone_and_least = len(full) == 1 and first.agent.micro_rows(first.experience.batch) >= len(first.rows)
    return first.agent if alone_and_least else None


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
            if packs[-1] and sum(map(_forward_rows, [*packs[-1], piece])) * length > max_tokens:
                packs.append([])
            packs[-1].append(piece)
    return packs


def _forward_rows(piece: Piece) -> int:
    """Return the rows that a micro-batch adds to a forward pass: a critic reads them once more."""
    return len(piece.rows) * (1 if piece.agent.critic_slot is None else 2)


def accumulate(runtime: Runtime, pieces: Sequence[Piece]) -> float:
    """Add the gradients of some micro-batches to the store: one forward, each agent's own loss, one backward.

    The pieces have equal padded length. The total is the plain sum of the agents' losses: each is divided by its own
    window's denominator already, and a loss that is not finite reaches no other agent's gradient; its own agent will
    skip the next step. Returns the total.
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
        inputs = _inputs(piece, batches[i], output, values.get(i))
        loss = compute_loss(piece.agent, piece.loss, inputs, piece.metrics)
        piece.is_finite = bool(torch.isfinite(loss))
        losses.append(loss)
    total = torch.stack(losses).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach())


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


def clear_gradients(agents: Sequence["LLMAlgorithm"]) -> None:
    """Forget what some agents have accumulated; other agents' gradients stay."""
    for agent in agents:
        for slot in agent.optimizer_settings():
            agent.runtime.store.grad[slot].zero_()  # in place: the layers hold views of it
        agent.gradient_is_finite = True


def optim_step(agents: Sequence["LLMAlgorithm"], metrics: Sequence[MetricReducer]) -> list[bool]:
    """Clip, step and clear the accumulated gradients of some agents; returns which of them took the step.

    An agent steps as a whole: where a loss since its last step, or the gradient of one of its slots, is not finite, all
    of it stays as it was.
    """
    store = agents[0].runtime.store
    owners, slots, settings, sound = [], [], [], []
    for i, agent in enumerate(agents):
        own = agent.optimizer_settings()
        sound.append(agent.gradient_is_finite and (len(own) == 1 or _finite_gradients(store, list(own))))
        for slot, setting in own.items():
            owners.append(i)
            slots.append(slot)
            settings.append(setting)
    norms, applied = adamw_step(store, slots, settings, [sound[i] for i in owners])
    clear_gradients(agents)
    stepped = [all(a for a, owner in zip(applied, owners) if owner == i) for i in range(len(agents))]
    for i, agent in enumerate(agents):
        agent.skipped_steps += not stepped[i]
        agent.note_step(taken=stepped[i])
        first = owners.index(i)
        metrics[i].add("grad_norm", norms[first])
        metrics[i].add("learning_rate", settings[first].lr)
    return stepped


def _finite_gradients(store: AdapterStore, slots: Sequence[int]) -> bool:
    """Return whether the gradient norm of every slot is finite, by the measure of the optimizer itself."""
    return bool(torch.isfinite(torch.stack([torch.linalg.vector_norm(store.grad[slot]) for slot in slots])).all())


def _finish(update: _Update) -> dict[str, float]:
    agent, batch = update.agent, update.experience.batch
    if update.outcome == "ok" and agent.skipped_steps > update.skipped_before:
        update.outcome = "nonfinite"
    if update.outcome != "oom":
        agent.tokens["trained"] += agent.config.update_epochs * int(batch.lengths.sum())
        agent.steps += len(batch)
    agent.updates += 1
    values = update.metrics.result()
    # The sum over all optimizer windows; a window's loss is what one step minimised.
    values["loss"] = values.get("loss", 0.0) / max(len(update.windows), 1)
    values["skipped_steps"] = float(agent.skipped_steps)
    values["num_tokens"] = float(agent.tokens["trained"])
    values["mean_loss"], values["mean_kl"] = values["loss"], values.get("kl", 0.0)
    agent.note_outcome(update.outcome, values)
    return values
