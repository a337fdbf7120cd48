"""A key-value cache whose rows have their own lengths, so that no row is ever padded on the left."""

from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

Kept = list[tuple[Tensor, Tensor]]
"""Keys and values ``[tokens, heads, 1, head_dim]`` of each attention layer."""


class _RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values ``[rows, heads, capacity, head_dim]`` of one attention layer."""

    def __init__(self, owner: "RaggedCache") -> None:
        super().__init__()
        self._owner = proxy(owner)  # a cycle would hold the cache until garbage is collected

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions = self._owner.positions
        if positions is None:  # prefill
            kept = self._owner.kept
            if kept is not None:
                place = self._owner.layers.index(self)
                key_states, value_states = (torch.cat(x) for x in zip((key_states, value_states), kept[place]))
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        rows = torch.arange(positions.shape[0], device=positions.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        visible = self._owner.visible
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._owner.positions is None else self._owner.visible), 0

    def get_seq_length(self) -> int:
        return 0 if self._owner.positions is None else self._owner.visible

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):  # type: ignore[misc]
    """Prefill once, then decode one token a row, each row at its own position."""

    def __init__(self, num_layers: int) -> None:
        self.positions: Tensor | None = None
        """[rows] where the next key of each row goes; None while prefilling."""
        self.kept: Kept | None = None
        """Keys and values of tokens that the prefill need not compute: of each layer, after those that it computes."""
        self.visible = 0
        """How many positions of the buffers the next step attends to; a row's own length is enforced by the mask."""
        super().__init__(layers=[_RaggedLayer(self) for _ in range(num_layers)])

    def expand(self, places: Tensor, capacity: int) -> None:
        """After prefill: begin each row of the decode batch with some prefilled tokens, and make room for more.

        ``places [rows, length]`` number the tokens as the prefill had them, row by row; ``capacity`` tokens fit a row.
        """
        for layer in self.layers:
            for name in ("keys", "values"):
                line = getattr(layer, name).transpose(1, 2).flatten(0, 1)
                buffer = line.new_empty((places.shape[0], line.shape[1], capacity, line.shape[2]))
                buffer[:, :, : places.shape[1]] = line[places].transpose(1, 2)
                buffer[:, :, places.shape[1] :] = 0  # the mask hides what is not there yet, but 0 x NaN is NaN
                setattr(layer, name, buffer)

    def of_row(self, row: int, length: int) -> Kept:
        """Return a copy of a row's keys and values, up to ``length`` tokens."""
        parts = ((layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self.layers)
        return [tuple(part.transpose(0, 1).unsqueeze(2).clone() for part in pair) for pair in parts]

    def select(self, rows: Tensor) -> None:
        """Keep some rows, in the given order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
