"""Which questions are kept for exam and test, and in which order the others are trained on.

The order is a pure function of the seed and the position, the split one of the question alone.
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
"""One question in so many is kept for exams and tests."""
LEAST = 2
"""Questions of a panel below which its mean says nothing, and has no standard error."""
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


@checked
def is_held_out(question: str) -> bool:
    """Say whether ``question`` belongs to the fifth of all questions that nothing may be trained on.

    A question is held out when ``crc32(question as UTF-8) % 5 == 0``. The rule needs no list and no seed, so the
    embedded base model, the training draws and the exams agree on it without knowing of each other.
    """
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0


def fewer(exam: int, test: int, available: int) -> tuple[int, int] | None:
    """Return the sizes of smaller panels that ``available`` questions fill, None where they would be too small.

    Each gets half of the questions; what one does not need goes to the other.
    """
    exam_fits = min(exam, max(-(-available // 2), available - test))
    test_fits = min(test, available - exam_fits)
    enough = exam_fits >= min(exam, LEAST) and test_fits >= min(test, LEAST)
    return (exam_fits, test_fits) if enough else None


def warn_of_fewer(name: str, asked: tuple[int, int], found: tuple[int, int], distinct: str) -> None:
    """Say that the panels are smaller than asked for."""
    warnings.warn(
        f"{name} has only {distinct}: the exam has {found[0]} prompts and the test {found[1]}, in place of {asked[0]} "
        f"and {asked[1]} (eval_prompts, test_prompts); fitness is the less exact for it",
        stacklevel=3,
    )
