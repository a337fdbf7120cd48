"""One update of many agents: every micro-batch of every agent through one base, one backward, one stacked step.

Two operations change an agent by training: :func:`gradients.accumulate` adds gradients, :func:`optim_step` spends them.
Learning is nothing but a sequence of the two, and so is whatever a user builds of ``agent.accumulate`` and
``agent.optim_step``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agilerl.algorithms.custom_loss import LossFunction, loss_denominator
from agilerl.algorithms.gradients import Share, accumulate
from agilerl.algorithms.learner import Experience, Learner
from agilerl.algorithms.logprobs import sampled_as_trained
from agilerl.algorithms.metrics import record_batch
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError, MemoryExhaustedError
from agilerl.functional import MetricReducer
from agilerl.models.optim import adamw_step
from agilerl.models.slots import AdapterStore
from agilerl.rollouts.failures import Outcome
from agilerl.runtime import Runtime


@dataclass
class _Update:
    """What one agent does in this call of learn."""

    agent: Learner
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
        # Old log-probs that were computed before the update are those of its first window too, up to rounding, which
        # depends on the rows that share a forward. There they are the current ones, so that the ratio is exactly 1.
        first = self.experience if sampled_as_trained(agent, batch) else replace(self.experience, old_logp=None)
        for epoch in range(agent.config.update_epochs):
            for rows in torch.split(_order(agent, len(batch), epoch), agent.window_rows):
                denominator = loss_denominator(agent, None, batch.action_mask[rows])
                experience = self.experience if self.windows else first
                self.windows.append(Share(agent, experience, rows, denominator, self.metrics))


def _order(agent: Learner, rows: int, epoch: int) -> Tensor:
    """Return the rows of one epoch in random order; rows that belong together (a pair) stay side by side."""
    unit = agent.rows_per_unit
    units = agent.shuffle(rows // unit, epoch)
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def learn_together(
    agents: Sequence[Learner], batches: Sequence[RolloutBatch], sampled: Sequence[Outcome] | None = None
) -> list[dict[str, float]]:
    """Train each agent on its own batch, all agents of one runtime together; returns each agent's metrics.

    Agents need not agree on anything: an agent with fewer optimizer steps simply drops out of the later rounds. What
    an agent computes depends on its own rows alone, so the result is the one it would have reached on its own.
    ``sampled`` is what came of sampling the batches; an agent whose is not ok learns nothing. What came of the whole
    is in ``agent.outcome``.
    """
    runtime = agents[0].runtime
    _check_equal(runtime, agents, batches)
    found: Sequence[Outcome] = ["ok"] * len(agents) if sampled is None else sampled
    updates = [_begin(*own) for own in zip(agents, batches, found)]
    for update, batch in zip(updates, batches):
        record_batch(batch, update.metrics)
        for name, value in update.experience.metrics.items():
            update.metrics.add(name, value)
    clear_gradients(agents)
    for step in range(max((len(u.windows) for u in updates), default=0)):
        active = [u for u in updates if step < len(u.windows) and u.outcome == "ok"]
        unfit = accumulate(runtime, [u.windows[step] for u in active])
        for update in active:
            if update.agent in unfit:
                update.outcome = "oom"
        active = [u for u in active if u.outcome == "ok"]
        if active:
            optim_step([u.agent for u in active], [u.metrics for u in active])
    return [_finish(u) for u in updates]


def _check_equal(runtime: Runtime, agents: Sequence[Learner], batches: Sequence[RolloutBatch]) -> None:
    """Raise ConfigError unless all processes that share the agents are about to do the same with the same weights."""
    if runtime.processes.size == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for agent, batch in zip(agents, batches):
        # As whole numbers, whose sum depends on no order.
        bits = runtime.store.theta[agent.slot].view(torch.int32).sum(dtype=torch.int64)
        digest.update(repr((agent.index, agent.updates, agent.config, int(bits))).encode())
        for part in (batch.ids, batch.action_mask, batch.rewards, batch.groups):
            digest.update(part.cpu().numpy().tobytes())
    if len(set(runtime.processes.gather(digest.digest()))) > 1:
        raise ConfigError(
            "the processes that train one agent must have equal agents, and train them on equal batches (learn puts "
            "theirs together), found different ones; run the same program with the same seeds in all of them, on "
            "devices of one kind"
        )


def _begin(agent: Learner, batch: RolloutBatch, outcome: Outcome) -> _Update:
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
    agent: Learner, experience: Experience, loss: LossFunction | None, denominator: float | None
) -> MetricReducer:
    """Add the gradient of one agent's rows, as a part of an optimizer step; returns the metrics of these rows.

    Without a ``denominator`` the rows are the whole step. Raises MemoryExhaustedError, the pending gradient being what
    it was, where memory does not hold the least of it.
    """
    _check_equal(agent.runtime, [agent], [experience.batch])
    metrics = MetricReducer()
    if denominator is None:
        denominator = loss_denominator(agent, loss, experience.batch.action_mask)
    share = Share(agent, experience, torch.arange(len(experience)), denominator, metrics, loss)
    if accumulate(agent.runtime, [share], keep_pending=True):
        raise MemoryExhaustedError(
            f"memory does not hold an update on {agent.rows_per_unit} x {experience.batch.ids.shape[1]} tokens"
        )
    return metrics


def clear_gradients(agents: Sequence[Learner]) -> None:
    """Forget what some agents have accumulated; other agents' gradients stay."""
    for agent in agents:
        for slot in agent.optimizer_settings():
            agent.runtime.store.grad[slot].zero_()  # in place: the layers hold views of it
        agent.gradient_is_finite = True


def optim_step(agents: Sequence[Learner], metrics: Sequence[MetricReducer]) -> list[bool]:
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
