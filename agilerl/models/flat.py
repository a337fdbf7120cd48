"""Lines of tokens without padding: rows with what they have in common once (flat), or concatenated (packed)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, CacheLayerMixin

from agilerl.data.tree import TokenTree
from agilerl.models.reach import EVERYTHING, Reach, added_mask
from agilerl.sizes import CPU_ROWS, FAR, SEQUENCE_MULTIPLE

_NONE = torch.zeros(0, dtype=torch.int64)


class PaddedRows(NamedTuple):
    """Rows of one agent, on the CPU."""

    ids: Tensor
    """[B, T] token ids, right-padded."""
    lengths: Tensor
    """[B] tokens of each."""
    tree: TokenTree | None = None
    """What rows begin with in common, to be computed once; None: nothing."""
    known: Tensor | None = None
    """[B] tokens at the beginning of each row, not all of it, whose keys and values are known. Attention finds them
    after those of the line. None: none are. The ``tree`` is then that of what follows them."""
    at: Tensor | None = None
    """[B, K] place of each of them among all that are known; together with ``known``."""


class _Block(NamedTuple):
    """Sequences of equal padded lengths, which one attention call computes."""

    sequences: int
    queries: int
    """Of each sequence, padding included."""
    keys: int
    mask: Tensor | None
    """[sequences or 1, 1, queries, keys], added to the scores; None: causal."""
    starts: Tensor = _NONE
    """[sequences] tokens before each, of which attention reads the keys."""

    def reaching(self, reach: Reach, dtype: torch.dtype) -> Tensor | None:
        """Return the mask for layers that do not see all tokens."""
        if not reach.hides(self.keys):
            return self.mask
        prefix, starts = self.keys - self.queries, self.starts[:, None]
        queries = starts + torch.arange(self.queries, device=starts.device)
        earlier = torch.arange(prefix, device=starts.device).expand(len(starts), -1)
        # Of a shorter prefix the last token is repeated, where no token looks.
        keys = torch.cat([earlier.masked_fill(earlier >= starts, 1 << 40), queries], dim=1)
        return added_mask(reach.visible(queries[:, :, None], keys[:, None, :])[:, None], dtype)

    @property
    def far(self) -> bool:
        """Whether much more precedes its sequences than they have: their keys are not saved for the backward pass."""
        return self.keys > (FAR + 1) * self.queries


@dataclass(frozen=True)
class FlatRows:
    """Several right-padded batches as one line of N tokens, those of each batch side by side."""

    ids: Tensor
    """[N] token ids."""
    positions: Tensor
    """[N] position of each token in its row."""
    parts: tuple[int, ...]
    """Tokens of each batch."""
    sources: tuple[Tensor, ...]
    """For each batch, [B, T] place of each token in the line, on the CPU; at padding, that of the row's last token."""
    origins: Tensor
    """[N] index of each token among those of all batches, each flattened, side by side; on the CPU."""
    queries: Tensor
    """Places of the tokens that attention reads as queries, block after block."""
    keys: Tensor
    """Places of those that it reads as keys and values; beyond the line, those that were known."""
    answers: Tensor
    """[N] where each token is among the queries."""
    blocks: tuple[_Block, ...]
    """Those that are ``far`` come last."""
    reached: dict[Reach, list[_Block]] = field(default_factory=dict, compare=False, repr=False)
    """The blocks with the masks of reaches that layers have asked for."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, reach: Reach = EVERYTHING
    ) -> Tensor:
        """Attend with queries ``[N, heads, 1, d]`` to keys ``[N or more, shared, 1, d]``; returns ``[N, 1, heads, d]``.

        Each key-value head serves ``heads / shared`` query heads.
        """
        if reach not in self.reached:
            self.reached[reach] = [b._replace(mask=b.reaching(reach, query.dtype)) for b in self.blocks]
        blocks = self.reached[reach]
        near = sum(not block.far for block in blocks)
        apart = torch.is_grad_enabled() and near < len(blocks)
        parts = [blocks[:near], blocks[near:]] if apart else [blocks]
        asked, there = ([sum(b.sequences * getattr(b, n) for b in part) for part in parts] for n in ("queries", "keys"))
        answers = []
        for part, queries, keys in zip(parts, torch.split(self.queries, asked), torch.split(self.keys, there)):
            attend = partial(_attend, blocks=part, queries=queries, keys=keys, scale=scale)
            if apart and part and part[0].far:
                answers.append(checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False))
            elif part:
                answers.append(attend(query, key, value))
        return torch.cat(answers).index_select(0, self.answers).unsqueeze(1)

    def to(self, device: torch.device) -> "FlatRows":
        """Return what the base needs on another device."""
        moved = {n: getattr(self, n).to(device) for n in ("ids", "positions", "queries", "keys", "answers")}
        there = ((None if b.mask is None else b.mask.to(device), b.starts.to(device)) for b in self.blocks)
        blocks = tuple(b._replace(mask=mask, starts=starts) for b, (mask, starts) in zip(self.blocks, there))
        return replace(self, **moved, blocks=blocks, reached={})


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    blocks: Sequence[_Block],
    queries: Tensor,
    keys: Tensor,
    scale: float | None,
) -> Tensor:
    """Return the answers of some blocks to the tokens at ``queries``, over those at ``keys``."""
    # One gather makes rectangular blocks of the line, one gives the line back: attention needs rectangles, while
    # everything else in a decoder layer is cheapest without padding.
    asked, there = ([b.sequences * b.queries for b in blocks], [b.sequences * b.keys for b in blocks])
    answers = []
    # Split, not slices: its gradient is one copy, while each slice's would be added to zeros of the whole size.
    gathered = ((query, queries, asked), (key, keys, there), (value, keys, there))
    split = (torch.split(x.squeeze(2).index_select(0, places), sizes) for x, places, sizes in gathered)
    for block, *parts in zip(blocks, *split):
        q, k, v = (part.view(block.sequences, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        answers.append(_attention(q, k, v, block.mask, scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(answers)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return causal attention, or by a mask, of queries ``[n, heads, s, d]`` over keys ``[n, shared, t, d]``."""
    if mask is not None and q.shape[1] != k.shape[1] and q.device.type == "cuda":
        return fold_heads(q, k, v, mask, scale)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def fold_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return the same with the query heads of one key-value head as further queries of it.

    CUDA has no fused kernel for shared heads and a mask: it would compute all scores at once.
    """
    n, heads, queries, width = q.shape
    sharers = heads // k.shape[1]
    answers = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(n, k.shape[1], sharers * queries, width), k, v, attn_mask=mask.repeat(1, 1, sharers, 1), scale=scale
    )
    return answers.reshape(n, heads, queries, v.shape[3])


def flatten(batches: Sequence[PaddedRows], dtype: torch.dtype, *, exact: bool) -> FlatRows:
    """Put the rows of several batches in one line; ``dtype`` is the type of attention's scores.

    Each batch is padded to a multiple of ``CPU_ROWS`` tokens with copies of its first one, which no other token attends
    to. No index of a batch, not even a masked one, points into another batch: a NaN would spread. With ``exact``,
    sequences share an attention call only with those of equal padded lengths, so that a row's bits depend on nothing
    but its own batch; otherwise there are at most three calls.
    """
    begin = origins_before = 0
    ids, positions, parts, sources, origins, readers = [], [], [], [], [], []
    sequences = [_sequences(batch) for batch in batches]
    # Where the line of all batches ends, with its padding: what was known follows.
    after = sum(-(-int(spans.lengths.sum()) // CPU_ROWS) * CPU_ROWS for spans in sequences)
    for number, (batch, spans) in enumerate(zip(batches, sequences)):
        firsts = begin + spans.lengths.cumsum(0) - spans.lengths
        count, width = int(spans.lengths.sum()), batch.ids.shape[1]
        line = torch.arange(begin, begin + count)
        sequence = torch.repeat_interleave(torch.arange(len(spans.rows)), spans.lengths)
        # firsts - starts is where the row's token 0 would be, so the rest is a position in the row.
        origin = spans.rows[sequence] * width + line - (firsts - spans.starts)[sequence]
        # The padding of a batch repeats its first token in everything, so it stays inside the batch.
        line, origin = (torch.cat([x, x[:1].expand(-count % CPU_ROWS)]) for x in (line, origin))
        # Padding stands for the last token of the row.
        token = torch.minimum(torch.arange(width), spans.ends[:, None] - 1)
        places = (firsts - spans.starts)[:, None] + token
        if batch.known is not None and batch.at is not None:
            known, at = batch.known[spans.rows], batch.at[spans.rows]
            before = token[:, : at.shape[1]] < known[:, None]
            places[:, : at.shape[1]] = torch.where(before, after + at, places[:, : at.shape[1]])
        if batch.tree is not None:
            common = len(batch.tree.rows)
            # Parents come first, so what is copied from one is complete.
            for part, parent in enumerate(batch.tree.parents.tolist()):
                if parent >= 0:
                    places[part, : spans.starts[part]] = places[parent, : spans.starts[part]]
            # Without a part, of is -1 and picks any row, from which nothing is taken.
            before = (batch.tree.of >= 0)[:, None] & (token[common:] < spans.starts[common:, None])
            places[common:] = torch.where(before, places[batch.tree.of], places[common:])
        sequences[number] = spans._replace(places=places)
        ids.append(batch.ids.flatten()[origin])
        positions.append(origin % width)
        sources.append(places[-len(batch.ids) :])
        origins.append(origins_before + origin)
        readers.append(line)
        parts.append(len(line))
        begin += len(line)
        origins_before += batch.ids.numel()
    queries, keys, answers, blocks = _blocks(sequences, begin, dtype, exact=exact)
    return FlatRows(
        ids=torch.cat(ids),
        positions=torch.cat(positions),
        parts=tuple(parts),
        sources=tuple(sources),
        origins=torch.cat(origins),
        queries=queries,
        keys=keys,
        answers=answers[torch.cat(readers)],
        blocks=blocks,
    )


class _Sequences(NamedTuple):
    """The sequences of a batch: each common part of its rows, then what each row has after these or what is known."""

    rows: Tensor
    """[S] the row that each is of."""
    starts: Tensor
    """[S] tokens before it, of which attention reads the keys."""
    ends: Tensor
    """[S] tokens up to its end."""
    kinds: Tensor
    """[S] 0: nothing precedes it; 1: a common part after others; 2: a row after common parts or known tokens."""
    places: Tensor = _NONE
    """[S, T] where the line has each token, those before it included; at padding, its last one."""

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each."""
        return self.ends - self.starts


