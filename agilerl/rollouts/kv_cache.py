"""Keys and values while decoding: a prompt's once for all its completions, or each row's in one piece."""

from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl.errors import EngineError
from agilerl.models.flat import KeyValues, LayerCaches, PromptLine
from agilerl.models.layers import asking, attend_decoding, attend_part
from agilerl.models.reach import EVERYTHING, Reach, Reaches, added_mask, masks_of
from agilerl.sizes import padded_length

_FIRST_ROOM = 32
"""Tokens that a row has room for at first; a full row gets twice as many."""


class GroupedCache(LayerCaches):
    """For bases whose attention we compute: a prompt's keys and values are stored once for all rows that continue it.

    Attention to the prompts (one call for the rows of all of them) and to the tokens that a row generated are computed
    separately, and weighted by the sums of their exponentials.
    """

    def __init__(self, num_layers: int, reaches: Reaches = EVERYTHING) -> None:
        super().__init__(num_layers)
        self._reaches = reaches
        self._blocks: list[_Block] = []
        self._layer, self._given = 0, (torch.empty(0), torch.empty(0))

    def admit(
        self, block: int, line: PromptLine, places: Tensor, lengths: Tensor, prompt_of: Tensor, tokens: int
    ) -> None:
        """Add a block: rows that are admitted together, and are side by side; it becomes the one with this number.

        Args:
            block: at most the number of blocks that there are.
            line: what the prefill computed.
            places: ``[P, L]`` where the line has each prompt's tokens; after a prompt's end, any of them.
            lengths: ``[P]`` tokens of each prompt, on the CPU.
            prompt_of: ``[R]`` the prompt of each row, ascending, on the CPU.
            tokens: the most tokens that a row generates.
        """
        self._blocks.insert(block, _Block(line, places, lengths, prompt_of, tokens))

    def select(self, block: int, rows: Tensor) -> None:
        """Keep some rows of a block, ascending; if there are none, the block goes."""
        if len(rows):
            self._blocks[block].select(rows)
        else:
            del self._blocks[block]

    def of_row(self, block: int, row: int, tokens: int) -> KeyValues:
        """Return a copy of a row's keys and values: its prompt's, and those of so many tokens that it generated."""
        return self._blocks[block].of_row(row, tokens)

    def step(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Make room for a token of every row, at ``positions [R]``, padding rows included; returns attention's mask."""
        for block in self._blocks:
            block.make_room()
        self.visible = max(block.longest + block.tokens for block in self._blocks)

        def mask(reach: Reach) -> Tensor:
            # This mask only says how to attend; which keys a row sees is up to the blocks.
            there = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=positions.device)
            return asking(there, partial(self._attend, reach=reach))

        return masks_of(self._reaches, mask)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new token of every row, ``[rows, heads, 1, head_dim]``."""
        start = 0
        for block in self._blocks:
            block.put(layer, keys[start : start + len(block)], values[start : start + len(block)])
            start += len(block)
        # For _attend, which the same layer calls next.
        self._layer, self._given = layer, (keys, values)
        return keys, values

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, *, reach: Reach
    ) -> Tensor:
        # The model's layer passes back what put() returned. Others (those of an earlier layer, say) would be silently
        # replaced by ours.
        if not (key is self._given[0] and value is self._given[1]):
            raise EngineError("a layer attends to other keys or values than its own, which decoding does not support")
        shared, start, answers = key.shape[1], 0, list[Tensor]()
        # (rows, shared, sharers, head_dim)
        queries = query[:, :, 0].reshape(len(query), shared, -1, query.shape[3])
        for block in self._blocks:
            part = queries[start : start + len(block)]
            answers.append(block.attend(self._layer, part, query.shape[3] ** -0.5 if scale is None else scale, reach))
            start += len(block)
        if start < len(queries):  # padding of the matrix products
            answers.append(answers[0].new_zeros((len(queries) - start, *answers[0].shape[1:])))
        return (torch.cat(answers) if len(answers) > 1 else answers[0]).flatten(1, 2).unsqueeze(1)


class _Block:
    """Rows that were admitted together, and so have generated equally many tokens."""

    def __init__(self, line: PromptLine, places: Tensor, lengths: Tensor, prompt_of: Tensor, tokens: int) -> None:
        self.prompts = [line.take(layer, places) for layer in range(len(line.computed))]
        """Of each layer, keys and values ``[P, heads, L, head_dim]``."""
        self.lengths, self.prompt_of, self.longest = lengths.tolist(), prompt_of, places.shape[1]
        self._seen: dict[Reach, _Seen] = {}
        keys, _ = self.prompts[0]
        room = (len(prompt_of), keys.shape[1], min(_FIRST_ROOM, tokens))
        # Uninitialised: attention reads no further than the tokens that are there.
        self.generated = [(k.new_empty((*room, k.shape[3])), v.new_empty((*room, v.shape[3]))) for k, v in self.prompts]
        """Of each layer, keys and values ``[R, heads, room, head_dim]`` of the tokens that each row generated."""
        self._most, self.tokens = tokens, 0
        """The number of these tokens in each row, including the one being computed."""
        hidden = torch.arange(self.longest) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=keys.dtype).masked_fill_(hidden, float("-inf"))
        self.mask = mask[:, None, None].to(keys.device)
        self.groups: list[_Group] = []
        prompt = row = 0
        # Neighbouring prompts with equally many rows make a rectangle, which one call can take.
        for size, alike in groupby(torch.bincount(prompt_of, minlength=len(lengths)).tolist()):
            count = len(list(alike))
            self.groups.append(_Group(slice(prompt, prompt + count), size, slice(row, row + count * size)))
            prompt, row = prompt + count, row + count * size

    def __len__(self) -> int:
        return len(self.prompt_of)

    def make_room(self) -> None:
        room = self.generated[0][0].shape[2]
        if self.tokens == room:
            room = min(2 * room, self._most)
            # Layer by layer: while a buffer is copied, the old and the new one both take memory.
            for layer, (keys, values) in enumerate(self.generated):
                self.generated[layer] = _longer(keys, room), _longer(values, room)
        self.tokens += 1
        self._seen = {}

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        own_keys, own_values = self.generated[layer]
        own_keys[:, :, self.tokens - 1], own_values[:, :, self.tokens - 1] = keys[:, :, 0], values[:, :, 0]

    def attend(self, layer: int, query: Tensor, scale: float, reach: Reach = EVERYTHING) -> Tensor:
        """Return answers ``[R, shared, sharers, head_dim]`` to queries of this shape."""
        keys, values = self.prompts[layer]
        seen = self._visible(reach)
        there = [group for group in self.groups if group.rows.stop > group.rows.start]
        parts = [group.attend(query[group.rows], keys, values, seen.prompts, scale) for group in there]
        early, weight = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts))
        own_keys, own_values = (part[:, :, seen.first : self.tokens] for part in self.generated[layer])
        late, own_weight = attend_part(query, own_keys, own_values, seen.generated, scale)
        if seen.without is not None:
            weight = weight.masked_fill(seen.without[:, None, None], float("-inf"))
        # Softmax over both parts together, from the logarithms a and b of their sums of exponentials: the prompt's
        # share is exp(a) / (exp(a) + exp(b)) = sigmoid(a - b), which cannot overflow.
        return torch.lerp(late, early, _sigmoid(weight - own_weight).to(late.dtype).unsqueeze(-1))

    def _visible(self, reach: Reach) -> "_Seen":
        """Return what the tokens of this step see."""
        if reach not in self._seen:
            # A mask of chunks is there from the start: its being there must not depend on the longest row.
            some = reach.chunk is not None or reach.hides(self.longest + self.tokens)
            self._seen[reach] = self._hidden(reach) if some else _Seen(self.mask)
        return self._seen[reach]

    def _hidden(self, reach: Reach) -> "_Seen":
        lengths, device = torch.tensor(self.lengths, device=self.mask.device)[:, None], self.mask.device
        now = lengths + self.tokens - 1  # [P, 1]
        prompts = reach.visible(now, torch.arange(self.longest, device=device))
        without = ~(prompts & (self.mask[:, 0, 0] == 0)).any(1)
        prompts[without, 0] = True  # a softmax needs one; its share becomes 0
        mask = self.mask + added_mask(prompts, self.mask.dtype)[:, None, None]
        prompt_of, generated = self.prompt_of.to(device), None
        # Not a mask where a slice does it: whether there is one must not depend on the other rows.
        first = 0 if reach.window is None else max(self.tokens - reach.window, 0)
        if reach.chunk is not None:
            generated = reach.visible(now, lengths + torch.arange(first, self.tokens, device=device))
            generated = added_mask(generated[prompt_of], self.mask.dtype)[:, None, None]
        return _Seen(mask, without[prompt_of] if bool(without.any()) else None, first, generated)

    def select(self, rows: Tensor) -> None:
        self._seen = {}
        start = 0
        for group in self.groups:
            members = rows[(rows >= group.rows.start) & (rows < group.rows.stop)] - group.rows.start
            group.select(members, start, self.mask.device)
            start += len(members)
        # The prompts stay, even without rows: calls keep the shape that they began with.
        self.prompt_of, there = self.prompt_of[rows], rows.to(self.mask.device)
        self.generated = [(keys[there], values[there]) for keys, values in self.generated]

    def of_row(self, row: int, tokens: int) -> KeyValues:
        prompt = int(self.prompt_of[row])
        length = self.lengths[prompt]

        def whole(given: Tensor, generated: Tensor) -> Tensor:
            return _joined(given[prompt, :, :length], generated[row, :, :tokens])

        return [(whole(k, new_k), whole(v, new_v)) for (k, v), (new_k, new_v) in zip(self.prompts, self.generated)]


class _Seen(NamedTuple):
    """What the tokens of a step see of a block's prompts, and of what their rows generated."""

    prompts: Tensor
    """[P, 1, 1, L], added to the scores."""
    without: Tensor | None = None
    """[R] whether a row sees nothing of its prompt; None: all see some of it."""
    first: int = 0
    """The first generated token that a row sees."""
    generated: Tensor | None = None
    """[R, 1, 1, tokens from the first on], added to the scores; None: all are seen."""


