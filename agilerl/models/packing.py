"""Sequence packing: rows of one agent are concatenated without padding, and each attends only to itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        found = [list(members)] if whole else _bins(members, sizes, longest)
        rows += found
        per_part.append(len(found))
    width = max((sum(sizes[row] for row in members) for members in rows), default=0)
    packed, positions = ids.new_zeros((len(rows), width)), ids.new_zeros((len(rows), width))
    source = ids.new_zeros(ids.shape)
    for place, group in enumerate(rows):
        at = 0
        for row in group:
            end = at + sizes[row]
            packed[place, at:end] = ids[row, : sizes[row]]
            positions[place, at:end] = torch.arange(sizes[row], device=ids.device)
            source[row, : sizes[row]] = torch.arange(at, end, device=ids.device) + place * width
            at = end
    return Packed(packed, positions, tuple(per_part), source)


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
