"""One update of many agents: every micro-batch of every agent through one base, one backward, one stacked step.

Two operations change an agent by training: :func:`accumulate` adds gradients, :func:`optim_step` spends them.
Learning is a sequence of the two, and so is anything that a user builds from ``agent.accumulate`` and
``agent.optim_step``.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agilerl.algorithms.custom_loss import LossFunction, compute_loss, loss_denominator, tangent_loss
from agilerl.algorithms.distillation import Teacher
from agilerl.algorithms.forward import AgentRows, TokenOutputs, forward
from agilerl.algorithms.learner import Experience, Learner, sampled_as_trained
from agilerl.algorithms.metrics import record_batch, record_idle
from agilerl.algorithms.state import counters_of
from agilerl.data import LossInputs, MicroBatch, RolloutBatch, cut_for_training
from agilerl.errors import ConfigError, MemoryExhaustedError
from agilerl.functional import MetricReducer
from agilerl.models.memory import attempt
from agilerl.models.slots import AdapterStore, adamw_step
from agilerl.processes import as_json
from agilerl.rollouts.engine import Outcome
from agilerl.runtime import Runtime
from agilerl.streams import stream

_HEADER = 8
"""Bytes with the length of the JSON before the gradients."""


@dataclass
class Share:
    """Rows of one agent that go into one optimizer step together."""

    agent: Learner
    experience: Experience
    rows: Tensor
    denominator: float
    metrics: MetricReducer
    loss: LossFunction | None = None
    """Used instead of the agent's own; None: the agent's."""
    window: int = 0
    """Which optimizer step of this update."""

    @cached_property
    def draws(self) -> Tensor:
        """[B] int32 number of each row of the batch, by which ``lora_dropout`` chooses what to leave out."""
        key = (self.agent.index, self.agent.updates, self.window)
        words = stream(self.agent.config.seed, "dropout", *key).bytes(4 * len(self.experience))
        return torch.frombuffer(bytearray(words), dtype=torch.int32)  # torch warns of a buffer that it cannot write to

    def cut(self) -> tuple[list["_Piece"], int]:
        """Cut into micro-batches, without the rows that need no computation, whose action tokens are counted.

        Idle rows are idle under the algorithm's own objective only; another loss sees every row, as a router's does.
        """
        self.agent.runtime.base.check_routers(self.agent.config.router_aux_loss_coef)
        loss = self.loss if self.loss is not None else self.agent.loss
        idle = self.experience.idle if loss is None and not self.router_coefficient else None
        busy = self.rows if idle is None else self.rows[~idle[self.rows]]
        batch = self.experience.batch
        skipped = 0 if idle is None else int(batch.action_mask[self.rows[idle[self.rows]]].sum())
        runtime, limit = self.agent.runtime, self.agent.runtime.limits.train_tokens
        # A critic reads the tokens a second time, in the same pass.
        most = self.most.at_most(limit if limit is None or self.agent.critic_slot is None else max(1, limit // 2))
        if runtime.processes.size > 1 and most.rows is None:  # each of them gets some of an optimizer step
            most = most._replace(rows=-(-len(self.rows) // runtime.processes.size))
        passes, recompute = cut_for_training(batch, busy, most, flat=runtime.base.flattens)
        return [_Piece(self, rows, recompute) for rows in passes.parts], skipped

    @property
    def router_coefficient(self) -> float:
        """Weight of the load-balancing loss; a loss that is known by its derivative gets nothing added."""
        return self.agent.config.router_aux_loss_coef if self.loss is not tangent_loss else 0.0

    @property
    def most(self) -> MicroBatch:
        """The most that one forward pass takes of these rows."""
        return self.agent.micro_batch


@dataclass
class _Piece:
    """One micro-batch: rows of one agent that go through the base together."""

    share: Share
    rows: Tensor
    recompute: bool = False
    """Whether layers are computed again in the backward pass, so that more of what rows share is computed once."""
    metrics: MetricReducer = field(default_factory=MetricReducer)
    """Metrics of this micro-batch, kept apart until all are computed: a pass that ran out of memory must leave none."""
    is_finite: bool = True
    """Whether its loss was finite."""

    @property
    def slot(self) -> int:
        """Slot of the agent's policy."""
        return self.share.agent.slot

    @cached_property
    def batch(self) -> RolloutBatch:
        """The rows, cut to the shortest padded length that holds them."""
        return self.share.experience.batch.select(self.rows)

    def part(self, slot: int, temperature: float = 1.0, *, values: bool = False) -> AgentRows:
        """Return the rows as a part of a forward pass."""
        agent = self.share.agent
        dropout = float(agent.lora_config.lora_dropout or 0.0)
        draws = self.share.draws[self.rows] if dropout else None
        collision = bool(getattr(agent.config, "use_weighting", False)) and not values
        routers = self.share.router_coefficient > 0 and not values
        return AgentRows(slot, self.batch, temperature, values, dropout, draws, collision, routers)

    @property
    def router_weights(self) -> Tensor:
        """[b] weight of each row's load-balancing loss: what it has of the optimizer step's denominator."""
        share, mask = self.share, self.batch.action_mask
        denominators = [loss_denominator(share.agent, share.loss, mask[row : row + 1]) for row in range(len(mask))]
        return torch.tensor(denominators) * (share.router_coefficient / (share.denominator or 1.0))

    @cached_property
    def tokens(self) -> int:
        """Tokens that it adds to a forward pass; a critic reads them a second time."""
        flat, batch = self.share.agent.runtime.base.flattens, self.batch
        once = batch.distinct_tokens if flat else batch.ids.numel()
        return once * (1 if self.share.agent.critic_slot is None else 2)


