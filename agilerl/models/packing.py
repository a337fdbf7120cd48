"""Rows of one agent behind each other without padding, each attending to itself alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed", "pack"]


@dataclass(frozen=True)
class Packed:
    """Rows of a padded batch ``[B, T]``, laid out anew as ``[R, C]`` with R C at most B T."""

    ids: Tensor
    """[R, C] token ids."""
    positions: Tensor
    """[R, C] position of each token within its own row; the model keeps apart what does not count up by one."""
    rows: tuple[int, ...]
    """Packed rows of each part of the batch: no packed row holds tokens of two parts."""
    source: Tensor
    """[B, T] place of each token in the flattened packed batch; that of padding is 0."""

    def unpack(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, T, H]`` of packed ones ``[R, C, H]``; those of padding mean nothing."""
        return hidden.flatten(0, 1)[self.source]


def pack(ids: Tensor, lengths: Tensor, parts: Sequence[int], *, whole: bool) -> Packed:
    """Lay the rows of right-padded ``ids [B, T]`` out anew; ``lengths [B]`` are their tokens, ``parts`` rows an agent.

    With ``whole`` an agent's rows become a single one, for attention that skips what a mask hides. Otherwise a packed
    row is at most T long, so that attention over it costs no more than over a padded one.
    """
    sizes, longest = lengths.tolist(), ids.shape[1]
    rows: list[list[int]] = []
    per_part: list[int] = []
    start = 0
    for count in parts:
        own = range(start, start + count)
        start += count
        found = [list(own)] if whole else _bins(own, sizes, longest)
        rows += found
        per_part.append(len(found))
    width = max((sum(sizes[row] for row in members) for members in rows), default=0)
    packed, positions = ids.new_zeros((len(rows), width)), ids.new_zeros((len(rows), width))
    source = ids.new_zeros(ids.shape)
    for place, members in enumerate(rows):
        at = 0
        for row in members:
            end = at + sizes[row]
            packed[place, at:end] = ids[row, : sizes[row]]
            positions[place, at:end] = torch.arange(sizes[row], device=ids.device)
            source[row, : sizes[row]] = torch.arange(at, end, device=ids.device) + place * width
            at = end
    return Packed(packed, positions, tuple(per_part), source)


def _bins(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Group rows so that each group's tokens fit the capacity: the longest first, each where the least room is left."""
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
