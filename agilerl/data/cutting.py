"""Rows cut into micro-batches: what one agent puts into one forward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from agilerl.data.batch import RolloutBatch

_COPIED = 0.125
"""What a token of a shared prompt costs each further row, in tokens: attention copies its keys and values."""


class MicroBatch(NamedTuple):
    """The most that one forward pass takes of an agent."""

    rows: int | None = None
    """None: as many as the tokens allow."""
    tokens: int | None = None
    """None: as many as the rows have."""
    unit: int = 1
    """Rows that are never parted."""

    def at_most(self, tokens: int | None) -> "MicroBatch":
        """Return the same with no more than so many tokens; None leaves it."""
        return self if tokens is None else self._replace(tokens=min(tokens, self.tokens or tokens))


def cut(batch: RolloutBatch, rows: Tensor, most: MicroBatch, *, flat: bool) -> list[Tensor]:
    """Cut some rows ``[n]`` of a batch into micro-batches, those with one prompt side by side; at least one unit each.

    ``flat``: rows are computed in one line, a prompt that several of them share once. Otherwise each row costs the
    padded length of the batch.
    """
    if not len(rows):
        return []
    unit_rows = min(most.unit, len(rows))
    units = rows.view(-1, unit_rows)
    prompts = batch.prompts if flat else None
    if prompts is not None:
        units = units[prompts.of[units[:, 0]].argsort(stable=True)]
    of = [-1] * len(batch) if prompts is None else prompts.of.tolist()
    again = [] if prompts is None else (prompts.lengths * (1 - _COPIED)).tolist()
    lengths = batch.lengths.tolist() if flat else [batch.ids.shape[1]] * len(batch)

    def cost(unit: list[int], there: set[int]) -> float:
        """Return what some rows add to a pass in which some prompts are; these become more."""
        tokens = 0.0
        for row in unit:
            tokens += lengths[row] - (again[of[row]] if of[row] in there else 0)
            there.update([of[row]] if of[row] >= 0 else [])
        return tokens

    limit = max(1, (most.rows or len(rows)) // unit_rows)
    found: list[list[list[int]]] = [[]]
    spent, there = 0.0, set[int]()
    for unit in units.tolist():
        more = cost(unit, there)
        if found[-1] and (len(found[-1]) == limit or (most.tokens is not None and spent + more > most.tokens)):
            found.append([])
            there = set()
            spent, more = 0.0, cost(unit, there)
        found[-1].append(unit)
        spent += more
    return [torch.tensor(part).flatten() for part in found]
