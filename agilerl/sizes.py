"""Sizes that both the code and the forecasts use, each declared once. Imports nothing."""

from math import ceil
from typing import Any

LENGTH_MULTIPLE = 32
"""Padded lengths are multiples of this. CPU attention kernels give the same bits for a row at any such length."""
SEQUENCE_MULTIPLE = 8
"""In attention without gaps between rows, the lengths of sequences are padded to multiples of this. Sequences of one
call have equal padded lengths where bits count."""
CPU_ROWS = 16
"""On a CPU, rows of a matrix product are padded to a multiple of this: with fewer rows (and in fp64 on some CPUs with a
number of rows that is not a multiple of four) kernels add a row's terms in a different order."""
LONG_SUM, LONG_SUM_ROWS = 512, 256
"""On a CPU, matrix products that sum over so many terms in a backward pass get at least so many rows: with fewer rows
(176 or less where it was measured) kernels cut sums of 896 terms in another way than with more."""
PASS_TOKENS = 2048
"""Tokens of a training forward that fill a core of a CPU; more no longer fit its caches. A pass has more only where
otherwise several would compute what rows have in common."""
FAR = 8
"""From so many tokens before a sequence for each of its own on, its attention is computed again in the backward pass:
the copies of keys and values that it reads would be most of what is saved."""
MAX_ROWS = 1024
"""Default of ``training.max_rows_in_flight``: the most rows that are decoded at once."""
UNIT_ROWS = 256
"""The most rows of one agent in one decode batch."""
TILE_BYTES = 256 * 2**20
"""Size of a tile of fp32 logits if the caller gives no ``chunk_rows``."""
ADAPTER_COPIES = 4
"""Numbers that are stored for each number of an adapter: parameter, gradient, two Adam moments."""
VLLM_CPU_CACHE = 1 << 30
"""Bytes of vLLM's cache on a CPU if no setting says otherwise."""


def padded_length(length: float) -> int:
    """Round a sequence length up to the next multiple of ``LENGTH_MULTIPLE``; at least one multiple."""
    return max(1, ceil(length / LENGTH_MULTIPLE)) * LENGTH_MULTIPLE


def stated(config: Any, *names: str) -> int | None:
    """Return the first of these numbers that a model's configuration states; None if it states none.

    Of a number that differs from layer to layer, as a list or in configurations of their own, it is the largest.
    """
    for name in names:
        try:
            values = getattr(config, name, None)
        except RuntimeError:  # transformers refuses to name one number for all layers
            values = [getattr(layer, name, None) for layer in config.per_layer_config]
        values = values if isinstance(values, list | tuple) else [values]
        values = [value for value in values if value and isinstance(value, int | float) and value is not True]
        if values:
            return int(max(values))
    return None
