"""Batched decoding of all agents' rows with one base model: the default rollout engine."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl import streams
from agilerl.checks.arguments import reason
from agilerl.data import Completion
from agilerl.data.tree import TokenTree, token_tree
from agilerl.errors import EngineError
from agilerl.models.base import BaseModel
from agilerl.models.flat import KeyValues, PaddedRows, PromptLine, flatten, side_by_side
from agilerl.models.memory import MemoryLimits, attempt
from agilerl.models.reach import EVERYTHING, kinds_with_states
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.activated import Beginnings, PromptCache, invocations
from agilerl.rollouts.engine import Arrivals, GenerationRequest, OnCompletion, SamplingSettings, of_part
from agilerl.rollouts.kv_cache import GroupedCache, RaggedCache
from agilerl.sizes import CPU_ROWS, LENGTH_MULTIPLE, MAX_ROWS, UNIT_ROWS, padded_length
from agilerl.text.padding import decoded

_COMPACT_BELOW = 0.75  # an agent's finished rows leave the batch once this share of its rows, or fewer, would stay
_ENTER_FROM = 0.25  # waiting rows enter a batch once this share of the rows in flight is free
_READ_EVERY = {"cpu": 1}
"""By device, the steps between two reads of the drawn tokens: on other devices each read waits for the device."""
_READ_ELSEWHERE = 8

_UNDECODABLE = "{} cannot be decoded by the torch engine: {}; use another model, or vLLM (use_vllm=True)"


def logprob_tolerance(dtype: torch.dtype) -> float:
    """Return how far log-probs of decoding may be from those of a forward pass, in nats.

    In 16 bits a mixture may choose other experts.
    """
    return {torch.float64: 1e-4, torch.float32: 1e-2}.get(dtype, 0.5)


RowKey = tuple[int, int]
"""(request, sample)."""


class _Unit(NamedTuple):
    """Rows of one slot that enter together; the cut depends on the slot's own requests, and on memory."""

    slot: int | None
    rows: list[RowKey]
    filling: int = 0
    """Rows after them that only fill up the matrix products."""


