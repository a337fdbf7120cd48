"""Learning-rate schedules, as a factor on the current learning rate, so that a mutated rate keeps its position."""

from dataclasses import dataclass
from math import cos, pi

from agilerl.errors import ConfigError

__all__ = ["CosineLRScheduleConfig", "lr_factor"]


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up, then a cosine down to zero."""

    num_epochs: int
    """Calls of ``learn`` after which the factor reaches zero."""
    warmup_proportion: float = 0.05
    """Share of them spent warming up, in [0, 1)."""

    def __post_init__(self) -> None:
        if self.num_epochs < 1 or not 0 <= self.warmup_proportion < 1:
            raise ConfigError(
                "CosineLRScheduleConfig expects num_epochs >= 1 and warmup_proportion in [0, 1), found "
                f"{self.num_epochs} and {self.warmup_proportion}"
            )


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
