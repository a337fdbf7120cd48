"""Forward passes over rows of several agents: log-probs, entropies, values, with gradient and without."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from agilerl.data import MicroBatch, RolloutBatch, cut
from agilerl.errors import MemoryExhaustedError
from agilerl.functional import router_balance_loss
from agilerl.models.flat import Packed, PaddedRows, flatten
from agilerl.models.lora import token_keys, token_values
from agilerl.models.memory import attempt
from agilerl.models.slots import Dropout, Route
from agilerl.rollouts.activated import Beginnings, invocations
from agilerl.runtime import Runtime

Output = Literal["logp", "values", "entropy"]


@dataclass(frozen=True)
class AgentRows:
    """Rows of one agent in a shared forward pass."""

    slot: int | None
    """Adapter slot, or None for the base model alone."""
    batch: RolloutBatch
    temperature: float
    """Log-probs are those of ``logits / temperature``."""
    values: bool = False
    """Ask the slot's value head instead of the language-model head."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is left out while gradients are computed; needs ``draws``."""
    draws: Tensor | None = None
    """[B] int32 number of each row, which decides what is left out."""
    collision: bool = False
    """Ask for the collision entropies too, which cost the head a second time."""
    routers: bool = False
    """Ask for the load-balancing loss of a mixture's routers too."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass says about the tokens of one part, ``[b, T-1]`` each; 0 off the action mask."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    """Value of the state before each action token, for parts that asked for values."""
    collision: Tensor | None = None
    """Collision entropy ``-log sum_v p(v)^2``, for parts that asked for it."""
    router_loss: Tensor | None = None
    """[b] load-balancing loss of each row's tokens, with gradient, for parts that asked for it."""


def forward(runtime: Runtime, parts: Sequence[AgentRows], *, entropy: bool = False) -> list[TokenOutputs]:
    """Return the outputs of each part from one forward pass over all of them.

    Parts without a slot come last. If the base does not compute rows in one line (``base.flattens``), all parts
    have the same padded length. The language-model head runs on the action tokens of the parts that need it only.
    Positions off an action mask carry no gradient.
    """
    device = runtime.base.device
    routing = any(part.routers for part in parts)
    none: AbstractContextManager[list[Tensor]] = nullcontext([])
    with runtime.base.recorded_routers() if routing else none as routers:
        hidden, sources = _hidden(runtime, parts)
    masks = [p.batch.action_mask.cpu() for p in parts]
    # What foretells token t + 1 is the state at token t.
    places = [source[:, :-1][mask].to(device) for source, mask in zip(sources, masks)]
    by_part = _action_logprobs(runtime, parts, hidden, places, masks, entropy=entropy)
    outputs: list[TokenOutputs] = []
    for i, (part, mask) in enumerate(zip(parts, masks)):
        spread = partial(_scatter, mask.to(device))
        if part.values:
            assert part.slot is not None
            values = token_values(hidden.index_select(0, places[i]), runtime.store, part.slot)
            outputs.append(TokenOutputs(values=spread(values)))
        else:
            logp, entropies = by_part[i]
            collision = None
            if part.collision:
                temperatures = torch.full((len(places[i]),), part.temperature)
                collision = spread(runtime.base.collision_entropy(hidden.index_select(0, places[i]), temperatures))
            balance = _router_loss(runtime, part.batch, sources[i], routers) if part.routers else None
            spreads = None if entropies is None else spread(entropies)
            outputs.append(TokenOutputs(spread(logp), spreads, collision=collision, router_loss=balance))
    return outputs


def _router_loss(runtime: Runtime, batch: RolloutBatch, source: Tensor, routers: Sequence[Tensor]) -> Tensor:
    """Return the load-balancing loss of each row ``[b]``; ``source`` ``[b, T]`` are the places of its tokens."""
    assert runtime.base.experts_per_token is not None
    real = torch.arange(source.shape[1]) < batch.lengths.cpu()[:, None]
    # Each place once, though rows share prompts: the gradient of a repeated index would add up in any order.
    places, token = source[real].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    wide = torch.promote_types(torch.float32, routers[0].dtype)
    members = torch.zeros((len(batch), len(places)), dtype=wide)
    members[torch.nonzero(real)[:, 0], token] = 1.0
    chosen = [logits.index_select(0, places.to(logits.device)) for logits in routers]
    return router_balance_loss(chosen, members.to(runtime.base.device), runtime.base.experts_per_token)


