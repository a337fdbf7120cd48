"""One reducer for every metric: it carries sums and counts, so no split into micro-batches can change a result."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "min", "max", "std"]
_FIELDS = {"mean": "mean", "sum": "total", "min": "minimum", "max": "maximum", "std": "std"}
"""The field of :class:`Statistic` with the result of each reduction."""


@dataclass
class Statistic:
    """Count, sum, spread and range of the values seen so far, in fp64; two of them merge into one."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    minimum: float = math.inf
    maximum: float = -math.inf

    @property
    def mean(self) -> float:
        """Mean of all values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Standard deviation with ddof 1; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: "Statistic") -> None:
        """Add the values of another statistic. Source: Chan, Golub and LeVeque (1979)."""
        if not other.count:
            return
        count = self.count + other.count
        # With the means and counts of before: what follows overwrites them.
        shift = other.mean - self.mean
        self.squares += other.squares + shift * shift * self.count * other.count / count
        self.total += other.total
        self.count = count
        self.minimum = _worst(min, self.minimum, other.minimum)
        self.maximum = _worst(max, self.maximum, other.maximum)

    @classmethod
    def of(cls, values: Tensor) -> "Statistic":
        """Summarise the values of a tensor; one transfer from its device."""
        if not values.numel():
            return cls()
        wide = values.detach().double().flatten()
        mean = wide.mean()
        # Squares about the mean: a difference of two large sums would be mostly rounding.
        parts = torch.stack([wide.sum(), (wide - mean).square().sum(), wide.min(), wide.max()]).tolist()
        return cls(float(wide.numel()), *parts)


@dataclass
class MetricReducer:
    """Collects named metrics over micro-batches, agents' windows or ranks, and reports one number each."""

    statistics: dict[str, Statistic] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)

    def add(
        self, name: str, values: Tensor | float, mask: Tensor | None = None, *, reduction: Reduction = "mean"
    ) -> None:
        """Add values (of any shape; those where ``mask`` is False are left out).

        A value that is not finite is kept: a metric that was NaN somewhere is NaN. Raises ValueError if the name was
        added with another reduction before, or for an unknown reduction.
        """
        self._declare(name, reduction)
        tensor = values if isinstance(values, Tensor) else torch.tensor(float(values), dtype=torch.float64)
        if mask is not None:
            tensor = tensor.expand(mask.shape)[mask]
        self.statistics[name].merge(Statistic.of(tensor))

    def add_ratio(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add a mean that is already split into its sum and its count."""
        self._declare(name, "mean")
        count = float(count)
        if count > 0:
            # The spread inside is unknown; a mean does not need it.
            self.statistics[name].merge(Statistic(count, float(total), math.nan, math.nan, math.nan))

    def merge(self, other: "MetricReducer") -> None:
        """Add everything that another reducer has seen, for instance on another rank."""
        for name, statistic in other.statistics.items():
            self._declare(name, other.reductions[name])
            self.statistics[name].merge(statistic)

    def result(self) -> dict[str, float]:
        """Return one number per name, sorted; names without a value are absent."""
        seen = sorted(name for name, statistic in self.statistics.items() if statistic.count)
        return {name: getattr(self.statistics[name], _FIELDS[self.reductions[name]]) for name in seen}

    def state(self) -> dict[str, list[float | str]]:
        """Return plain numbers that ``from_state`` reads again, for a transfer between processes."""
        return {
            name: [self.reductions[name], s.count, s.total, s.squares, s.minimum, s.maximum]
            for name, s in self.statistics.items()
        }

    @classmethod
    def from_state(cls, state: Mapping[str, list[float | str]]) -> "MetricReducer":
        """Rebuild a reducer from ``state``."""
        reducer = cls()
        for name, (reduction, *numbers) in state.items():
            reducer._declare(name, reduction)  # type: ignore[arg-type]
            reducer.statistics[name] = Statistic(*(float(number) for number in numbers))
        return reducer

    def _declare(self, name: str, reduction: Reduction) -> None:
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {', '.join(get_args(Reduction))}, found {reduction!r}")
        known = self.reductions.setdefault(name, reduction)
        if known != reduction:
            raise ValueError(f"metric {name!r} is already reduced by {known!r}, found {reduction!r}; use another name")
        self.statistics.setdefault(name, Statistic())


def _worst(choose: Callable[[float, float], float], a: float, b: float) -> float:
    # Python's min(1.0, nan) is 1.0: every comparison with a NaN is False.
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)
