"""Batched decoding of all agents' rows with one base model: the default rollout engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from agilerl import streams
from agilerl.data import Completion
from agilerl.errors import EngineError
from agilerl.models.base import BaseModel
from agilerl.models.flat import Rows, flatten
from agilerl.models.kernels import asking, attend_decoding
from agilerl.models.memory import MemoryLimits, attempt
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.engine import GenerationRequest, OnCompletion, SamplingSettings, of_part
from agilerl.rollouts.kv_cache import Kept, RaggedCache
from agilerl.rollouts.sampling import RowSettings, draw
from agilerl.sizes import CPU_ROWS, LENGTH_MULTIPLE, MAX_ROWS, UNIT_ROWS, padded_length

_COMPACT_BELOW = 0.75  # an agent's finished rows leave the batch once this share of its rows is still running


@dataclass
class _Unit:
    """Rows of one slot that always travel together; which these are depends on the slot's requests, and on memory."""

    slot: int | None
    rows: list[tuple[int, int]]
    """(request, sample) of each row."""


class TorchEngine:
    """Decodes every agent's rows in one batch over a shared base.

    Each prompt is prefilled once per agent and its cache expanded to the group. ``max_rows`` bounds the rows in
    flight (memory); ``unit_rows`` is the most rows of one agent in one batch. Where memory runs out, the rows in flight
    are halved, and stay so in ``limits``; a row that it does not hold alone ends as ``oom``, without a token.
    """

    exact = True

    def __init__(
        self,
        base: BaseModel,
        store: AdapterStore,
        *,
        seed: int,
        max_rows: int = MAX_ROWS,
        unit_rows: int = UNIT_ROWS,
        limits: MemoryLimits | None = None,
    ) -> None:
        self.base, self.store, self.seed = base, store, seed
        self.max_rows, self.unit_rows = max_rows, unit_rows
        self.limits = MemoryLimits() if limits is None else limits
        self.prompts_at_once: int | None = None
        """Most requests decoded together; None: ``max_rows`` alone decides."""
        self._eos = torch.tensor(base.eos_token_ids, dtype=torch.int64, device=base.device)
        self._row_multiple = CPU_ROWS if base.device.type == "cpu" else 1

    @torch.no_grad()
    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order; ``on_completion`` gets each when it ends.

        Raises EngineError when a prompt is empty or leaves no room in the context.
        """
        for request in requests:
            length, limit = len(request.prompt_ids), self.base.context_length
            if not 0 < length < limit:
                raise EngineError(
                    f"a prompt of {length} tokens cannot be continued: the context holds {limit}, prompt and "
                    "completion together"
                )
        chunk = self.prompts_at_once or len(requests)
        if chunk < len(requests):
            parts = [range(start, min(start + chunk, len(requests))) for start in range(0, len(requests), chunk)]
            generated = [self.generate([requests[k] for k in part], of_part(on_completion, part)) for part in parts]
            return [group for part in generated for group in part]
        found: dict[tuple[int, int], Completion] = {}

        def end(row: tuple[int, int], completion: Completion) -> None:
            found[row] = completion
            if on_completion is not None:
                on_completion(*row, completion)

        rows: dict[int | None, list[tuple[int, int]]] = {}
        for place, request in enumerate(requests):
            rows.setdefault(request.slot, []).extend((place, sample) for sample in range(request.samples))
        waiting, before = self._batches(rows), self.limits.decode_rows
        while waiting:
            batch = waiting.pop(0)
            count = sum(len(unit.rows) for unit in batch)
            if count > self.limits.decoding(count):
                waiting[:0] = self._batches({unit.slot: unit.rows for unit in batch})
                continue
            if attempt(partial(_decode, self, requests, batch, end)) is not None:
                continue
            # Rows that had ended before memory ran out stay as they are: somebody may be grading them by now.
            left = [_Unit(unit.slot, [row for row in unit.rows if row not in found]) for unit in batch]
            again = [unit for unit in left if unit.rows]
            kept = [r.conversation for r in requests if r.conversation is not None and r.conversation.kept is not None]
            if kept:  # computing these tokens again needs less memory than keeping them
                for conversation in kept:
                    conversation.token_ids, conversation.kept = (), None
            elif count > 1:
                self.limits.decode_rows = count // 2
            else:  # this one row is too much by itself, which says nothing about the others
                self.limits.decode_rows = before
                for unit in again:
                    end(unit.rows[0], Completion([], [], "oom"))
                again = []
            if again:
                waiting.insert(0, again)
        return [[found[place, sample] for sample in range(r.samples)] for place, r in enumerate(requests)]

    def _batches(self, rows: Mapping[int | None, Sequence[tuple[int, int]]]) -> list[list[_Unit]]:
        """Cut the rows of each slot into units, and pack the k-th unit of every slot into batches."""
        most = self.limits.decoding(self.max_rows)
        size = min(self.unit_rows, self.limits.decoding(self.unit_rows))
        # The base model's rows come last: rows beyond the route carry no adapter.
        order = sorted(rows, key=lambda slot: (slot is None, slot or 0))
        per_slot = {slot: [list(rows[slot][k : k + size]) for k in range(0, len(rows[slot]), size)] for slot in order}
        batches: list[list[_Unit]] = []
        for k in range(max((len(units) for units in per_slot.values()), default=0)):
            batches.append([])
            for unit in (_Unit(slot, per_slot[slot][k]) for slot in order if k < len(per_slot[slot])):
                if batches[-1] and sum(len(u.rows) for u in batches[-1]) + len(unit.rows) > most:
                    batches.append([])
                batches[-1].append(unit)
        return [b for b in batches if b]


_End = Callable[[tuple[int, int], Completion], None]
"""Takes a row, as (request, sample), and its completion."""


def _decode(
    engine: TorchEngine, requests: Sequence[GenerationRequest], units: list[_Unit], end: _End
) -> tuple[list[tuple[int, int]], list[Completion]]:
    return _Decoder(engine, requests, units, end).run()


class _Decoder:
    """One batch from prefill to the last token."""

    def __init__(
        self, engine: TorchEngine, requests: Sequence[GenerationRequest], units: list[_Unit], end: _End
    ) -> None:
        self.engine, self.base, self.requests, self.end = engine, engine.base, requests, end
        self.slots = [u.slot for u in units]
        self.counts = [len(u.rows) for u in units]
        self.rows = [row for u in units for row in u.rows]
        self.unit_of = torch.repeat_interleave(torch.arange(len(units)), torch.tensor(self.counts))
        settings = [requests[r].sampling for r, _ in self.rows]
        lengths = [len(requests[r].prompt_ids) for r, _ in self.rows]
        room = [self.base.context_length - length for length in lengths]
        self.limits = torch.tensor([min(s.max_new_tokens, c) for s, c in zip(settings, room)])
        self.cut_by_context = [s.max_new_tokens > c for s, c in zip(settings, room)]
        self.steps = int(self.limits.max())
        self.capacity = padded_length(max(n + int(m) for n, m in zip(lengths, self.limits)))
        self.lengths = torch.tensor(lengths)
        self.settings = RowSettings.of(settings, self.base.device)
        self.uniforms = torch.from_numpy(self._uniforms(settings)).to(self.base.device)
        self.tokens = torch.zeros((len(self.rows), self.steps), dtype=torch.int64)
        self.logps = torch.zeros((len(self.rows), self.steps))
        self.kept: dict[int, Kept] = {}
        """Keys and values of finished rows; handed to their conversations once the whole batch has succeeded."""
        self.ended: list[str] = [""] * len(self.rows)
        self.produced = [0] * len(self.rows)
        self.completions: dict[int, Completion] = {}

    def _uniforms(self, settings: Sequence[SamplingSettings]) -> np.ndarray:
        table = np.zeros((len(self.rows), self.steps))
        keys: dict[str, dict[int, tuple[int, ...]]] = {}
        for i, (r, sample) in enumerate(self.rows):
            if settings[i].temperature > 0:
                keys.setdefault(self.requests[r].purpose, {})[i] = (*self.requests[r].key, sample)
        for purpose, drawn in keys.items():
            table[list(drawn)] = streams.uniform_rows(self.engine.seed, purpose, list(drawn.values()), self.steps)
        return table

    def run(self) -> tuple[list[tuple[int, int]], list[Completion]]:
        """Decode to the end; each row is handed over when it ends."""
        cache = RaggedCache(self.base.num_layers)
        logits, seen = self._prefill(cache)
        live = torch.arange(len(self.rows))  # row of the result that each row of the batch writes to
        running = torch.ones(len(self.rows), dtype=torch.bool)
        lengths = self.lengths.clone()
        for step in range(self.steps):
            settings = self.settings.select(live)
            tokens, logps = draw(
                logits, self.uniforms[live, step], settings, position=step, eos=self.engine._eos, seen=seen
            )
            running = self._record(step, live, running, tokens.cpu(), logps.cpu())
            if not running.any():
                break
            keep = self._surviving(live, running)
            if keep is not None:
                self._remember(cache, live, torch.isin(torch.arange(len(live)), keep, invert=True))
                live, running, lengths, tokens = live[keep], running[keep], lengths[keep], tokens[keep]
                seen = None if seen is None else seen[keep]
                cache.select(self._pad_rows(keep))
            if seen is not None:
                seen[torch.arange(len(live)), tokens] = True
            logits = self._step(cache, live, tokens, lengths)
            lengths = lengths + running  # a finished row keeps overwriting one position that nobody reads
        self._remember(cache, live, torch.ones(len(live), dtype=torch.bool))
        for row, kept in self.kept.items():
            request, count = self.requests[self.rows[row][0]], self.produced[row]
            assert request.conversation is not None
            said = self.tokens[row, : count - 1].tolist()
            conversation = request.conversation
            conversation.slot, conversation.kept = request.slot, kept
            conversation.token_ids = [*request.prompt_ids, *said]
        return self.rows, [self.completions[i] for i in range(len(self.rows))]

    def _remember(self, cache: RaggedCache, live: Tensor, over: Tensor) -> None:
        """Keep what was computed of rows that leave the batch; the last token drawn was not."""
        for place in torch.nonzero(over)[:, 0].tolist():
            row = int(live[place])
            if self.requests[self.rows[row][0]].conversation is not None and self.base.flattens and self.produced[row]:
                self.kept[row] = cache.of_row(place, int(self.lengths[row]) + self.produced[row] - 1)

    def _prefill(self, cache: RaggedCache) -> tuple[Tensor, Tensor | None]:
        """Run each prompt once per unit; returns the first logits ``[R, V]`` and, if needed, the tokens seen."""
        prompts: list[tuple[int, int]] = []
        source = []
        per_unit = [0] * len(self.slots)
        for unit, (request, _) in zip(self.unit_of.tolist(), self.rows):
            if not prompts or prompts[-1] != (unit, request):
                prompts.append((unit, request))
                per_unit[unit] += 1
            source.append(len(prompts) - 1)
        device, rows = self.base.device, torch.tensor(source)
        hidden, places = self._prompts([self.requests[request] for _, request in prompts], per_unit, cache)
        last = hidden[places[:, -1].to(device)]
        last = torch.cat([last, last[:1].expand(-len(last) % self.engine._row_multiple, -1)])
        cache.expand(places[self._pad_rows(rows)].to(device), self.capacity)
        rows = rows.to(device)
        seen = None
        if bool((self.settings.repetition_penalty != 1).any()):
            seen = torch.zeros((len(prompts), self.base.vocabulary_size), dtype=torch.bool, device=device)
            for i, (_, request) in enumerate(prompts):
                seen[i, torch.tensor(self.requests[request].prompt_ids, device=device)] = True
            seen = seen[rows]
        return self.base.logits(last)[rows], seen

    def _prompts(
        self, requests: Sequence[GenerationRequest], per_unit: Sequence[int], cache: RaggedCache
    ) -> tuple[Tensor, Tensor]:
        """Compute the prompts of all units, which fill the cache; what a conversation has kept is not computed again.

        Returns hidden states ``[N, H]``, and ``[prompts, length]`` where the cache has each token; those that were
        computed have the same place among the states. After the end of a prompt it is that of its last token.
        """
        base, store, prompts = self.base, self.engine.store, [request.prompt_ids for request in requests]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        length = int(lengths.max())
        if base.flattens:
            ids = torch.zeros((len(prompts), length), dtype=torch.int64)
            ids[torch.arange(length) < lengths[:, None]] = torch.tensor(list(chain.from_iterable(prompts)))
            known = torch.tensor([_known(request) for request in requests])
            cache.kept = _kept(requests, known.tolist(), base.num_layers)
            columns = [ids, lengths] if cache.kept is None else [ids, lengths, known]
            units = zip(*(torch.split(column, list(per_unit)) for column in columns))
            of_units = [Rows(unit[0], unit[1], known=unit[2] if len(unit) > 2 else None) for unit in units]
            rows = flatten(of_units, base.dtype, exact=base.device.type == "cpu")
            with store.routed(self._route(rows.parts)):
                return base.flat(rows.to(base.device), past_key_values=cache), torch.cat(rows.sources)
        width = padded_length(length)
        ids = torch.zeros((len(prompts) + -len(prompts) % self.engine._row_multiple, width), dtype=torch.int64)
        ids[: len(prompts)][torch.arange(width) < lengths[:, None]] = torch.tensor(list(chain.from_iterable(prompts)))
        with store.routed(self._route(per_unit)):
            hidden = base.hidden(ids.to(base.device), past_key_values=cache)
        starts = torch.arange(len(prompts))[:, None] * width
        return hidden.flatten(0, 1), starts + torch.minimum(torch.arange(length), lengths[:, None] - 1)

    def _route(self, counts: Sequence[int]) -> Route | None:
        pairs = [(s, c) for s, c in zip(self.slots, counts) if s is not None and c]
        return Route(tuple(s for s, _ in pairs), tuple(c for _, c in pairs)) if pairs else None

    def _pad_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(-len(rows) % self.engine._row_multiple)])

    def _record(self, step: int, live: Tensor, running: Tensor, tokens: Tensor, logps: Tensor) -> Tensor:
        """Write the drawn tokens of running rows; returns which rows go on."""
        self.tokens[live[running], step] = tokens[running]
        self.logps[live[running], step] = logps[running]
        stops = torch.isin(tokens, self.engine._eos.cpu())
        broken = ~torch.isfinite(logps)
        full = self.limits[live] <= step + 1
        over = running & (stops | full | broken)
        for i in torch.nonzero(over)[:, 0].tolist():
            row = int(live[i])
            self.produced[row] = step + 1
            limit = "context" if self.cut_by_context[row] else "length"
            self.ended[row] = "error" if broken[i] else "stop" if stops[i] else limit
            self.completions[row] = self._completion(row)
            self.end(self.rows[row], self.completions[row])
        return running & ~over

    def _surviving(self, live: Tensor, running: Tensor) -> Tensor | None:
        """Choose the rows to keep, unit by unit, or None when all stay; updates ``counts``.

        The rule looks at one unit alone, so that its rows are batched alike whoever else is in flight.
        """
        units = self.unit_of[live]
        left = torch.bincount(units[running], minlength=len(self.counts)).tolist()
        smaller = [bool(count) and own <= _COMPACT_BELOW * count for own, count in zip(left, self.counts)]
        if not any(smaller):
            return None
        self.counts = [own if small else count for own, small, count in zip(left, smaller, self.counts)]
        return torch.nonzero(running | ~torch.tensor(smaller)[units])[:, 0]

    def _step(self, cache: RaggedCache, live: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Feed one token a row at its own position; returns the next logits ``[R, V]``."""
        device = self.base.device
        positions = self._pad_rows(lengths).to(device)
        ids = self._pad_rows(tokens.to(device))[:, None]
        cache.positions = positions
        cache.visible = min(padded_length(int(positions.max()) + 1), self.capacity)
        hidden_from = torch.arange(cache.visible, device=device)[None] > positions[:, None]
        mask = torch.zeros(hidden_from.shape, dtype=self.base.dtype, device=device)
        mask.masked_fill_(hidden_from, torch.finfo(self.base.dtype).min)
        with self.engine.store.routed(self._route(self.counts)):
            hidden = self.base.hidden(
                ids,
                attention_mask=asking(mask[:, None, None], attend_decoding),
                position_ids=positions[:, None],
                past_key_values=cache,
            )
        return self.base.logits(hidden[:, 0])[: len(live)]

    def _completion(self, row: int) -> Completion:
        count = self.produced[row]
        return Completion(self.tokens[row, :count].tolist(), self.logps[row, :count].tolist(), self.ended[row])  # type: ignore[arg-type]


def _known(request: GenerationRequest) -> int:
    """Return how many tokens at the beginning of a prompt its conversation has kept, at most all but the last one."""
    conversation = request.conversation
    said = conversation.token_ids if conversation is not None and conversation.slot == request.slot else ()
    prompt = request.prompt_ids[: len(request.prompt_ids) - 1]
    if list(said[: len(prompt)]) == list(prompt[: len(said)]):
        return min(len(said), len(prompt))
    return next(i for i, (ours, theirs) in enumerate(zip(said, prompt)) if ours != theirs)


def _kept(requests: Sequence[GenerationRequest], known: Sequence[int], layers: int) -> Kept | None:
    """Return the keys and values of the known tokens of all prompts, side by side; None if none are known."""
    own = [(r.conversation.kept, count) for r, count in zip(requests, known) if r.conversation is not None and count]
    if not own:
        return None
    return [
        (torch.cat([kept[i][0][:count] for kept, count in own]), torch.cat([kept[i][1][:count] for kept, count in own]))
        for i in range(layers)
    ]


assert LENGTH_MULTIPLE % CPU_ROWS == 0
