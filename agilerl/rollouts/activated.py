"""Activated adapters (arXiv 2504.12397): they act from an invocation in the prompt on; what precedes it is the base's.

So the keys and values of prompts are the same for all agents, the reference and every exam: they are computed once, by
the base alone and without gradient.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agilerl.data.tree import TokenTree
from agilerl.errors import EnvError
from agilerl.models.base import BaseModel
from agilerl.models.flat import KeyValues, PaddedRows, PromptLine, flatten, side_by_side
from agilerl.models.slots import AdapterStore


def invocations(ids: Tensor, prompts: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return where ``tokens`` last begin in the first ``prompts [B]`` tokens of rows ``ids [B, T]``: ``[B]``.

    0 for rows without a prompt. Raises EnvError for a prompt without them.
    """
    pattern, count = torch.tensor(tokens, device=ids.device), len(tokens)
    if ids.shape[1] < count:  # unfold needs one window at least
        ids = torch.nn.functional.pad(ids, (0, count - ids.shape[1]), value=-1)
    prompts = prompts.to(ids.device)
    # (rows, windows): where the tokens begin.
    matches = (ids.unfold(1, count, 1) == pattern).all(-1)
    places = torch.arange(matches.shape[1], device=ids.device)
    # Within the prompt, since a completion may hold the same tokens.
    last = torch.where(matches & (places + count <= prompts[:, None]), places, -1).amax(1)
    missing = (last < 0) & (prompts > 0)
    if bool(missing.any()):
        row = int(missing.int().argmax())
        raise EnvError(
            f"activated adapters begin at the tokens {list(tokens)} (lora_config.alora_invocation_tokens), which each "
            f"prompt has to contain; found one that ends with {ids[row, : int(prompts[row])].tolist()[-12:]}. Name "
            "tokens with which the chat template begins an answer"
        )
    return last.clamp(min=0)


class Beginnings(NamedTuple):
    """What rows of one agent begin with, which the base computes."""

    ids: Tensor
    """[B, T] token ids of the rows."""
    counts: Tensor
    """[B] tokens of each beginning."""
    tree: TokenTree
    """That of the rows."""


class _Segment(NamedTuple):
    """Consecutive tokens of a beginning: a part that others have as well, or the rest."""

    key: bytes
    """A digest of all tokens up to its end, and of where segments before it end: its bits depend on nothing else, so
    agents share it only where they would compute the same."""
    start: int
    end: int


class PromptCache:
    """Keys and values of prompts as the base computes them, for all agents; beyond ``most`` the oldest go."""

    def __init__(self, base: BaseModel, store: AdapterStore, most: int = 2**28) -> None:
        self.base, self.store, self.most = base, store, most
        """``most`` in bytes."""
        self._known: OrderedDict[bytes, KeyValues] = OrderedDict()
        self._bytes = 0

    def computed(self, batches: Sequence[Beginnings]) -> tuple[PromptLine, list[Tensor]]:
        """Return a cache that knows the keys and values of all beginnings, and where: for each batch ``[B, K]``.

        The base computes those that it has not computed yet, or that were forgotten.
        """
        paths = [_paths(batch) for batch in batches]
        missing = {
            path[-1].key: (text[: path[-1].end], path)
            for batch, of_batch in zip(batches, paths)
            for text, path in zip(batch.ids, of_batch)
            if any(segment.key not in self._known for segment in path)
        }
        if missing:
            self._compute(list(missing.values()))
        segments = {segment.key: segment for of_batch in paths for path in of_batch for segment in path}
        firsts, total = dict[bytes, int](), 0
        for key, segment in segments.items():
            # What was used least recently goes first.
            self._known.move_to_end(key)
            firsts[key], total = total, total + segment.end - segment.start
        line = PromptLine(self.base.num_layers)
        line.known = side_by_side([self._known[key] for key in segments])
        places = [
            pad_sequence(
                [torch.cat([torch.arange(s.end - s.start) + firsts[s.key] for s in path]) for path in of_batch],
                batch_first=True,
            )
            for of_batch in paths
        ]
        # Last, because what this call needs may be more than the cache holds.
        while self._bytes > self.most and self._known:
            self._bytes -= _bytes(self._known.popitem(last=False)[1])
        return line, places

    def _compute(self, rows: Sequence[tuple[Tensor, Sequence[_Segment]]]) -> None:
        """Let the base compute some beginnings, what they have in common once."""
        # The columns of a TokenTree: rows, starts, ends, parents.
        columns, numbers, of = list[tuple[int, int, int, int]](), dict[bytes, int](), list[int]()
        for row, (_, path) in enumerate(rows):
            last = -1
            for key, start, end in path[:-1]:
                if key not in numbers:
                    numbers[key] = len(columns)
                    columns.append((row, start, end, last))
                last = numbers[key]
            of.append(last)
        first, starts, ends, parents = torch.tensor(columns, dtype=torch.int64).reshape(-1, 4).T
        lengths = torch.tensor([len(text) for text, _ in rows])
        tree = TokenTree(first, starts, ends, parents, torch.tensor(of))
        ids, line = pad_sequence([text for text, _ in rows], batch_first=True), PromptLine(self.base.num_layers)
        exact = self.base.device.type == "cpu"
        flat = flatten([PaddedRows(ids, lengths, tree)], self.base.activation_dtype, exact=exact)
        with torch.no_grad(), self.store.routed(None):
            self.base.flat(flat.to(self.base.device), past_key_values=line)
        for places, (_, path) in zip(flat.sources[0], rows):
            for key, start, end in path:
                if key not in self._known:
                    part = slice(int(places[start]), int(places[start]) + end - start)
                    # Copies, because a view would keep the whole line in memory.
                    self._known[key] = [(keys[part].clone(), values[part].clone()) for keys, values in line.computed]
                    self._bytes += _bytes(self._known[key])


def _paths(batch: Beginnings) -> list[list[_Segment]]:
    """Return the segments of each beginning: its common parts that end within it, and the rest."""
    paths, ends = [], batch.tree.ends.tolist()
    # A row that needs nothing gets one token: a sequence cannot be empty.
    for text, count, parts in zip(batch.ids.numpy(), batch.counts.clamp(min=1).tolist(), batch.tree.paths):
        path, start, key = list[_Segment](), 0, b""
        for end in (*(ends[part] for part in parts if ends[part] < count), count):
            key = blake2b(key + text[start:end].tobytes(), digest_size=16).digest()
            path.append(_Segment(key, start, end))
            start = end
        paths.append(path)
    return paths


def _bytes(kept: KeyValues) -> int:
    return sum(part.nbytes for pair in kept for part in pair)
