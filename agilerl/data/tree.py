"""What rows of tokens begin with in common, so that it is computed once."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SHORTEST = 8
"""Tokens: a shorter common part costs more as a sequence of its own than computing it once saves."""


class TokenTree(NamedTuple):
    """Parts that several rows have in common, each after its ancestors: a token sees these and its own part.

    Every row also has a token or more of its own after its last common part. All tensors are int64, on the CPU.
    """

    rows: Tensor
    """[G] the first row that has each part."""
    starts: Tensor
    """[G] tokens before each part."""
    ends: Tensor
    """[G] tokens up to its end."""
    parents: Tensor
    """[G] the part before each; -1: none. Parents come before their children, and subtrees are contiguous."""
    of: Tensor
    """[B] the last common part of each row; -1: none."""

    @property
    def own(self) -> Tensor:
        """[B] tokens before each row's own."""
        return torch.cat([self.ends, self.ends.new_zeros(1)])[self.of]  # -1 is the 0 at the end

    @property
    def paths(self) -> list[list[int]]:
        """Of each row, its common parts, the first one first."""
        of_part: list[list[int]] = []
        for part, parent in enumerate(self.parents.tolist()):
            of_part.append([*(of_part[parent] if parent >= 0 else []), part])
        return [of_part[part] if part >= 0 else [] for part in self.of.tolist()]

    def select(self, rows: Tensor) -> "TokenTree":
        """Return the tree of some rows, with the same parts: how a row is computed does not depend on the others."""
        paths, first = self.paths, dict[int, int]()
        for index, row in enumerate(rows.tolist()):
            for part in paths[row]:
                first.setdefault(part, index)
        # In the old order, so that parents still come before their children.
        kept = torch.tensor(sorted(first), dtype=torch.int64)
        number = torch.full((len(self.rows) + 1,), -1)  # the last one stands for no part
        number[kept] = torch.arange(len(kept))
        return TokenTree(
            torch.tensor([first[part] for part in kept.tolist()], dtype=torch.int64),
            self.starts[kept],
            self.ends[kept],
            number[self.parents[kept]],
            number[self.of[rows]],
        )

    def after(self, known: Tensor) -> "TokenTree":
        """Return the tree of what follows the first ``known [B]`` tokens of each row, fewer than it has in all.

        Rows have a part in common only if the same number of tokens is known of each.
        """
        paths, counts = self.paths, known.tolist()
        having: list[set[int]] = [set() for _ in range(len(self.rows))]
        for row, path in enumerate(paths):
            for part in path:
                having[part].add(counts[row])
        kept = [
            part for part, ends in enumerate(self.ends.tolist()) if len(having[part]) == 1 and ends > max(having[part])
        ]
        number, starts, parents = {part: i for i, part in enumerate(kept)}, list[int](), list[int]()
        for part in kept:
            # Without its parent a part begins where the known tokens of its rows end.
            parents.append(number.get(int(self.parents[part]), -1))
            starts.append(int(self.starts[part]) if parents[-1] >= 0 else max(having[part]))
        of = [next((number[part] for part in reversed(path) if part in number), -1) for path in paths]
        index, new = torch.tensor(kept, dtype=torch.int64), partial(torch.tensor, dtype=torch.int64)
        return TokenTree(self.rows[index], new(starts), self.ends[index], new(parents), new(of))


def token_tree(ids: Tensor, lengths: Tensor) -> TokenTree:
    """Return what rows ``ids [B, T]`` of ``lengths [B]`` tokens have in common, from their ids alone."""
    ids, lengths = ids.cpu(), lengths.cpu()
    beyond = torch.arange(ids.shape[1]) >= lengths[:, None]
    # 0 is what follows a row, below all tokens: a row comes right before those that begin with it.
    tokens = (ids + 1).masked_fill(beyond, 0).numpy().astype(">u4")  # as bytes in the order of the numbers
    as_bytes = [row.tobytes() for row in tokens]
    order = sorted(range(len(ids)), key=as_bytes.__getitem__)
    lined = torch.from_numpy(tokens[order].astype("int64"))
    differ = lined[1:] != lined[:-1]
    # A row that another one begins with has a token of its own as well.
    most = torch.minimum(lengths[order][1:], lengths[order][:-1]) - 1
    shared = torch.minimum(torch.where(differ.any(1), differ.int().argmax(1), ids.shape[1]), most).tolist()
    parts: list[tuple[int, int, int, int]] = []
    of = [-1] * len(ids)
    left = [(0, len(ids), 0, -1)] if len(ids) else []
    while left:
        first, last, depth, parent = left.pop()
        if last - first == 1:
            of[order[first]] = parent
            continue
        # What all of these rows share: they are sorted, so it is the least that two neighbours share.
        end = min(shared[first : last - 1])
        if end - depth >= SHORTEST:
            parts.append((min(order[first:last]), depth, end, parent))
            depth, parent = end, len(parts) - 1
        # There is one at least, where neighbours share the least, so groups become smaller.
        cuts = [i + 1 for i in range(first, last - 1) if shared[i] - depth < SHORTEST]
        bounds = [first, *cuts, last]
        # A stack with the first group on top: parents before children, and subtrees without gaps.
        left += [(begin, stop, depth, parent) for begin, stop in pairwise(bounds)][::-1]
    rows, starts, ends, parents = torch.tensor(parts, dtype=torch.int64).reshape(-1, 4).T
    return TokenTree(rows, starts, ends, parents, torch.tensor(of, dtype=torch.int64))


def whole_prompts(ids: Tensor, lengths: Tensor) -> TokenTree:
    """Return a tree whose parts are the different prompts of rows ``ids [B, T]``, their first ``lengths [B]`` tokens.

    A prompt is a part of its own even if one row has it, unless it is shorter than ``SHORTEST``.
    """
    first, of = dict[bytes, int](), list[int]()
    rows: list[int] = []
    for row, (tokens, length) in enumerate(zip(ids.cpu().numpy(), lengths.tolist())):
        if length < SHORTEST:
            of.append(-1)
            continue
        of.append(first.setdefault(tokens[:length].tobytes(), len(rows)))
        if of[-1] == len(rows):
            rows.append(row)
    index = torch.tensor(rows, dtype=torch.int64)
    return TokenTree(index, torch.zeros_like(index), lengths.cpu()[index], -torch.ones_like(index), torch.tensor(of))