class _Group:
    """Neighbouring prompts of a block with equally many rows at the start, which share one attention call.

    The call keeps the shape that it had with all rows, with zeros for rows that have left. So the bits of a row do not
    depend on other prompts, nor on when other rows end.
    """

    def __init__(self, prompts: slice, size: int, rows: slice) -> None:
        self.prompts, self.size, self.rows = prompts, size, rows
        self.seats: Tensor | None = None
        """For each row that is left, its place among those at the start; None: no row has left."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return answers to queries ``[n, shared, sharers, head_dim]``, and the logarithm of their weights' sum."""
        count = self.prompts.stop - self.prompts.start
        if self.seats is not None:
            query = query.new_zeros((count * self.size, *query.shape[1:])).index_copy_(0, self.seats, query)
        (_, shared, sharers, width), rows = query.shape, count * self.size
        # (prompts, shared, size * sharers, head_dim): all rows of a prompt ask its keys in one product.
        asked = query.reshape(count, self.size, shared, sharers, width).transpose(1, 2).flatten(2, 3)
        parts = attend_part(asked, keys[self.prompts], values[self.prompts], mask[self.prompts], scale)
        answers, weight = (
            part.reshape(count, shared, self.size, sharers, -1).transpose(1, 2).reshape(rows, shared, sharers, -1)
            for part in parts
        )
        weight = weight.squeeze(-1)
        return (answers, weight) if self.seats is None else (answers[self.seats], weight[self.seats])

    def select(self, rows: Tensor, start: int, device: torch.device) -> None:
        """Keep some rows, given by their places in the group, which now begins at row ``start`` of the block."""
        if len(rows) < self.rows.stop - self.rows.start:
            rows = rows.to(device)
            self.seats = rows if self.seats is None else self.seats[rows]
        self.rows = slice(start, start + len(rows))


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, padded to whole registers: a CPU rounds the rest of an incomplete one differently."""
    flat = x.flatten()
    return torch.sigmoid(F.pad(flat, (0, -len(flat) % 32)))[: len(flat)].view(x.shape)


def _longer(part: Tensor, room: int) -> Tensor:
    longer = part.new_empty((*part.shape[:2], room, part.shape[3]))
    longer[:, :, : part.shape[2]] = part
    return longer


def _joined(*parts: Tensor) -> Tensor:
    """Concatenate parts ``[heads, n, head_dim]`` and return their tokens as ``[tokens, heads, 1, head_dim]``."""
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(2).contiguous()


class RaggedCache(LayerCaches):
    """For all other bases: each row has its keys and values in one piece, by position; one block at a time."""

    def __init__(self, num_layers: int, row_multiple: int, dtype: torch.dtype, reaches: Reaches = EVERYTHING) -> None:
        super().__init__(num_layers)
        self._multiple, self._dtype, self._reaches = row_multiple, dtype, reaches
        self._rows: KeyValues = []
        """Of each layer, keys and values ``[R, heads, capacity, head_dim]``, padding rows included."""
        self._lengths = self._positions = torch.empty(0, dtype=torch.int64)

    def admit(
        self, block: int, line: PromptLine, places: Tensor, lengths: Tensor, prompt_of: Tensor, tokens: int
    ) -> None:
        """Add the only block; arguments as those of :meth:`GroupedCache.admit`."""
        self._lengths = lengths[prompt_of]
        self.visible, capacity = int(lengths.max()), padded_length(int(lengths.max()) + tokens)
        places = places[self._padded(prompt_of).to(places.device)]
        self._rows = []
        for layer in range(len(line.computed)):
            parts = line.take(layer, places)
            # Zeros, not uninitialised memory: the mask hides what is not there yet, but 0 x NaN is NaN.
            buffers = [part.new_zeros((*part.shape[:2], capacity, part.shape[3])) for part in parts]
            for buffer, part in zip(buffers, parts):
                buffer[:, :, : part.shape[2]] = part
            self._rows.append((buffers[0], buffers[1]))

    def select(self, block: int, rows: Tensor) -> None:
        """Keep some rows, ascending."""
        self._lengths, kept = self._lengths[rows], self._padded(rows)
        self._rows = [(keys[kept], values[kept]) for keys, values in self._rows] if len(rows) else []

    def of_row(self, block: int, row: int, tokens: int) -> KeyValues:
        """Return a copy of a row's keys and values, up to this many tokens that it generated."""
        length = int(self._lengths[row]) + tokens
        return [(_joined(keys[row, :, :length]), _joined(values[row, :, :length])) for keys, values in self._rows]

    def step(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Set where the next token of each row goes; returns the mask."""
        self._positions, self.visible = positions, self.visible + 1
        # CPU attention kernels give a row the same bits at any such length.
        length = min(padded_length(self.visible), self._rows[0][0].shape[2])
        self._length = length

        def mask(reach: Reach) -> Tensor:
            seen = reach.visible(positions[:, None], torch.arange(length, device=positions.device))
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=positions.device)
            mask.masked_fill_(~seen, torch.finfo(self._dtype).min)
            return asking(mask[:, None, None], attend_decoding)

        return masks_of(self._reaches, mask)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new token of every row; returns all keys and values of each row so far."""
        rows = torch.arange(len(self._positions), device=self._positions.device)
        own_keys, own_values = self._rows[layer]
        # torch puts the indices that a slice separates first: (rows, heads, head_dim).
        own_keys[rows, :, self._positions], own_values[rows, :, self._positions] = keys[:, :, 0], values[:, :, 0]
        return own_keys[:, :, : self._length], own_values[:, :, : self._length]

    def _padded(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(-len(rows) % self._multiple)])