class _Overflow(NamedTuple):
    """A forward pass that ran out of memory."""

    tokens: int
    """Tokens of it."""
    slot: int
    """Of the first agent in it."""
    rows: int
    """Its rows if it had one agent only, else 0."""


def accumulate(runtime: Runtime, shares: Sequence[Share], *, keep_pending: bool = False) -> list[Learner]:
    """Add the gradients of each agent's rows, in as few forward passes as memory and ``runtime.max_tokens`` allow.

    All or nothing: the backward pass adds to the gradients layer by layer, so if memory runs out, they are reset (to 0,
    or with ``keep_pending`` to what had been accumulated) and everything is computed again in smaller passes. Returns
    the agents for which even the smallest pass does not fit; they get no gradient, and the passes of the other agents
    are the same as without them. If several processes share the agents, each computes some of the micro-batches, and
    all of them return with the gradients, metrics and verdicts of the whole.
    """
    store, unfit, left = runtime.store, list[Learner](), list(shares)
    before = runtime.limits.train_tokens
    slots = [slot for share in shares for slot in share.agent.optimizer_settings()]
    # A copy of what earlier calls have added, to go back to.
    pending = {slot: store.grad[slot].clone() for slot in slots if keep_pending}
    while True:
        cuts = [share.cut() for share in left]
        full = _divided(runtime, [pieces for pieces, _ in cuts])
        if full is None:
            break
        for slot in slots:
            store.grad[slot] = pending.get(slot, 0.0)
        # Half of the pass that failed, which may have been far below the limit.
        runtime.limits.train_tokens = max(1, full.tokens // 2)
        share = next(share for share in left if share.agent.slot == full.slot)
        if 0 < full.rows <= share.most.unit:  # it cannot make do with fewer
            # The passes of the others are to be what they are without this agent.
            runtime.limits.train_tokens = before
            unfit.append(share.agent)
            left = [other for other in left if other is not share]
    for share, (pieces, idle_tokens) in zip(left, cuts):
        record_idle(idle_tokens, share.metrics)
        # Only now, since an attempt that failed must leave neither metrics nor a verdict.
        for piece in pieces:
            share.metrics.merge(piece.metrics)
            share.agent.gradient_is_finite &= piece.is_finite
    return unfit


def _divided(runtime: Runtime, pieces: Sequence[Sequence[_Piece]]) -> _Overflow | None:
    """Compute each agent's micro-batches, on all processes together; returns the pass that ran out of memory, if any.

    On a CPU the processes add their micro-batches one by one in the order of a single process, which gives the same
    bits. On other devices each process adds up its own and the sums are added, in a single transfer.
    """
    processes, store = runtime.processes, runtime.store
    if processes.size == 1:
        return _in_packs(runtime, pieces)
    slots = {i: list(of_agent[0].share.agent.optimizer_settings()) for i, of_agent in enumerate(pieces) if of_agent}
    every = [slot for of_agent in slots.values() for slot in of_agent]
    longest = max((len(of_agent) for of_agent in pieces), default=0)
    in_order = _adds_in_order(store)
    # Micro-batches of an agent in one round: one a process if they are added in order, else all.
    width = processes.size if in_order else max(longest, 1)
    # Indexing by a list copies: what was pending, to which rounds are added.
    total = store.grad[every]
    for start in range(0, longest, width):
        # Micro-batch k of agent i is for process (i + k) mod size, so that the first ones of agents are spread as well.
        places = [
            [k for k in range(start, min(start + width, len(of_agent))) if (i + k) % processes.size == processes.rank]
            for i, of_agent in enumerate(pieces)
        ]
        store.grad[every] = 0.0  # what this round adds is all that is sent
        work = partial(_compute, runtime, pieces, places, every if in_order else [])
        received = [_opened(part) for part in processes.agreed(work, runtime.lockstep)]
        # All processes see the same reports, and so stop together.
        full = next((layout for layout, _, _ in received if layout is not None), None)
        if full is not None:
            return full
        for _, reports, _ in received:
            for i, k, metrics, is_finite in reports:
                pieces[i][k].metrics, pieces[i][k].is_finite = MetricReducer.from_state(metrics), is_finite
        if in_order:
            parts = [torch.frombuffer(g, dtype=store.dtype).view(total.shape) for _, _, g in received]
            row = 0
            for i, of_agent in slots.items():
                # In the order of k, as a single process adds. Who has no k-th one sends zeros, which change nothing.
                for k in range(start, start + width):
                    total[row : row + len(of_agent)] += parts[(i + k) % processes.size][row : row + len(of_agent)]
                row += len(of_agent)
        else:
            own_sum = store.grad[every]
            processes.add_(own_sum)
            total += own_sum
    store.grad[every] = total
    return None


def _adds_in_order(store: AdapterStore) -> bool:
    """Return whether the same bits are promised, which costs a transfer for each round of micro-batches."""
    return store.device.type == "cpu"


def _compute(
    runtime: Runtime, pieces: Sequence[Sequence[_Piece]], places: Sequence[Sequence[int]], slots: Sequence[int]
) -> bytes:
    """Compute this process's micro-batches; returns what the other processes need, with the gradients of ``slots``."""
    full = _in_packs(runtime, [[of_agent[k] for k in mine] for of_agent, mine in zip(pieces, places)])
    done = [(i, k) for i, mine in enumerate(places) for k in mine] if full is None else []
    reports = [[i, k, pieces[i][k].metrics.state(), pieces[i][k].is_finite] for i, k in done]
    header = json.dumps([full, reports]).encode()
    gradients = runtime.store.grad[list(slots)].numpy().tobytes() if slots else b""
    return len(header).to_bytes(_HEADER) + header + gradients


def _opened(part: bytes) -> tuple[_Overflow | None, list[Any], bytearray]:
    end = _HEADER + int.from_bytes(part[:_HEADER])
    full, reports = json.loads(part[_HEADER:end])
    return None if full is None else _Overflow(*full), reports, bytearray(part[end:])


def _in_packs(runtime: Runtime, pieces: Sequence[Sequence[_Piece]]) -> _Overflow | None:
    """Compute each agent's micro-batches, the k-th ones of all agents together, until a pass runs out of memory."""
    most = runtime.limits.tokens(runtime.max_tokens or runtime.pass_size.tokens)
    for k in range(max((len(of_agent) for of_agent in pieces), default=0)):
        for pack in _packs([of_agent[k] for of_agent in pieces if k < len(of_agent)], most):
            if attempt(partial(_forward_backward, runtime, pack)) is None:
                tokens, first = sum(piece.tokens for piece in pack), pack[0]
                return _Overflow(tokens, first.slot, len(first.rows) if len(pack) == 1 else 0)
    return None


def _packs(pieces: Sequence[_Piece], max_tokens: int) -> list[list[_Piece]]:
    """Group micro-batches into forward passes of at most ``max_tokens`` tokens, or one micro-batch.

    If rows are padded, a pass has one padded length: a row's bits in attention's backward pass depend on its length.
    """
    by_length: dict[int, list[_Piece]] = {}
    # In the order of slots and next fit, not best fit: the factors of neighbouring slots are one view of the bank, and
    # others would have to be copied together at every layer.
    for piece in sorted(pieces, key=lambda p: p.slot):
        flat = piece.share.agent.runtime.base.flattens
        by_length.setdefault(0 if flat else piece.batch.ids.shape[1], []).append(piece)
    packs: list[list[_Piece]] = []
    for group in by_length.values():
        room = -1
        for piece in group:
            if piece.tokens > room:
                packs.append([])
                room = max_tokens
            packs[-1].append(piece)
            room -= piece.tokens
    return packs


def _forward_backward(runtime: Runtime, pack: Sequence[_Piece]) -> float:
    """Add the gradients of some micro-batches to the store: one forward, each agent's own loss, one backward.

    The total is the plain sum of the agents' losses, each divided by its own window's denominator. A loss that is not
    finite does not reach another agent's gradient; its own agent will skip the next step. Returns the total.
    """
    agents = [piece.share.agent for piece in pack]
    parts = [p.part(p.slot, getattr(a.config, "temperature", 1.0)) for p, a in zip(pack, agents)]
    critics = [(i, agent.critic_slot) for i, agent in enumerate(agents) if agent.critic_slot is not None]
    parts += [pack[i].part(slot, values=True) for i, slot in critics]
    with runtime.base.recomputing(any(piece.recompute for piece in pack)):
        outputs = forward(runtime, parts, entropy=True)
    values = {i: output.values for (i, _), output in zip(critics, outputs[len(pack) :])}
    losses = []
    for i, (piece, output) in enumerate(zip(pack, outputs)):
        loss = compute_loss(agents[i], piece.share.loss, _inputs(piece, output, values.get(i)), piece.metrics)
        if output.router_loss is not None:
            loss = loss + (piece.router_weights.to(output.router_loss) * output.router_loss).sum()
            piece.metrics.add("router_aux_loss", output.router_loss.detach())
        piece.is_finite = bool(torch.isfinite(loss))
        losses.append(loss)
    # A sum hands each loss a gradient of 1, so that a NaN stays with its agent.
    total = torch.stack(losses).sum()
    with nullcontext() if runtime.lockstep is None else runtime.lockstep.backward():
        total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach())


