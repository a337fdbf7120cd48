"""Which earlier tokens the layers of a model attend to, by its configuration: windows, chunks, the longest row."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agilerl.sizes import stated


class Reach(NamedTuple):
    """Which earlier tokens a layer attends to."""

    window: int | None = None
    """So many tokens, the one that attends included; None: all."""
    chunk: int | None = None
    """Those of the same part of the row, which is cut into parts of so many tokens; None: all."""

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether tokens at the positions ``queries`` see those at ``keys``, which broadcast."""
        seen = keys <= queries
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        return seen if self.chunk is None else seen & (keys // self.chunk == queries // self.chunk)

    def hides(self, length: int) -> bool:
        """Return whether some token of a row of so many does not see all before it."""
        return any(limit is not None and limit < length for limit in self)


EVERYTHING = Reach()
Reaches = Reach | dict[str, Reach]
"""That of all layers, or of each kind of layers as the model's configuration names it."""


def masks_of(reaches: Reaches, mask: Callable[[Reach], Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the mask of each kind of layers as a model takes it: one, or one a kind."""
    return {kind: mask(reach) for kind, reach in reaches.items()} if isinstance(reaches, dict) else mask(reaches)


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where a token is seen, else minus infinity."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


NO_LIMIT = 1 << 20
"""Tokens of a row, for models that state no limit: those with ALiBi, for instance."""
_LIMITS = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")


def longest_row(config: Any) -> int:
    """Return the most tokens of a row, of a model's configuration for text.

    Where the rotation of all tokens changes with the length of a row (longrope), what a token was sampled with is not
    what the whole row is computed with later: rows end before that.
    """
    longest = stated(config, "max_position_embeddings") or NO_LIMIT
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest if longest > 0 else NO_LIMIT


def limits_in(config: Any, longest: int) -> dict[str, int]:
    """Return the settings that may hide tokens of rows of this length from one another."""
    limits = {name: stated(config, name) for name in vars(config) if _LIMITS.search(name)}
    return {name: limit for name, limit in limits.items() if limit is not None and 0 < limit < longest}


def readings(config: Any) -> list[Reaches]:
    """Return what a configuration may mean for its layers, the likeliest first; which one is tried out."""
    window, chunk = stated(config, "sliding_window"), stated(config, "attention_chunk_size")
    kinds = {
        "full_attention": EVERYTHING,
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    stated_kinds = set(getattr(config, "layer_types", None) or ())
    of_kinds = [{kind: kinds[kind] for kind in kinds if kind in {"full_attention", *stated_kinds}}]
    if not stated_kinds or not stated_kinds <= kinds.keys():
        of_kinds = []
    return [*of_kinds, Reach(window=window), Reach(chunk=chunk), EVERYTHING]


def kinds_with_states(config: Any) -> set[str]:
    """Return the kinds of layers that are no attention, as a configuration names them: "mamba", "linear_attention"."""
    kinds = {str(kind) for name in ("layer_types", "layers_block_type") for kind in getattr(config, name, None) or ()}
    return {kind for kind in kinds if "attention" not in kind or "linear" in kind} - {"moe", "mlp"}


@contextmanager
def narrowed(model: Any, limits: Mapping[str, int], size: int = 4) -> Iterator[None]:
    """Let windows and chunks be of so many tokens while the context is open, where a model reads them each time."""
    owners = [(model.config.get_text_config(), name) for name in limits]
    owners += [(module, name) for module in model.modules() for name in limits if name in vars(module)]
    before = []
    try:
        for owner, name in owners:
            value = getattr(owner, name)
            if value == limits[name] and value is not True:
                with suppress(ValueError, TypeError, RuntimeError):  # a configuration may refuse it, which shows
                    setattr(owner, name, size)
                    before.append((owner, name, value))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