class Stops:
    """Texts that end a completion with the token that completes one; a function of a row's own tokens alone."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, tuple(texts)
        # A character has at most four tokens. Those before keep the first ones of a text from being rendered otherwise.
        self.window = 4 * max(map(len, self.texts)) + 8
        """The last tokens of a row that are looked at."""

    def ended_by(self, last: Sequence[int]) -> bool:
        """Return whether the last one of these tokens, at most ``window`` of a row, completes a text."""
        now, before = (self._text(ids) for ids in (last, last[:-1]))
        return any(now.count(text) > before.count(text) for text in self.texts)

    def _text(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, ids, skip_special_tokens=True)


class TorchEngine:
    """Decodes every agent's rows in one batch over a shared base.

    Each prompt is prefilled once per agent, and all its completions read the same keys and values. ``max_rows`` bounds
    the rows in flight (memory): as rows end, waiting ones take their places. ``unit_rows`` is the most rows of one
    agent that enter together. If memory runs out, the rows in flight are halved, and ``limits`` keeps that; a row that
    does not even fit alone ends as ``oom``, without a token.
    """

    exact = True
    takes_arrivals = True
    """Whether ``generate`` has the argument ``arrivals``."""

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
        self.prefill_tokens = sys.maxsize
        """The most tokens of prompts in one forward pass, by memory."""
        self.invocation: tuple[int, ...] = ()
        """Tokens of a prompt from which on adapters act; none: all of it."""
        self.prompts = PromptCache(base, store)
        self.stops: Stops | None = None
        """Texts that end completions, besides end tokens."""
        self.read_every = _READ_EVERY.get(base.device.type, _READ_ELSEWHERE)
        """Decoding steps between two reads of the drawn tokens; rows that have ended continue uselessly until then."""
        self._decodes = False
        """Whether decoding was tried out, where we do not compute attention ourselves."""
        self._eos = self._ends()
        self._row_multiple = CPU_ROWS if base.device.type == "cpu" else 1

    def _ends(self) -> Tensor:
        """Return the tokens that end completions; a tokenizer that comes later may add some."""
        ends = [token for token in self.base.eos_token_ids if token < self.base.vocabulary_size]  # others are not drawn
        return torch.tensor(ends, dtype=torch.int64, device=self.base.device)

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: OnCompletion | None = None,
        arrivals: Arrivals | None = None,
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order; ``on_completion`` gets each when it ends.

        ``arrivals`` is asked between two decoding steps for further requests, which are numbered on. With it, the bits
        of a completion depend on its own request alone, not on what is decoded beside it; in exchange, only equal
        prompts are computed once. What their conversations keep is there when ``on_completion`` is called.

        Raises EngineError when a prompt is empty or leaves no room in the context, and for a base that cannot be
        decoded in this way.
        """
        self.check()
        self._check_prompts(requests)
        self._eos = self._ends()
        # Not in parts if more may arrive: those are numbered on from all of these.
        chunk = len(requests) if arrivals is not None else self.prompts_at_once or len(requests)
        if chunk < len(requests):
            parts = [range(start, min(start + chunk, len(requests))) for start in range(0, len(requests), chunk)]
            generated = [self.generate([requests[k] for k in part], of_part(on_completion, part)) for part in parts]
            return [group for part in generated for group in part]
        completions: dict[RowKey, Completion] = {}

        def end(row: RowKey, completion: Completion) -> None:
            completions[row] = completion
            if on_completion is not None:
                on_completion(*row, completion)

        requests, first = list(requests), len(requests)
        every = _rows(requests, 0)
        before = self.limits.decode_rows

        def arrived() -> list[RowKey]:
            """Take what has arrived; returns its rows."""
            further = arrivals() if arrivals is not None else ()
            self._check_prompts(further)
            requests.extend(further)
            every.extend(rows := _rows(requests, len(requests) - len(further)))
            return rows

        # Rows that had ended before memory ran out keep their completions, which may be with a grader by now.
        while left := [row for row in every if row not in completions]:
            units = self._units(requests, left, apart=arrivals is not None)
            decoder = _Decoder(self, requests, units, end, None if arrivals is None else arrived)
            if attempt(decoder.run) is not None:
                break
            flying = decoder.in_flight
            del decoder  # frees its memory
            kept = [r.conversation for r in requests if r.conversation is not None and r.conversation.kept is not None]
            for conversation in kept:  # computing these tokens again needs less memory than keeping them
                conversation.token_ids, conversation.kept = (), None
            if not kept and len(flying) > 1:
                self.limits.decode_rows = len(flying) // 2
            elif not kept:  # this one row does not fit alone; the limit for the other rows stays
                self.limits.decode_rows = before
                end(flying[0], Completion([], [], "oom"))
        return [
            [completions[number, sample] for sample in range(r.samples)] for number, r in enumerate(requests[:first])
        ]

    def _check_prompts(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            length, limit = len(request.prompt_ids), self.base.context_length
            if not 0 < length < limit:
                raise EngineError(
                    f"a prompt of {length} tokens cannot be continued: the context holds {limit}, prompt and "
                    "completion together"
                )

    @torch.no_grad()
    def check(self) -> None:
        """Raise EngineError unless a few decoded tokens have the log-probs of a forward pass over them; tried out once.

        What a model makes of our masks, positions and caches is up to its code.
        """
        if self._decodes or (self.base.flattens and self.base.reaches == EVERYTHING):
            return
        self._decodes = True  # first, because the check itself generates
        try:
            with self.base.narrowed():
                self._check_decoding()
        except EngineError:
            self._decodes = False
            raise

    def _check_decoding(self) -> None:
        # Two lengths, so that the positions and masks of padded rows are tried as well.
        lengths, settings = (5, 11), SamplingSettings(4, temperature=0.0, min_new_tokens=4)
        if self.base.context_length < lengths[-1] + settings.max_new_tokens:
            return
        prompts = [[(1 + i) % self.base.vocabulary_size for i in range(length)] for length in lengths]
        name = type(self.base.model).__name__
        try:
            generated = self.generate([GenerationRequest(None, prompt, 1, settings) for prompt in prompts])
        except Exception as error:  # of many types: from inside the model's code
            states = sorted(kinds_with_states(self.base.model.config.get_text_config()))
            why = f"its layers of the kind {', '.join(states)} keep a state, and no keys and values" if states else ""
            why = why or f"its code does not take a cache of each row's keys and values ({reason(error)})"
            raise EngineError(_UNDECODABLE.format(name, why)) from error
        for prompt, (completion,) in zip(prompts, generated):
            ids = torch.tensor([prompt + completion.token_ids], device=self.base.device)
            logits = self.base.logits(self.base.hidden(ids)[0, len(prompt) - 1 : -1])
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            apart = float((expected - torch.tensor(completion.logprobs, device=expected.device)).abs().mean())
            # Not `apart >=`: NaN is too far as well.
            if completion.token_ids and not apart < logprob_tolerance(self.base.dtype):
                why = f"its log-probs differ by {apart:.2g} from those of a forward pass"
                raise EngineError(_UNDECODABLE.format(name, why))

    def _units(self, requests: Sequence[GenerationRequest], rows: list[RowKey], *, apart: bool = False) -> list[_Unit]:
        """Cut the rows of each slot into units: the first ones of all slots, then the second ones, and so on.

        With ``apart`` units are filled up, so that a row is multiplied alike in a unit of any size.
        """
        size = self.limits.decoding(min(self.unit_rows, self.max_rows))
        of_slot: dict[int | None, list[RowKey]] = {}
        for row in rows:
            of_slot.setdefault(requests[row[0]].slot, []).append(row)
        order = sorted(of_slot, key=lambda slot: (slot is None, slot or 0))
        longest = max((len(slot_rows) for slot_rows in of_slot.values()), default=0)
        starts = [(start, slot) for start in range(0, longest, size) for slot in order if start < len(of_slot[slot])]
        units = [_Unit(slot, of_slot[slot][start : start + size]) for start, slot in starts]
        return [u._replace(filling=-len(u.rows) % self._row_multiple) for u in units] if apart else units


class _Block:
    """Rows that entered together and have drawn equally many tokens: all of adapters, or all of the base model."""

    def __init__(self, engine: TorchEngine, requests: Sequence[GenerationRequest], units: Sequence[_Unit]) -> None:
        device, context = engine.base.device, engine.base.context_length
        self.slots = [u.slot for u in units]
        self.counts = [len(u.rows) + u.filling for u in units]
        """Of each unit, the rows that are left."""
        # Copies of its last row fill a unit up.
        self.rows = [row for u in units for row in (*u.rows, *u.rows[-1:] * u.filling)]
        self.unit_of = torch.arange(len(units)).repeat_interleave(torch.tensor(self.counts))
        settings = [requests[r].sampling for r, _ in self.rows]
        lengths = [len(requests[r].prompt_ids) for r, _ in self.rows]
        limits = [min(s.max_new_tokens, context - length) for s, length in zip(settings, lengths)]
        self.limits, self.steps = torch.tensor(limits), max(limits)
        self.cut_by_context = [s.max_new_tokens > limit for s, limit in zip(settings, limits)]
        self.tokens = torch.zeros((len(self.rows), self.steps), dtype=torch.int64)
        self.logps = torch.zeros((len(self.rows), self.steps), dtype=torch.float32)
        self.produced = [0] * len(self.rows)
        """Tokens of each row that has ended."""
        self.step = 0
        self.live = torch.arange(len(self.rows))
        """The rows that are left in the batch; those of them that have not ended are ``running``."""
        # Rows that only fill up have ended from the start.
        self.running = torch.tensor([k < len(u.rows) for u in units for k in range(len(u.rows) + u.filling)])
        # From here on: state of the rows that are left, on the device.
        self.lengths = torch.tensor(lengths, device=device)
        self.settings = RowSettings.of(settings, device)
        self.least = [s.min_new_tokens for s in settings]
        """Fewest tokens of each row before one that may end it."""
        self.uniforms = torch.from_numpy(_uniforms(engine.seed, requests, self.rows, self.steps)).to(device)
        self.logits = self.last = torch.empty(0)
        """The logits of the next tokens, and the tokens drawn last."""
        self.drawn: list[tuple[Tensor, Tensor]] = []
        """Tokens and log-probs of the last steps, still on the device."""
        self.seen: Tensor | None = None
        """[R, V] tokens of each row, if a repetition penalty asks for them."""

    def __len__(self) -> int:
        return len(self.live)

    def draw(self, eos: Tensor) -> None:
        """Draw the next token of every row."""
        tokens, logps = draw(
            self.logits, self.uniforms[:, self.step], self.settings, position=self.step, eos=eos, seen=self.seen
        )
        self.drawn.append((tokens, logps))
        self.last = tokens
        if self.seen is not None:
            self.seen[torch.arange(len(tokens), device=tokens.device), tokens] = True
        self.step += 1

    def read(self, eos: Tensor, texts: Stops | None = None) -> list[tuple[int, str]]:
        """Read the drawn tokens; returns the rows that have ended, and why."""
        tokens, logps = (torch.stack(parts, dim=1).cpu() for parts in zip(*self.drawn))
        self.drawn = []
        steps = torch.arange(self.step - tokens.shape[1], self.step)
        self.tokens[self.live[:, None], steps], self.logps[self.live[:, None], steps] = tokens, logps
        stops, broken = torch.isin(tokens, eos), ~torch.isfinite(logps)
        if texts is not None:
            for i in torch.nonzero(self.running)[:, 0].tolist():
                row = int(self.live[i])
                for k, end in enumerate(range(int(steps[0]) + 1, self.step + 1)):
                    last = self.tokens[row, max(end - texts.window, 0) : end].tolist()
                    stops[i, k] |= end > self.least[row] and texts.ended_by(last)
        over = stops | broken | (self.limits[self.live][:, None] <= steps + 1)
        ended = []
        for i in torch.nonzero(over.any(1) & self.running)[:, 0].tolist():
            row, at = int(self.live[i]), int(over[i].int().argmax())
            self.produced[row] = int(steps[at]) + 1
            limit = "context" if self.cut_by_context[row] else "length"
            # At the step that ends a row, what is broken outweighs a stop, and a stop the limit.
            ended.append((row, "error" if broken[i, at] else "stop" if stops[i, at] else limit))
        self.running &= ~over.any(1)
        return ended

    def staying(self, multiple: int) -> Tensor | None:
        """Choose the rows that stay, unit by unit, or None if all do; updates ``counts``.

        The rule looks at one unit alone, so that its rows are batched the same way whatever else is in flight. A
        multiple of ``multiple`` rows stays, padded with rows that have ended: units of one size share a matrix
        product. Rows leave only if enough of them have ended, because every removal copies the caches of the rest.
        """
        units = self.unit_of[self.live]
        running = torch.bincount(units[self.running], minlength=len(self.counts)).tolist()
        sizes = [-(-count // multiple) * multiple for count in running]
        smaller = [bool(count) and size <= _COMPACT_BELOW * count for size, count in zip(sizes, self.counts)]
        if not any(smaller):
            return None
        keep = self.running | ~torch.tensor(smaller)[units]
        for unit in [u for u, small in enumerate(smaller) if small]:
            keep[torch.nonzero((units == unit) & ~self.running)[: sizes[unit] - running[unit], 0]] = True
            self.counts[unit] = sizes[unit]
        return torch.nonzero(keep)[:, 0]

    def select(self, rows: Tensor) -> None:
        """Keep some rows."""
        self.live, self.running = self.live[rows], self.running[rows]
        there = rows.to(self.lengths.device)
        self.lengths, self.uniforms = self.lengths[there], self.uniforms[there]
        self.settings = self.settings.select(there)
        self.last = self.last[there]
        self.seen = None if self.seen is None else self.seen[there]


class _Decoder:
    """Decodes rows from prefill to the last token, as many at a time as may be in flight."""

    def __init__(
        self,
        engine: TorchEngine,
        requests: Sequence[GenerationRequest],
        units: Sequence[_Unit],
        end: Callable[[RowKey, Completion], None],
        arrived: Callable[[], list[RowKey]] | None = None,
    ) -> None:
        self.engine, self.base, self.requests, self._end, self._arrived = engine, engine.base, requests, end, arrived
        self.waiting = deque(units)
        self.blocks: list[_Block] = []
        """Blocks with adapters come first: rows of a batch beyond the route use the base model alone."""
        self.in_flight: list[RowKey] = []
        """All rows at the time when some entered last."""
        self._most = max(engine.limits.decoding(engine.max_rows), 1)
        layers, multiple = self.base.num_layers, engine._row_multiple
        self.cache: GroupedCache | RaggedCache
        if self.base.flattens:
            self.cache = GroupedCache(layers, self.base.reaches)
        else:
            self.cache = RaggedCache(layers, multiple, self.base.activation_dtype, self.base.reaches)
        self._eos = engine._eos.cpu()
        self._route: Route | None = None
        self._trees, self._tree_rows = _trees(requests if self.base.flattens and arrived is None else [])
        self._kept: dict[RowKey, tuple[KeyValues, Sequence[int]]] = {}
        """For rows that have ended: what their conversations keep once all rows have succeeded."""

    def run(self) -> bool:
        """Decode to the end."""
        # Each round draws a token for every row before it computes the next logits, so that rows that have ended leave,
        # and waiting ones enter, before the forward pass that they would take part in.
        while self.blocks or self.waiting:
            if self._arrived is not None:
                self.waiting.extend(self.engine._units(self.requests, self._arrived(), apart=True))
            self._admit()
            for block in list(self.blocks):
                block.draw(self.engine._eos)
                if len(block.drawn) == self.engine.read_every or block.step == block.steps:
                    self._read(block)
            if self.blocks:
                self._step()
        for (number, _), (kept, ids) in self._kept.items():
            _keep(self.requests[number], kept, ids)
        return True  # attempt() returns None if memory runs out

    def _admit(self) -> None:
        """Let waiting units enter if there is room for them."""
        there = sum(len(block) for block in self.blocks)
        # Not a few rows at a time: each block costs a prefill, and a separate attention call at every step.
        if not self.waiting or there > (1 - _ENTER_FROM) * self._most or (there and not self.base.flattens):
            return
        running = sum(int(block.running.sum()) for block in self.blocks)
        # Requests arrive one by one, and a block for each would cost a prefill each.
        if self._arrived is not None and sum(len(unit.rows) for unit in self.waiting) < _ENTER_FROM * running:
            return
        entering: list[_Unit] = []
        while self.waiting and (not there or there + len(self.waiting[0].rows) <= self._most):
            entering.append(self.waiting.popleft())
            there += len(entering[-1].rows)
        if not entering:
            return
        self.in_flight = [block.rows[i] for block in self.blocks for i in block.live[block.running].tolist()]
        self.in_flight += [row for unit in entering for row in unit.rows]
        with_adapter = [unit for unit in entering if unit.slot is not None]
        of_base = [unit for unit in entering if unit.slot is None]
        if not self.base.flattens:  # one block, in which the base model's rows come last as well
            self._enter([*with_adapter, *of_base], 0)
            return
        for units in self._divided(with_adapter):
            self._enter(units, sum(block.slots[0] is not None for block in self.blocks))
        for units in self._divided(of_base):
            self._enter(units, len(self.blocks))

    def _divided(self, units: list[_Unit]) -> list[list[_Unit]]:
        """Return the units that are prefilled together: one list, or those of new and of continued conversations."""
        if self._arrived is None:
            return self._fitting(units) if units and self.base.flattens else [units] if units else []
        continued = [row for unit in units for row in unit.rows if _known(self.requests[row[0]])]
        fresh = [row for unit in units for row in unit.rows if row not in continued]
        parts = [self.engine._units(self.requests, rows, apart=True) for rows in (fresh, continued)]
        return [part for part in parts if part]

    def _fitting(self, units: Sequence[_Unit]) -> list[list[_Unit]]:
        """Return the units that are prefilled together, as memory allows, and cut where their own prompts need more."""
        prefills, room = list[list[_Unit]](), 0
        for part, tokens in (cut for unit in units for cut in self._cut(unit)):
            if tokens > room:
                prefills.append([])
                room = self.engine.prefill_tokens
            prefills[-1].append(part)
            room -= tokens
        return prefills

    def _cut(self, unit: _Unit) -> Iterator[tuple[_Unit, int]]:
        """Yield parts of a unit whose prompts fit in one prefill, or have one prompt; and the tokens of these."""
        tree, rows, spent = self._trees[unit.slot], list[RowKey](), 0
        lengths, paths, shared = (tree.ends - tree.starts).tolist(), tree.paths, tree.own.tolist()
        there, asked = set[int](), set[int]()
        for number, sample in unit.rows:
            row = int(self._tree_rows[number])
            if number not in asked:
                rest = len(self.requests[number].prompt_ids) - shared[row]
                tokens = rest + sum(lengths[part] for part in paths[row] if part not in there)
                if rows and spent + tokens > self.engine.prefill_tokens:
                    yield unit._replace(rows=rows), spent
                    rows, spent, there, asked = [], 0, set(), set()
                    tokens = rest + sum(lengths[part] for part in paths[row])
                spent += tokens
                there.update(paths[row])
                asked.add(number)
            rows.append((number, sample))
        yield unit._replace(rows=rows), spent

    def _alike(self, asked: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Replace each request by the first one of its unit with the same prompt, of new conversations."""
        first: dict[Any, tuple[int, int]] = {}
        return [
            key if _known(self.requests[key[1]]) else first.setdefault((key[0], *self.requests[key[1]].prompt_ids), key)
            for key in asked
        ]

    def _enter(self, units: Sequence[_Unit], index: int) -> None:
        """Insert some units as a new block, whose first logits come from each prompt computed once per unit."""
        block = _Block(self.engine, self.requests, units)
        self.blocks.insert(index, block)
        asked = list(zip(block.unit_of.tolist(), (request for request, _ in block.rows)))
        if self._arrived is not None:
            asked = self._alike(asked)
        numbered = {key: i for i, key in enumerate(dict.fromkeys(asked))}
        prompts, prompt_of = list(numbered), torch.tensor([numbered[key] for key in asked])
        per_unit = torch.bincount(torch.tensor([unit for unit, _ in prompts]), minlength=len(block.slots)).tolist()
        numbers, line = [request for _, request in prompts], PromptLine(self.base.num_layers)
        requests = [self.requests[number] for number in numbers]
        hidden, places = self._prompts(numbers, block.slots, per_unit, line)
        lengths, device = torch.tensor([len(request.prompt_ids) for request in requests]), self.base.device
        last = hidden[places[:, -1].to(device)]
        # The head is a matrix product too, and gets a multiple of rows.
        last = torch.cat([last, last[:1].expand(-len(last) % self.engine._row_multiple, -1)])
        there = prompt_of.to(device)
        if self._arrived is None:
            self.cache.admit(index, line, places.to(device), lengths, prompt_of, block.steps)
        else:  # a copy of the prompt for each row: attention of several rows to one prompt has other bits than of one
            each = torch.arange(len(block.rows))
            self.cache.admit(index, line, places.to(device)[there], lengths[prompt_of], each, block.steps)
        if bool((block.settings.repetition_penalty != 1).any()):
            seen = torch.zeros((len(prompts), self.base.vocabulary_size), dtype=torch.bool, device=device)
            for i, request in enumerate(requests):
                seen[i, torch.tensor(request.prompt_ids, device=device)] = True
            block.seen = seen[there]
        block.logits = self.base.logits(last)[there]

    def _prompts(
        self, numbers: Sequence[int], slots: Sequence[int | None], per_unit: Sequence[int], line: PromptLine
    ) -> tuple[Tensor, Tensor]:
        """Compute the prompts of some units into ``line``; what a conversation has kept is not computed again.

        ``numbers`` are those of the requests. Returns hidden states ``[N, H]``, and ``[prompts, length]`` with the
        place of each token in the line; computed tokens have the same place among the states. Padding has the place of
        the prompt's last token.
        """
        base, store, requests = self.base, self.engine.store, [self.requests[number] for number in numbers]
        ids, lengths = _padded([request.prompt_ids for request in requests])
        width = ids.shape[1]
        if base.flattens:
            known = torch.tensor([_known(request) for request in requests])
            line.known = _kept(requests, known.tolist())
            continued = line.known is not None
            # (prompts, width): what is kept of the prompts lies side by side.
            at = (known.cumsum(0) - known)[:, None] + torch.arange(width)
            if self._arrived is None:
                rows_of_units = torch.split(self._tree_rows[torch.tensor(numbers)], list(per_unit))
                trees = [self._trees[slot].select(rows) for slot, rows in zip(slots, rows_of_units)]
            else:
                # What arrives together is chance, and must not decide how a prompt is computed.
                trees = [_nothing_in_common(count) for count in per_unit]
            if activated := bool(self.engine.invocation) and slots[0] is not None:
                known, at = self._activate(requests, ids, known, at, trees, line)
            of_units = []
            columns = (torch.split(column, list(per_unit)) for column in (ids, lengths, known, at))
            for whole, own_ids, count, own_known, own_at in zip(trees, *columns):
                tree = None if continued else whole.after(own_known) if activated else whole
                of_units.append(PaddedRows(own_ids, count, tree, own_known, own_at))
            rows = flatten(of_units, base.activation_dtype, exact=base.device.type == "cpu")
            with store.routed(_route(slots, rows.parts)):
                return base.flat(rows.to(base.device), past_key_values=line), torch.cat(rows.sources)
        ids = torch.cat([ids, ids.new_zeros((-len(ids) % self.engine._row_multiple, width))])
        with store.routed(_route(slots, per_unit)):
            hidden = base.hidden(ids.to(base.device), past_key_values=line)
        # (prompts, width): the padded rows, one after another, are the line.
        starts = torch.arange(len(numbers))[:, None] * width
        return hidden.flatten(0, 1), starts + torch.minimum(torch.arange(width), lengths[:, None] - 1)

    def _activate(
        self,
        requests: Sequence[GenerationRequest],
        ids: Tensor,
        known: Tensor,
        at: Tensor,
        trees: Sequence[TokenTree],
        line: PromptLine,
    ) -> tuple[Tensor, Tensor]:
        """Let the base compute what precedes the invocations, and add it to what ``line`` knows.

        Returns how many tokens of each prompt are known now, and where.
        """
        firsts = torch.tensor([r.first_prompt or len(r.prompt_ids) for r in requests])
        starts = invocations(ids, firsts, self.engine.invocation)
        fresh = known <= starts  # the others continue a conversation in which adapters act already
        columns = (torch.split(column, [len(tree.of) for tree in trees]) for column in (ids, starts * fresh))
        beginnings, places = self.engine.prompts.computed(list(map(Beginnings, *columns, trees)))
        parts = [part for part in (line.known, beginnings.known) if part is not None]
        # Tokens that conversations have kept, by the keys of layer 0: the base's follow them.
        before = len(parts[0][0][0]) if len(parts) > 1 else 0
        line.known = side_by_side(parts)
        of_base = torch.cat([F.pad(p, (0, ids.shape[1] - p.shape[1])) for p in places]) + before
        return torch.where(fresh, starts, known), torch.where(fresh[:, None], of_base, at)

    def _read(self, block: _Block) -> None:
        """Read what a block has drawn; hand out the rows that have ended, which leave once they are enough of them."""
        ended = block.read(self._eos, self.engine.stops)
        for row, why in ended:
            count = block.produced[row]
            if self._arrived is not None:
                self._let_keep(block, int((block.live == row).nonzero()[0]))
            ids, logps = block.tokens[row, :count].tolist(), block.logps[row, :count].tolist()
            self._end(block.rows[row], Completion(ids, logps, why))  # type: ignore[arg-type]
        if not ended:
            return
        index = self.blocks.index(block)
        keep = block.staying(self.engine._row_multiple) if block.running.any() else torch.empty(0, dtype=torch.int64)
        if keep is None:
            return
        leaving = torch.isin(torch.arange(len(block)), keep, invert=True)
        for i in torch.nonzero(leaving)[:, 0].tolist() if self._arrived is None else ():
            self._let_keep(block, i)
        self.cache.select(index, keep)
        if len(keep):
            block.select(keep)
        else:
            del self.blocks[index]

    def _let_keep(self, block: _Block, i: int) -> None:
        """Remember what the conversation of a row that has ended, the i-th that is left, keeps."""
        row = int(block.live[i])
        request = self.requests[block.rows[row][0]]
        if not self.base.flattens or request.conversation is None:
            return
        count = block.produced[row] - 1  # the last token was drawn but never fed, so it has no keys and values
        kept, ids = self.cache.of_row(self.blocks.index(block), i, count), block.tokens[row, :count].tolist()
        if self._arrived is None:
            self._kept[block.rows[row]] = kept, ids
        else:
            _keep(request, kept, ids)

    def _step(self) -> None:
        """Feed every row's last token at its own position: all blocks have their next logits."""
        rows = sum(len(block) for block in self.blocks)
        padding = self.engine._eos.new_zeros(-rows % self.engine._row_multiple)
        ids = torch.cat([*(block.last for block in self.blocks), padding])
        # The token that is fed was drawn already, so step counts it.
        positions = torch.cat([*(block.lengths + (block.step - 1) for block in self.blocks), padding])
        # Rows that have ended continue until the next read, and must not ask for positions beyond the context.
        positions.clamp_(max=self.base.context_length - 1)
        slots = [slot for block in self.blocks for slot in block.slots]
        route = _route(slots, [count for block in self.blocks for count in block.counts])
        # An equal route keeps the same object: layers cache the factors that they have looked up for it.
        if route != self._route:
            self._route = route
        with self.engine.store.routed(self._route):
            hidden = self.base.hidden(
                ids[:, None],
                attention_mask=self.cache.step(positions),
                position_ids=positions[:, None],
                past_key_values=self.cache,
            )
        logits, start = self.base.logits(hidden[:, 0]), 0
        for block in self.blocks:
            block.logits = logits[start : start + len(block)]
            start += len(block)


def _trees(requests: Sequence[GenerationRequest]) -> tuple[dict[int | None, TokenTree], Tensor]:
    """Return the tree of each slot's prompts, and of each request its row in that tree.

    A tree is that of all requests of the slot, so that no bits depend on which of them are in flight.
    """
    of_slot: dict[int | None, list[Sequence[int]]] = {}
    rows = torch.empty(len(requests), dtype=torch.int64)
    for number, request in enumerate(requests):
        prompts = of_slot.setdefault(request.slot, [])
        rows[number] = len(prompts)
        prompts.append(request.prompt_ids)
    return {slot: token_tree(*_padded(prompts)) for slot, prompts in of_slot.items()}, rows


def _nothing_in_common(rows: int) -> TokenTree:
    """Return the tree of rows that are all computed by themselves."""
    nothing = torch.empty(0, dtype=torch.int64)
    return TokenTree(nothing, nothing, nothing, nothing, torch.full((rows,), -1))


def _rows(requests: Sequence[GenerationRequest], first: int) -> list[RowKey]:
    """Return the rows of the requests from a number on."""
    return [(k, sample) for k in range(first, len(requests)) for sample in range(requests[k].samples)]


def _keep(request: GenerationRequest, kept: KeyValues, answer_ids: Sequence[int]) -> None:
    """Let a request's conversation keep the keys and values of its prompt and of the answer."""
    conversation = request.conversation
    assert conversation is not None
    conversation.slot, conversation.kept, conversation.token_ids = (
        request.slot,
        kept,
        [*request.prompt_ids, *answer_ids],
    )


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as right-padded ids ``[P, L]``, and their lengths ``[P]``."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros((len(prompts), padded_length(int(lengths.max()))), dtype=torch.int64)
    ids[torch.arange(ids.shape[1]) < lengths[:, None]] = torch.tensor(list(chain.from_iterable(prompts)))
    return ids, lengths


def _uniforms(seed: int, requests: Sequence[GenerationRequest], rows: Sequence[RowKey], steps: int) -> np.ndarray:
    """Return the number in [0, 1) that decides each draw, ``[R, steps]``; 0 for rows that decode greedily."""
    table = np.zeros((len(rows), steps))
    keys: dict[str, dict[int, tuple[int, ...]]] = {}
    for i, (number, sample) in enumerate(rows):
        if requests[number].sampling.temperature > 0:
            keys.setdefault(requests[number].purpose, {})[i] = (*requests[number].key, sample)
    for purpose, drawn in keys.items():
        table[list(drawn)] = streams.uniform_rows(seed, purpose, list(drawn.values()), steps)
    return table


def _route(slots: Sequence[int | None], counts: Sequence[int]) -> Route | None:
    pairs = [(s, c) for s, c in zip(slots, counts) if s is not None and c]
    return Route(tuple(s for s, _ in pairs), tuple(c for _, c in pairs)) if pairs else None


def _known(request: GenerationRequest) -> int:
    """Return how many tokens at the beginning of a prompt its conversation has kept, at most all but the last one."""
    conversation = request.conversation
    earlier = conversation.token_ids if conversation is not None and conversation.slot == request.slot else ()
    # The last token is computed in any case: the first logits come from its state.
    prompt = request.prompt_ids[: len(request.prompt_ids) - 1]
    if list(earlier[: len(prompt)]) == list(prompt[: len(earlier)]):
        return min(len(earlier), len(prompt))
    return next(i for i, (ours, theirs) in enumerate(zip(earlier, prompt)) if ours != theirs)


def _kept(requests: Sequence[GenerationRequest], known: Sequence[int]) -> KeyValues | None:
    """Return the keys and values of the known tokens of all prompts, side by side; None if none are known."""
    pairs = [(r.conversation.kept, count) for r, count in zip(requests, known) if r.conversation is not None and count]
    parts = [[(keys[:count], values[:count]) for keys, values in kept] for kept, count in pairs]
    return side_by_side(parts) if parts else None


# Where prompts are computed as padded rows, an adapter multiplies the tokens of its slot's rows alone. Only the batch
# is padded by rows, so that it is the padded length that gives each of these products a multiple of CPU_ROWS.
assert LENGTH_MULTIPLE % CPU_ROWS == 0


# -- drawing the next token of every row by inverse CDF, each row with its own settings and its own uniform -----------


_COLUMNS = {
    "temperature": torch.float32,
    "top_p": torch.float64,
    "top_k": torch.int64,
    "min_p": torch.float64,
    "repetition_penalty": torch.float32,
    "min_new_tokens": torch.int64,
}


@dataclass
class RowSettings:
    """Sampling settings as one value a row."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    min_new_tokens: Tensor
    full_support: bool
    greedy: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingSettings], device: torch.device) -> "RowSettings":
        """Collect the settings of each row."""
        columns = {
            name: torch.tensor([getattr(s, name) for s in rows], dtype=dtype, device=device)
            for name, dtype in _COLUMNS.items()
        }
        everything, greedy = all(s.full_support for s in rows), any(s.temperature == 0 for s in rows)
        return cls(**columns, full_support=everything, greedy=greedy)

    def select(self, rows: Tensor) -> "RowSettings":
        """Return the settings of some rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})


def draw(
    logits: Tensor,
    uniforms: Tensor,
    settings: RowSettings,
    *,
    position: int = 0,
    eos: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; returns tokens ``[R]`` and their log-probs ``[R]`` in fp32.

    ``logits`` [R, V] fp32; ``uniforms`` [R] fp64 in [0, 1); ``seen`` [R, V] bool marks tokens in the row so far (for
    the repetition penalty). The cumulative distribution is built in fp64, so the drawn token is the same in every
    batch layout. Log-probs are those of ``logits / temperature`` over the whole vocabulary (of the plain logits where
    the temperature is 0). A row of NaN yields some token and a NaN log-prob, and disturbs no other row.
    """
    greedy = settings.temperature == 0
    divisor = torch.where(greedy, 1.0, settings.temperature)[:, None]
    scaled = logits / divisor
    filtered = scaled if settings.full_support else _truncate(logits, divisor, settings, position, eos, seen)
    weights = torch.softmax(filtered.double(), dim=-1)
    cdf = torch.cumsum(weights, dim=-1)
    # Scaling by the last entry keeps a draw of 0.999... inside the support when rounding leaves it below 1.
    tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    if settings.greedy:
        tokens = torch.where(greedy, filtered.argmax(dim=-1), tokens)
    logps = scaled.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)
    return tokens, logps


def _truncate(
    logits: Tensor, divisor: Tensor, settings: RowSettings, position: int, eos: Tensor | None, seen: Tensor | None
) -> Tensor:
    """Apply repetition penalty, minimum length, temperature, top-k, top-p and min-p, in the order of transformers."""
    if seen is not None:
        penalty = settings.repetition_penalty[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if eos is not None and eos.numel():
        too_early = settings.min_new_tokens > position
        blocked = torch.zeros_like(logits, dtype=torch.bool)
        blocked[:, eos] = too_early[:, None]
        logits = torch.where(blocked, float("-inf"), logits)
    scaled = logits / divisor
    # Stable: of equal logits the lower token id comes first, in any batch.
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered.double(), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    limit = torch.where(settings.top_k > 0, settings.top_k, logits.shape[1])[:, None]
    dropped = rank >= limit
    before = torch.where(dropped, 0.0, probabilities)
    # top-p counts what top-k has left, as in transformers.
    before = before / before.sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    # Without top_p nothing is dropped: rounding may take the mass before a rare token to 1.
    bound = torch.where(settings.top_p < 1, settings.top_p, float("inf"))[:, None]
    dropped = dropped | (before.cumsum(dim=-1) - before >= bound)
    # Relative to the most likely token, so it does not matter what top-p has dropped.
    dropped = dropped | (before < settings.min_p[:, None] * before[:, :1])
    kept = torch.where(dropped, float("-inf"), ordered)
    return torch.empty_like(scaled).scatter_(1, order, kept)