def _action_logprobs(
    runtime: Runtime,
    parts: Sequence[AgentRows],
    hidden: Tensor,
    places: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    entropy: bool,
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Return log-probs and entropies of the action tokens of each part that does not ask for values."""
    device, speaking = runtime.base.device, [i for i, part in enumerate(parts) if not part.values]
    if not speaking:
        return {}
    targets = torch.cat([parts[i].batch.ids.cpu()[:, 1:][masks[i]] for i in speaking]).to(device)
    counts = [len(places[i]) for i in speaking]
    temperatures = torch.tensor([parts[i].temperature for i in speaking]).repeat_interleave(torch.tensor(counts))
    states = hidden.index_select(0, torch.cat([places[i] for i in speaking]))
    logps, entropies = runtime.base.logprobs(states, targets, temperatures.to(device), entropy=entropy)
    split = [None] * len(speaking) if entropies is None else torch.split(entropies, counts)
    return dict(zip(speaking, zip(torch.split(logps, counts), split)))


def _hidden(runtime: Runtime, parts: Sequence[AgentRows]) -> tuple[Tensor, list[Tensor]]:
    """Return hidden states ``[N, H]``, each row by its own adapter, and where each part's tokens are ``[B, T]``."""
    device, counts = runtime.base.device, [len(p.batch) for p in parts]
    # In one line, without padding
    if runtime.base.flattens:
        batches = [p.batch.to("cpu") for p in parts]
        lines, cache = [PaddedRows(batch.ids, batch.lengths, batch.tree) for batch in batches], None
        adapted = [i for i, part in enumerate(parts) if part.slot is not None]
        # What precedes an invocation is the base's alone: computed once, and left out of the line.
        if runtime.invocation and adapted:
            starts = [invocations(batches[i].ids, batches[i].prompt_lengths, runtime.invocation) for i in adapted]
            begun = [Beginnings(batches[i].ids, s, batches[i].tree) for i, s in zip(adapted, starts)]
            cache, places = runtime.prompts.computed(begun)
            for i, known, at in zip(adapted, starts, places):
                lines[i] = PaddedRows(batches[i].ids, batches[i].lengths, batches[i].tree.after(known), known, at)
        rows = flatten(lines, runtime.base.activation_dtype, exact=device.type == "cpu").to(device)
        dropout = _dropout(parts, rows.origins, device)
        with runtime.store.routed(_route(parts, rows.parts, dropout)):
            return runtime.base.flat(rows, **({} if cache is None else {"past_key_values": cache})), list(rows.sources)
    # Padded to one length; for training packed, if the options say so.
    ids = torch.cat([p.batch.ids for p in parts]).to(device)
    sources = torch.split(torch.arange(ids.numel()).view(ids.shape), counts)
    if runtime.options.use_sequence_packing and torch.is_grad_enabled():
        lengths = torch.cat([p.batch.lengths for p in parts]).to(device)

        def route(packed: Packed) -> AbstractContextManager[None]:
            return runtime.store.routed(_route(parts, packed.rows, _dropout(parts, packed.origins, device)))

        return runtime.base.packed(ids, lengths, counts, route).flatten(0, 1), list(sources)
    with runtime.store.routed(_route(parts, counts, _dropout(parts, torch.arange(ids.numel()), device))):
        return runtime.base.hidden(ids).flatten(0, 1), list(sources)


def fixed_logprobs(
    runtime: Runtime, slot: int | None, batch: RolloutBatch, temperature: float, most: MicroBatch
) -> Tensor:
    """Return log-probs ``[B, T-1]`` without gradient: old policy (a slot) or reference (None: adapters off).

    If memory runs out, the rows of a forward are halved; raises MemoryExhaustedError if not even one row fits.
    """
    return _without_gradient(runtime, AgentRows(slot, batch, temperature), most, "logp")


def fixed_values(runtime: Runtime, slot: int, batch: RolloutBatch, most: MicroBatch) -> Tensor:
    """Return the values ``[B, T-1]`` that a critic's slot gives, without gradient."""
    return _without_gradient(runtime, AgentRows(slot, batch, 1.0, values=True), most, "values")


def fixed_entropy(
    runtime: Runtime, slot: int | None, batch: RolloutBatch, temperature: float, most: MicroBatch
) -> Tensor:
    """Return the entropy ``[B, T-1]`` in nats of the distribution of each action token, without gradient."""
    return _without_gradient(runtime, AgentRows(slot, batch, temperature), most, "entropy")


@torch.no_grad()
def _without_gradient(runtime: Runtime, rows: AgentRows, most: MicroBatch, output: Output) -> Tensor:
    """Measure a batch in parts that ``most`` allows, of which each process takes some."""
    count, before = len(rows.batch), runtime.limits.train_tokens
    result = torch.zeros(rows.batch.action_mask.shape, dtype=torch.float32, device=runtime.base.device)
    if runtime.processes.size == 1:
        _fill(runtime, result, range(count), rows, most, output)
        return result
    mine, shares = runtime.processes.share(count), runtime.processes.shares(count)

    def compute() -> bytes:
        _fill(runtime, result, mine, rows, most, output)
        # 0 stands for no limit.
        limit = runtime.limits.train_tokens or 0
        return limit.to_bytes(8) + result[mine.start : mine.stop].cpu().numpy().tobytes()

    try:
        received = runtime.processes.agreed(compute, runtime.lockstep)
    except MemoryExhaustedError:
        # Some may have lowered theirs and still failed: all return to what they had in common.
        runtime.limits.train_tokens = before
        raise
    for share, part in zip(shares, received):
        # frombuffer refuses an empty buffer.
        values = torch.frombuffer(bytearray(part[8:]), dtype=result.dtype) if len(share) else result[:0]
        result[share.start : share.stop] = values.view(len(share), *result.shape[1:]).to(result.device)
    # What one of them has learned of memory, all keep to: they have to cut the same rows in the same way.
    runtime.limits.train_tokens = min((n for part in received if (n := int.from_bytes(part[:8]))), default=None)
    return result


def _fill(
    runtime: Runtime,
    result: Tensor,
    which: range,
    rows: AgentRows,
    most: MicroBatch,
    output: Output,
) -> None:
    """Measure some rows of a batch into ``result``; halves the tokens of a forward if memory runs out."""
    before, waiting = runtime.limits.train_tokens, [torch.arange(which.start, which.stop)]
    # Rows are measured one by one, so a forward may end anywhere.
    flat, alone = runtime.base.flattens, most._replace(unit=1, whole=most.unsaved)
    while waiting:
        left = waiting.pop()
        if not len(left):
            continue
        first, *others = cut(rows.batch, left, alone.at_most(runtime.limits.train_tokens), flat=flat).parts
        # Reversed, because the stack gives back its last entry first.
        waiting += others[::-1]
        part = replace(rows, batch=rows.batch.select(first))
        outputs = attempt(partial(forward, runtime, [part], entropy=output == "entropy"))
        if outputs is None:
            if len(first) == 1:
                runtime.limits.train_tokens = before
                raise MemoryExhaustedError(
                    f"memory does not hold a forward pass over one row of {int(part.batch.lengths)} tokens"
                )
            waiting.append(first)
            # Half of what this forward had, which may have been less than the limit.
            runtime.limits.train_tokens = max(1, (part.batch.distinct_tokens if flat else part.batch.ids.numel()) // 2)
            continue
        # select() may have cut the padding that these rows do not need.
        values: Tensor = getattr(outputs[0], output)
        result[first, : values.shape[1]] = values.float()


def _route(parts: Sequence[AgentRows], rows: Sequence[int], dropout: Dropout | None = None) -> Route | None:
    """Return the route of a batch in which each part has so many rows."""
    pairs = [(p.slot, count) for p, count in zip(parts, rows) if p.slot is not None]
    return Route(tuple(s for s, _ in pairs), tuple(n for _, n in pairs), dropout) if pairs else None


def _dropout(parts: Sequence[AgentRows], origins: Tensor, device: torch.device) -> Dropout | None:
    """Return what the parts' adapters leave out of a line of tokens; None: nothing, or no gradient is wanted.

    ``origins [N]`` say which token of all parts' rows, side by side, each one of the line is.
    """
    if not (torch.is_grad_enabled() and any(part.dropout for part in parts)):
        return None
    keys = [
        # Parts without dropout have keys that nothing reads, so that the places stay those of all rows.
        token_keys(part.draws, part.batch.ids.shape[1]).flatten()
        if part.dropout and part.draws is not None
        else torch.zeros(part.batch.ids.numel(), dtype=torch.int32)
        for part in parts
    ]
    rates = tuple(part.dropout for part in parts if part.slot is not None)
    return Dropout(rates, torch.cat(keys)[origins].to(device))


def _scatter(mask: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)
