"""Which questions are held out for exam and test, and the training order of the others.

The order is a pure function of the seed and the position, the split depends on the question alone.
"""

import warnings
import zlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from agilerl.arguments import checked
from agilerl.errors import ConfigError
from agilerl.streams import stream

HELD_OUT_EVERY = 5
"""One in this many questions is held out for exams and tests."""
LEAST = 2
"""Fewest questions of a panel; below, its mean is meaningless and has no standard error."""
BLOCK = 1000
"""Number of positions in which every source of a mixture has exactly its share."""


class TrainingOrder:
    """Maps positions to rows of one source, or of several mixed by weight.

    A source is walked through in epochs, a new permutation each. In a mixture, every block of ``BLOCK`` positions holds
    each source as often as its weight says, in a shuffled order; an exhausted source begins its next epoch while the
    others continue. Only an epoch's permutation is remembered, so any position can be looked up directly.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Take the number of rows (1 or more) and the weight (above 0) of each source.

        Raises ConfigError if a weight is too small for one row in a block.
        """
        self.sizes, self.seed = tuple(sizes), seed
        self._starts = (0, *accumulate(self.sizes))
        self._shares = apportion(weights, BLOCK)
        if 0 in self._shares:
            raise ConfigError(
                f"expected weights that give every dataset at least 1 of {BLOCK} rows, found {tuple(weights)}; raise "
                "the smallest, or remove it"
            )
        self._epochs: dict[int, tuple[int, Sequence[int]]] = {}
        self._block: tuple[int, Sequence[tuple[int, int]]] = (-1, ())

    def __call__(self, position: int) -> int:
        """Return the row at a training position, counted over all sources in sequence."""
        source, number = self.source(position)
        epoch, place = divmod(number, self.sizes[source])
        known = self._epochs.get(source)
        if known is None or known[0] != epoch:
            # A single source keeps the key from before mixtures existed, so that its order is unchanged.
            key = (epoch,) if len(self.sizes) == 1 else (epoch, source)
            order = stream(self.seed, "dataset/order", *key).permutation(self.sizes[source]).tolist()
            self._epochs[source] = known = (epoch, order)
        return self._starts[source] + known[1][place]

    def source(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and how many earlier positions have that source."""
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


@checked
def is_held_out(question: str) -> bool:
    """Return whether ``question`` belongs to the fifth of all questions that are never trained on.

    A question is held out when ``crc32(question as UTF-8) % 5 == 0``. The rule needs no list and no seed, so the
    embedded base model, the training draws and the exams agree on it independently.
    """
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0


def fewer(exam: int, test: int, available: int) -> tuple[int, int] | None:
    """Return the sizes of smaller panels that ``available`` questions fill, or None if they would be too small.

    Each gets half of the questions; if one needs fewer, the rest goes to the other.
    """
    exam_fits = min(exam, max(-(-available // 2), available - test))
    test_fits = min(test, available - exam_fits)
    enough = exam_fits >= min(exam, LEAST) and test_fits >= min(test, LEAST)
    return (exam_fits, test_fits) if enough else None


def warn_of_fewer(name: str, asked: tuple[int, int], found: tuple[int, int], distinct: str) -> None:
    """Warn that the panels are smaller than requested."""
    warnings.warn(
        f"{name} has only {distinct}: the exam has {found[0]} prompts and the test {found[1]} instead of {asked[0]} "
        f"and {asked[1]} (eval_prompts, test_prompts); fitness is less exact",
        stacklevel=3,
    )