def _inputs(piece: _Piece, output: TokenOutputs, values: Tensor | None) -> LossInputs:
    e, batch, logp = piece.share.experience, piece.batch, output.logp
    assert logp is not None
    width, device = logp.shape[1], logp.device

    def rows(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        selected = values[piece.rows.to(values.device)]
        # A micro-batch is cut to its longest row, and so narrower than the batch.
        return (selected if selected.dim() == 1 else selected[:, :width]).to(device)

    old, advantages = rows(e.old_logp), rows(e.advantages)
    assert advantages is not None
    return LossInputs(
        logp=logp,
        mask=batch.action_mask.to(device),
        old_logp=logp.detach() if old is None else old,
        advantages=advantages,
        denominator=piece.share.denominator,
        ref_logp=rows(e.ref_logp),
        sampling_logp=rows(e.sampling_logp),
        entropy=output.entropy,
        turn_ids=batch.turn_ids.to(device),
        values=values,
        old_values=rows(e.old_values),
        returns=rows(e.returns),
        collision=output.collision,
        desirable=None if batch.desirable is None else batch.desirable.to(device),
        reference_point=rows(e.reference_point),
    )


# -- the update: windows of each agent, one after another -------------------------------------------------------------


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
        # In the first window the policy is still the one before the update, but recomputed old log-probs could differ
        # from the current ones by rounding, which depends on the rows in a forward, and by what lora_dropout leaves
        # out. Without old log-probs the current ones stand in for them, and the ratio is exactly 1.
        same = sampled_as_trained(agent, batch) and not agent.lora_config.lora_dropout
        first = self.experience if same else replace(self.experience, old_logp=None)
        for epoch in range(agent.config.update_epochs):
            for rows in torch.split(_order(agent, len(batch), epoch), agent.window_rows):
                denominator = loss_denominator(agent, None, batch.action_mask[rows])
                experience = self.experience if self.windows else first
                window = len(self.windows)
                self.windows.append(Share(agent, experience, rows, denominator, self.metrics, window=window))


def _order(agent: Learner, rows: int, epoch: int) -> Tensor:
    """Return the rows of one epoch in random order; rows that belong together (a pair) stay side by side."""
    unit = agent.rows_per_unit
    # The units are shuffled, [units, 1] + [unit] gives their rows.
    units = agent.shuffle(rows // unit, epoch)
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def learn_together(
    agents: Sequence[Learner],
    batches: Sequence[RolloutBatch],
    sampled: Sequence[Outcome] | None = None,
    teacher: Teacher | None = None,
    *,
    whole: bool = False,
) -> list[dict[str, float]]:
    """Train each agent on its own batch, all agents of one runtime together; returns each agent's metrics.

    Agents may differ in all settings: an agent with fewer optimizer steps drops out of the later rounds. What an agent
    computes depends on its own rows alone, so training it alone gives the same result. ``sampled`` has the outcomes of
    sampling the batches; an agent whose outcome is not ok learns nothing. The result is in ``agent.outcome``.
    A ``teacher`` is what all of them are drawn to. Of several processes, all pass the same; with ``whole`` each trains
    some of the agents as if alone, else they share the rows of every agent.
    """
    runtime = agents[0].runtime
    _check_equal(runtime, agents, batches)
    outcomes: Sequence[Outcome] = ["ok"] * len(agents) if sampled is None else sampled
    work = [(*each, teacher) for each in zip(agents, batches, outcomes)]
    results = _apart(runtime, work) if whole and runtime.processes.size > 1 else _learn(runtime, work)
    for agent, (outcome, values) in zip(agents, results):
        # In every process: a reference that moves may take a slot, which has to be the same in all of them.
        values |= agent.note_update()
        agent.note_outcome(outcome, values)
    return [values for _, values in results]


_Work = tuple[Learner, RolloutBatch, Outcome, Teacher | None]
"""An agent, what it learns from, how that was sampled, and its teacher."""
_Result = tuple[Outcome, dict[str, float]]


def _apart(runtime: Runtime, work: Sequence[_Work]) -> list[_Result]:
    """Let each process train some of the agents, and give them all to all processes."""
    processes, store = runtime.processes, runtime.store
    shares = processes.parts(range(len(work)), whole=True)

    def compute() -> bytes:
        mine = [work[k] for k in shares[processes.rank]]
        with runtime.alone():
            results = _learn(runtime, mine)
        trained = [[*result, counters_of(agent)] for result, (agent, *_) in zip(results, mine)]
        return as_json([trained, asdict(runtime.limits)])

    received = [json.loads(part) for part in processes.agreed(compute, runtime.lockstep)]
    for name in asdict(runtime.limits):
        # What one of them has learned of memory, all keep to.
        smallest = min((value for _, limits in received if (value := limits[name]) is not None), default=None)
        setattr(runtime.limits, name, smallest)
    results = []
    for owner, (share, (trained, _)) in enumerate(zip(shares, received)):
        for k, (outcome, values, counters) in zip(share, trained):
            agent = work[k][0]
            for name, value in counters.items():
                setattr(agent, name, value)
            for slot in agent.optimizer_settings():
                for bank in (store.theta, store.exp_avg, store.exp_avg_sq, store.steps):
                    processes.broadcast_(bank[slot : slot + 1], owner)
            results.append((outcome, values))
    return results


def _learn(runtime: Runtime, work: Sequence[_Work]) -> list[_Result]:
    """Train agents in this process, or together with processes that share their rows; return outcomes and metrics."""
    agents = [agent for agent, *_ in work]
    try:
        updates = [_begin(*arguments) for arguments in work]
    finally:
        if runtime.lockstep is not None:
            # Processes that train other agents may have log-probs left to compute, and gradients come next.
            runtime.lockstep.catch_up()
    for update, (_, batch, *_) in zip(updates, work):
        record_batch(batch, update.metrics)
        for name, value in update.experience.metrics.items():
            update.metrics.add(name, value)
    # What calls of accumulate have left behind does not belong to this update.
    clear_gradients(agents)
    for step in range(max((len(u.windows) for u in updates), default=0)):
        active = [u for u in updates if step < len(u.windows) and u.outcome == "ok"]
        unfit = accumulate(runtime, [u.windows[step] for u in active])
        for update in active:
            if update.agent in unfit:
                update.outcome = "oom"
        # Without memory for a window an agent keeps the steps that it took, and takes no more.
        active = [u for u in active if u.outcome == "ok"]
        if active:
            optim_step([u.agent for u in active], [u.metrics for u in active])
    return [_finish(u) for u in updates]


def _check_equal(runtime: Runtime, agents: Sequence[Learner], batches: Sequence[RolloutBatch]) -> None:
    """Raise ConfigError unless all processes have agents of the same weights, and the same batches."""
    if runtime.processes.size == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for agent, batch in zip(agents, batches):
        # As whole numbers, because their sum does not depend on the order.
        bits = runtime.store.theta[agent.slot].view(torch.int32).sum(dtype=torch.int64)
        digest.update(repr((agent.index, agent.updates, agent.config, int(bits))).encode())
        for part in (batch.ids, batch.action_mask, batch.rewards, batch.groups):
            digest.update(part.cpu().numpy().tobytes())
    if len(set(runtime.processes.gather(digest.digest()))) > 1:
        raise ConfigError(
            "the processes that work together must have equal agents and train them on equal batches (learn joins "
            "their rows), found different ones; run the same program with the same seeds in all of them, on devices "
            "of one kind"
        )


def _begin(agent: Learner, batch: RolloutBatch, outcome: Outcome, teacher: Teacher | None) -> _Update:
    nothing = batch.select(slice(0, 0))
    if outcome == "nonfinite":
        agent.skipped_steps += 1
        agent.note_step(taken=False)
    if outcome != "ok":
        # No rows, so no window and no step; the metrics of sampling are still reported.
        return _Update(agent, agent.prepare(nothing), outcome=outcome)
    try:
        experience = agent.prepare(batch)
        return _Update(agent, teacher.applied(agent, experience) if teacher else experience)
    except MemoryExhaustedError:
        return _Update(agent, agent.prepare(nothing), outcome="oom")


def accumulate_batch(
    agent: Learner, experience: Experience, loss: LossFunction | None, denominator: float | None
) -> MetricReducer:
    """Add the gradient of one agent's rows, as a part of an optimizer step; returns the metrics of these rows.

    Without a ``denominator`` the rows are the whole step. Raises MemoryExhaustedError, with the pending gradient
    unchanged, if even the smallest pass does not fit into memory.
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

    An agent steps as a whole: if a loss since its last step, or the gradient of one of its slots, is not finite, all of
    it stays unchanged.
    """
    store = agents[0].runtime.store
    owners, slots, settings, sound = [], [], [], []
    for i, agent in enumerate(agents):
        by_slot = agent.optimizer_settings()
        # adamw_step looks at each slot alone, but of two slots neither may move without the other.
        sound.append(agent.gradient_is_finite and (len(by_slot) == 1 or _finite_gradients(store, list(by_slot))))
        for slot, setting in by_slot.items():
            owners.append(i)
            slots.append(slot)
            settings.append(setting)
    norms, applied = adamw_step(store, slots, settings, [sound[i] for i in owners])
    clear_gradients(agents)
    stepped = [all(a for a, owner in zip(applied, owners) if owner == i) for i in range(len(agents))]
    for i, agent in enumerate(agents):
        agent.skipped_steps += not stepped[i]
        agent.note_step(taken=stepped[i])
        # The actor's slot, which optimizer_settings names first.
        first = owners.index(i)
        metrics[i].add("grad_norm", norms[first])
        metrics[i].add("learning_rate", settings[first].lr)
    return stepped


def _finite_gradients(store: AdapterStore, slots: Sequence[int]) -> bool:
    """Return whether the gradient norm of every slot is finite, by the measure of the optimizer itself."""
    return bool(torch.isfinite(torch.stack([torch.linalg.vector_norm(store.grad[slot]) for slot in slots])).all())


def _finish(update: _Update) -> _Result:
    agent, batch = update.agent, update.experience.batch
    if update.outcome == "ok" and agent.skipped_steps > update.skipped_before:
        update.outcome = "nonfinite"
    if update.outcome != "oom":
        agent.tokens["trained"] += agent.config.update_epochs * int(batch.lengths.sum())
        agent.steps += len(batch)
    values = update.metrics.result()
    # The sum over all optimizer windows; a window's loss is what one step minimised.
    values["loss"] = values.get("loss", 0.0) / max(len(update.windows), 1)
    values["skipped_steps"] = float(agent.skipped_steps)
    values["num_tokens"] = float(agent.tokens["trained"])
    values["mean_loss"], values["mean_kl"] = values["loss"], values.get("kl", 0.0)
    return update.outcome, values
