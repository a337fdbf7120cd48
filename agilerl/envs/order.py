"""The order of training: which row stands at a position, a pure function of the seed and the position."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from agilerl.errors import ConfigError
from agilerl.streams import stream

BLOCK = 1000
"""Positions of a mixture in which every source has exactly its share."""


class TrainingOrder:
    """Positions to rows of one source, or of several that are mixed by weight.

    A source is walked through in epochs, a new permutation each. In a mixture every block of ``BLOCK`` positions holds
    each source as often as its weight says, in a shuffled order; a source that is used up begins its next epoch while
    the others go on. Nothing is remembered but the permutation of an epoch, so any position can be asked for at once.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Take the number of rows (1 or more) and the weight (above 0) of each source.

        Raises ConfigError where a weight is too small for one row in a block.
        """
        self.sizes, self.seed = tuple(sizes), seed
        self._starts = (0, *accumulate(self.sizes))
        self._shares = apportion(weights, BLOCK)
        if 0 in self._shares:
            raise ConfigError(
                f"expected weights that give every dataset at least 1 of {BLOCK} rows, found {tuple(weights)}; raise "
                "the smallest, or leave it out"
            )
        self._epochs: dict[int, tuple[int, Sequence[int]]] = {}
        self._block: tuple[int, Sequence[tuple[int, int]]] = (-1, ())

    def __call__(self, position: int) -> int:
        """Return the row at a training position, counted over all sources one after the other."""
        source, number = self.source(position)
        epoch, place = divmod(number, self.sizes[source])
        known = self._epochs.get(source)
        if known is None or known[0] != epoch:
            # A single source has the key that it always had, so that its order does not depend on mixtures.
            key = (epoch,) if len(self.sizes) == 1 else (epoch, source)
            order = stream(self.seed, "dataset/order", *key).permutation(self.sizes[source]).tolist()
            self._epochs[source] = known = (epoch, order)
        return self._starts[source] + known[1][place]

    def source(self, position: int) -> tuple[int, int]:
        """Return which source a position is taken from, and how many earlier positions were taken from it."""
        if len(self.sizes) == 1:
            return 0, position
        block, place = divmod(position, BLOCK)
        if self._block[0] != block:
            pattern = np.repeat(np.arange(len(self.sizes)), self._shares)
            pattern = stream(self.seed, "dataset/mixture", block).permutation(pattern)
            used = [block * share for share in self._shares]
            numbered = []
            for source in pattern.tolist():
                numbered.append((source, used[source]))
                used[source] += 1
            self._block = (block, numbered)
        return self._block[1][place]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` among weights in whole numbers that add up to it, by largest remainders."""
    whole = sum(weights)
    exact = [weight / whole * total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares
