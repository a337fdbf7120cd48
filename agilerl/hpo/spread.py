"""Where the population starts: the user's configuration, and around it an even spread over the ranges."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from agilerl.arguments import Seed, checked
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import Gene, Value, check_values
from agilerl.streams import stream


@checked
def initial_hyperparameters(
    genes: Mapping[str, Gene],
    base_values: Mapping[str, Value],
    size: int,
    seed: Seed,
    init: Literal["spread", "same"] = "spread",
) -> list[dict[str, Value]]:
    """Return the gene values of each of ``size`` members; member 0 always has ``base_values``.

    ``"spread"``: the rest form a scrambled Sobol sequence over the ranges (in log space where declared), so that no
    region of the space is left out; a larger population keeps the points of a smaller one. ``"same"``: all are equal.
    Raises ConfigError for a size below one, an unknown ``init``, or a base value outside its range.
    """
    if size < 1:
        raise ConfigError(f"A population needs at least one member, found size={size}.")
    if init not in ("spread", "same"):
        raise ConfigError(f"init must be 'spread' or 'same', found {init!r}.")
    check_values(genes, base_values)
    base = {name: base_values[name] for name in genes}
    members = [dict(base) for _ in range(size)]
    if init == "same" or not genes or size == 1:
        return members
    for member, point in zip(members[1:], _sobol(len(genes), size - 1, seed), strict=True):
        member.update({gene.name: gene.from_unit(float(u)) for gene, u in zip(genes.values(), point, strict=True)})
    return members


# -- Sobol's sequence, the numbers of scipy.stats.qmc.Sobol ------------------------------------------------------------
# scipy's own is behind scipy.stats, which takes half a second to import at the start of every run.

_BITS = 30
_DIRECTIONS = (
    (3, (1,)),
    (7, (1, 3)),
    (11, (1, 3, 1)),
    (13, (1, 1, 1)),
    (19, (1, 1, 3, 3)),
    (25, (1, 3, 5, 13)),
    (37, (1, 1, 5, 5, 17)),
    (41, (1, 1, 5, 5, 5)),
    (47, (1, 1, 7, 11, 19)),
    (55, (1, 1, 5, 1, 1)),
    (59, (1, 1, 1, 3, 11)),
    (61, (1, 3, 5, 5, 31)),
    (67, (1, 3, 3, 9, 7, 49)),
    (91, (1, 1, 1, 15, 21, 21)),
    (97, (1, 3, 1, 13, 27, 49)),
    (103, (1, 1, 1, 15, 7, 5)),
    (109, (1, 3, 1, 15, 13, 25)),
    (115, (1, 1, 5, 5, 19, 61)),
    (131, (1, 3, 7, 11, 23, 15, 103)),
    (137, (1, 3, 7, 13, 13, 15, 69)),
    (143, (1, 1, 3, 13, 7, 35, 63)),
    (145, (1, 3, 5, 9, 1, 25, 53)),
    (157, (1, 3, 1, 13, 9, 35, 107)),
    (167, (1, 3, 1, 5, 27, 61, 31)),
    (171, (1, 1, 5, 11, 19, 41, 61)),
    (185, (1, 3, 5, 3, 3, 13, 69)),
    (191, (1, 1, 7, 13, 1, 19, 1)),
    (193, (1, 3, 7, 5, 13, 19, 59)),
    (203, (1, 1, 3, 9, 25, 29, 41)),
    (211, (1, 3, 5, 13, 23, 1, 55)),
    (213, (1, 3, 7, 3, 13, 59, 17)),
)
"""Of each dimension after the first: its primitive polynomial as bits, and the first direction numbers (S. Joe,
F. Y. Kuo, SIAM J. Sci. Comput. 30, 2635, 2008; their table new-joe-kuo-6.21201)."""


def _sobol(dimensions: int, count: int, seed: int) -> Any:
    """Return ``count`` points of a scrambled sequence, ``[count, dimensions]`` in [0, 1); scipy's, to the bit."""
    generator, size = stream(seed, "initial spread"), 1 << max(count - 1, 0).bit_length()
    if dimensions > len(_DIRECTIONS) + 1:
        from scipy.stats import qmc  # has the numbers of 21,201 dimensions

        return qmc.Sobol(dimensions, scramble=True, rng=generator).random(size)[:count]
    generator = generator.spawn(1)[0]  # as scipy does
    # Scrambled by a random shift and, of each dimension, a random lower triangular matrix of bits (Matousek 1998).
    bits = generator.integers(2, size=(dimensions, _BITS), dtype=np.uint32)
    current = [sum(int(bit) << place for place, bit in enumerate(row)) for row in bits]
    lower = np.tril(generator.integers(2, size=(dimensions, _BITS, _BITS), dtype=np.uint32))
    directions = [
        [_scrambled(number, matrix) for number in _directions(dimension)]
        for dimension, matrix in enumerate(_rows(lower))
    ]
    points = np.empty((size, dimensions))
    points[0] = current
    for place in range(1, size):
        changed = (place & -place).bit_length() - 1  # the bit in which the Gray codes of neighbours differ
        current = [number ^ numbers[changed] for number, numbers in zip(current, directions, strict=True)]
        points[place] = current
    return (points * 2.0**-_BITS)[:count]


def _directions(dimension: int) -> list[int]:
    """Return the direction numbers of a dimension, each shifted to the full number of bits."""
    if dimension == 0:
        numbers = [1] * _BITS
    else:
        polynomial, first = _DIRECTIONS[dimension - 1]
        degree, numbers = len(first), list(first)
        for place in range(degree, _BITS):
            number = numbers[place - degree]
            for k in range(1, degree + 1):
                if polynomial >> (degree - k) & 1:
                    number ^= numbers[place - k] << k
            numbers.append(number)
    return [number << (_BITS - 1 - place) for place, number in enumerate(numbers)]


def _rows(lower: Any) -> list[list[int]]:
    """Return the rows of lower triangular matrices of bits as numbers, with ones on the diagonals."""
    return [
        [
            sum(int(bit) << (_BITS - 1 - k) for k, bit in enumerate(row)) | 1 << (_BITS - 1 - r)
            for r, row in enumerate(matrix)
        ]
        for matrix in lower
    ]


def _scrambled(number: int, matrix: list[int]) -> int:
    """Return the product of a matrix and a vector of bits, the highest first, modulo 2."""
    return sum(((row & number).bit_count() & 1) << (_BITS - 1 - place) for place, row in enumerate(matrix))
