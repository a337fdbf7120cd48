"""Learning-rate schedules, as a factor on the current learning rate, so that a mutated rate keeps its position."""

from dataclasses import dataclass
from math import cos, pi
from typing import Annotated

from agilerl.arguments import Count, Within, check_fields

__all__ = ["CosineLRScheduleConfig", "lr_factor"]


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up, then a cosine down to zero."""

    num_epochs: Count
    """Calls of ``learn`` after which the factor reaches zero."""
    warmup_proportion: Annotated[float, Within(least=0, below=1)] = 0.05
    """Share of them spent warming up, in [0, 1)."""

    def __post_init__(self) -> None:
        check_fields(self)


def lr_factor(schedule: CosineLRScheduleConfig | None, update: int) -> float:
    """Return the factor of update ``update`` (from 0): (u + 1) / (W + 1) for W updates of warm-up, then
    (1 + cos) / 2.
    """
    if schedule is None:
        return 1.0
    warmup = schedule.num_epochs * schedule.warmup_proportion
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = min((update - warmup) / (schedule.num_epochs - warmup), 1.0)
    return 0.5 * (1 + cos(pi * progress))
