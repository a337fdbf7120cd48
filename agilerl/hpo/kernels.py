"""How one value moves when it mutates: a symmetric heavy-tailed step, a choice, or the documented factors."""

import math

import numpy as np

from agilerl.hpo.parameters import Gene, Value

TAIL = 2.0
"""Degrees of freedom of the Student-t step: half of the steps are small, one in a hundred crosses the whole range."""


def mutate_value(gene: Gene, value: Value, rng: np.random.Generator) -> Value:
    """Return another value of ``gene`` near ``value``: in range, and different from ``value`` clipped into the range.

    Heavy-tailed kernel, on the unit position u of the range (its logarithm for a log scale):
    u' = reflect(u + step * t), t ~ Student(2); with probability ``gene.resample`` u' ~ U(0, 1) instead. Reflection at
    the ends keeps the kernel symmetric, so without selection a float does not drift and wanders over the whole range.
    Factor kernel (RLParameter): v' = v * shrink or v * grow, each with probability 1/2. Integers are rounded and move
    by at least one, so over a range of few integers they do drift, especially on a logarithmic scale.
    """
    if gene.dtype == "choice":
        others = [choice for choice in gene.choices if choice != value]
        return others[int(rng.integers(len(others)))]
    current = min(max(float(value), gene.min), gene.max)
    moved = _by_factor(gene, current, rng) if gene.factors else _by_step(gene, current, rng)
    return int(moved) if gene.dtype == "int" else float(moved)


def _by_step(gene: Gene, current: float, rng: np.random.Generator) -> float:
    position = gene.to_unit(current)
    resampled = rng.random() < gene.resample
    target = rng.random() if resampled else _reflect(position + gene.step * rng.standard_t(TAIL))
    moved = float(gene.from_unit(target))
    return moved if moved != current else _nudge(gene, current, upwards=target >= position)


def _by_factor(gene: Gene, current: float, rng: np.random.Generator) -> float:
    shrink, grow = gene.factors or (1.0, 1.0)
    first, second = (shrink, grow) if rng.random() < 0.5 else (grow, shrink)
    for factor in (first, second):
        target = current * factor
        if gene.dtype == "int":
            # At least one: 4 * 1.2 = 4.8 must not fall back to 4, or integers could only shrink.
            up = target > current
            target = max(round(target), current + 1) if up else min(round(target), current - 1)
        moved = min(max(target, gene.min), gene.max)
        if moved != current:
            return moved
    # Neither factor moves it (e.g. a zero), so draw from the range instead.
    moved = float(gene.from_unit(rng.random()))
    return moved if moved != current else _nudge(gene, current, upwards=rng.random() < 0.5)


def _nudge(gene: Gene, current: float, upwards: bool) -> float:
    """Return the next representable value in the wanted direction, or in the other one at an end of the range."""
    for direction in (1, -1) if upwards else (-1, 1):
        moved = current + direction if gene.dtype == "int" else math.nextafter(current, direction * math.inf)
        if gene.min <= moved <= gene.max:
            return moved
    raise AssertionError(f"the range of {gene.name} holds one value; its declaration should have been refused")


def _reflect(position: float) -> float:
    """Fold the real line into [0, 1] with mirrors at both ends."""
    folded = position % 2.0
    return 2.0 - folded if folded > 1.0 else folded