def _sequences(batch: PaddedRows) -> _Sequences:
    known = torch.zeros(len(batch.ids), dtype=torch.int64) if batch.known is None else batch.known
    tree = batch.tree or TokenTree(_NONE, _NONE, _NONE, _NONE, torch.full((len(batch.ids),), -1))
    firsts = torch.where(tree.of < 0, known, tree.own)
    starts = torch.cat([tree.starts, firsts])
    kinds = (starts > 0) * torch.cat([torch.ones_like(tree.starts), torch.full_like(firsts, 2)])
    rows = torch.cat([tree.rows, torch.arange(len(batch.ids))])
    return _Sequences(rows, starts, torch.cat([tree.ends, batch.lengths]), kinds)


def _blocks(
    batches: Sequence[_Sequences], tokens: int, dtype: torch.dtype, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[_Block, ...]]:
    """Return what attention reads: the places of queries and keys, which query each token is, and the calls."""
    longest = max(batch.places.shape[1] for batch in batches)
    places = torch.cat([torch.nn.functional.pad(b.places, (0, longest - b.places.shape[1])) for b in batches])
    starts, lengths, kinds = (torch.cat([getattr(b, n) for b in batches]) for n in ("starts", "lengths", "kinds"))
    # [2, S]: tokens before a sequence and in it, each rounded up.
    padded = -(-torch.stack([starts, lengths]) // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
    if not exact:
        # One size for all sequences of a kind: fewer calls, more padding.
        for kind in kinds.unique().tolist():  # type: ignore[no-untyped-call]
            padded[:, kinds == kind] = padded[:, kinds == kind].amax(dim=1, keepdim=True)
    answers = torch.zeros(tokens, dtype=torch.int64)
    queries, keys, blocks, start = [], [], [], 0
    sizes, size_of = padded.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
    # Sequences of equal padded lengths share a call: one for each sequence would cost more than the padding does.
    # Far ones last.
    order = sorted(enumerate(sizes.T.tolist()), key=lambda size: size[1][0] > FAR * size[1][1])
    for size, (prefix, width) in order:
        members = torch.nonzero(size_of == size)[:, 0]
        token = torch.arange(width).expand(len(members), width)
        query = places[members].gather(1, starts[members, None] + torch.minimum(token, lengths[members, None] - 1))
        real = token < lengths[members, None]
        # Not at padding, which repeats the last token but attends to the padding before it as well.
        answers[query[real]] = start + torch.nonzero(real.flatten())[:, 0]
        start += query.numel()
        key, mask = query, None
        if prefix:
            # A shorter prefix ends in repetitions of its last token, which the mask hides.
            earlier = places[members].gather(1, torch.minimum(torch.arange(prefix), starts[members, None] - 1))
            key, mask = torch.cat([earlier, query], dim=1), _mask(starts[members], prefix, width, dtype)
        queries.append(query.flatten())
        keys.append(key.flatten())
        blocks.append(_Block(len(members), width, prefix + width, mask, starts[members]))
    return torch.cat(queries), torch.cat(keys), answers, tuple(blocks)


def _mask(skipped: Tensor, prefix: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of sequences after what precedes them, of which each has its own length ``skipped``."""
    # Equal prefixes need one mask, which broadcasts over the sequences.
    if bool((skipped == skipped[0]).all()):
        skipped = skipped[:1]
    earlier = (torch.arange(prefix) < skipped[:, None])[:, None, :].expand(-1, width, -1)
    causal = torch.ones((width, width), dtype=torch.bool).tril().expand(len(skipped), -1, -1)
    hidden = ~torch.cat([earlier, causal], dim=2)[:, None]  # [n or 1, 1, width, prefix + width]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


# -- packing: rows of one agent are concatenated without padding, and each attends only to itself ---------------------


@dataclass(frozen=True)
class Packed:
    """Rows of a padded batch ``[B, T]``, rearranged as ``[R, C]`` with R C at most B T."""

    ids: Tensor
    """[R, C] token ids."""
    positions: Tensor
    """[R, C] position of each token within its own row. The model sees only these: where they do not count up by one,
    its attention mask starts a new sequence."""
    rows: tuple[int, ...]
    """Packed rows of each part of the batch: no packed row holds tokens of two parts."""
    source: Tensor
    """[B, T] index of each token in the flattened packed batch; 0 for padding."""
    origins: Tensor
    """[R C] index of each packed token in the flattened batch, on the CPU; 0 for padding."""

    def unpack(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, T, H]`` from packed ones ``[R, C, H]``; those of padding are meaningless."""
        return hidden.flatten(0, 1)[self.source]


def pack(ids: Tensor, lengths: Tensor, parts: Sequence[int], *, whole: bool) -> Packed:
    """Pack the rows of right-padded ``ids [B, T]``; ``lengths [B]`` are their tokens, ``parts`` the rows of each agent.

    With ``whole`` an agent's rows become a single row, for attention kernels that skip masked blocks. Otherwise a
    packed row is at most T long, so that attention over it costs no more than over a padded row.
    """
    sizes, longest = lengths.tolist(), ids.shape[1]
    rows: list[list[int]] = []
    per_part: list[int] = []
    start = 0
    for count in parts:
        # Agents never share a packed row: the route maps whole rows to adapters, not tokens.
        members = range(start, start + count)
        start += count
        bins = [list(members)] if whole else _bins(members, sizes, longest)
        rows += bins
        per_part.append(len(bins))
    width = max((sum(sizes[row] for row in members) for members in rows), default=0)
    packed, positions = ids.new_zeros((len(rows), width)), ids.new_zeros((len(rows), width))
    source, origins = ids.new_zeros(ids.shape), torch.zeros((len(rows), width), dtype=torch.int64)
    for line, group in enumerate(rows):
        at = 0
        for row in group:
            end = at + sizes[row]
            packed[line, at:end] = ids[row, : sizes[row]]
            positions[line, at:end] = torch.arange(sizes[row], device=ids.device)
            source[row, : sizes[row]] = torch.arange(at, end, device=ids.device) + line * width
            origins[line, at:end] = torch.arange(sizes[row]) + row * longest
            at = end
    return Packed(packed, positions, tuple(per_part), source, origins.flatten())


def _bins(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Group rows so that each group's tokens fit the capacity: best fit, in order of decreasing length.

    Long rows first leave the short ones to fill the gaps, and ties go by index: the same rows always pack the same way.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: (-sizes[row], row)):
        fitting = [i for i, left in enumerate(room) if left >= sizes[row]]
        if fitting:
            best = min(fitting, key=lambda i: room[i])
            groups[best].append(row)
            room[best] -= sizes[row]
        else:
            groups.append([row])
            room.append(capacity - sizes[row])
    return groups


# -- the keys and values of a line ------------------------------------------------------------------------------------


KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values ``[tokens, heads, 1, head_dim]`` of each attention layer."""
_FREED = (torch.empty(0), torch.empty(0))  # in place of keys and values that have been taken


def side_by_side(parts: Sequence[KeyValues]) -> KeyValues:
    """Return the keys and values of the tokens of several parts, one part after the other."""
    return [(torch.cat(keys), torch.cat(values)) for keys, values in (zip(*layer) for layer in zip(*parts))]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a cache; the cache does the work for all layers."""

    def __init__(self, owner: Any, number: int) -> None:
        super().__init__()
        self._owner, self._number = proxy(owner), number  # a cycle would hold the cache until garbage is collected

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self._owner.put(self._number, key_states, value_states)  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Length and offset of the keys.
        return max(self._owner.visible, query_length), 0

    def get_seq_length(self) -> int:
        return int(self._owner.visible)

    def get_max_length(self) -> int:
        return -1  # no limit


class LayerCaches(Cache):  # type: ignore[misc]
    """The caches of all attention layers, which hand their keys and values to ``put``."""

    visible = 0
    """The number of earlier tokens that the model assumes when it sizes its masks."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self, number) for number in range(num_layers)])


class PromptLine(LayerCaches):
    """Takes the keys and values of a prefill, whose rows may be single tokens; known ones are not computed again."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.known: KeyValues | None = None
        """Keys and values of tokens that the prefill does not compute; they follow its own in the line."""
        self.computed: KeyValues = []
        """Keys and values ``[rows, heads, n, head_dim]`` of each layer."""

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take what a layer has computed, ``[rows, heads, n, head_dim]``; returns it with what is known."""
        if self.known is not None:
            keys, values = (torch.cat(pair) for pair in zip((keys, values), self.known[layer]))
            self.known[layer] = _FREED  # many episodes fill the memory: no layer is held twice longer than needed
        self.computed.append((keys, values))
        return self.computed[-1]

    def take(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values ``[P, heads, L, head_dim]`` of the tokens at ``places [P, L]``, once."""
        keys, values = (part.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2) for part in self.computed[layer])
        self.computed[layer] = _FREED
        return keys.contiguous(), values.contiguous()
