"""The factor on the learning rate over a run."""

import pytest

from agilerl.errors import ConfigError
from agilerl.hpo.strategies import LRSchedule


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        (LRSchedule(), {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
        (LRSchedule("linear"), {0.0: 1.0, 0.25: 0.75, 1.0: 0.0}),
        (LRSchedule("linear", decay=0.4), {0.0: 1.0, 0.6: 1.0, 0.8: 0.5, 1.0: 0.0, 1.3: 0.0}),
        (LRSchedule("linear", decay=0.4, end=0.1), {0.6: 1.0, 0.8: 0.55, 1.0: 0.1}),
        (LRSchedule("cosine"), {0.0: 1.0, 1 / 3: 0.75, 0.5: 0.5, 1.0: 0.0}),
        # warm-up, then the decay over all that is left: p = (0.6 - 0.2) / 0.8
        (LRSchedule("cosine", warmup=0.2), {0.0: 0.01, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        (LRSchedule("constant", warmup=0.5), {0.25: 0.5, 0.5: 1.0, 1.0: 1.0}),
        (LRSchedule("linear", decay=0.0), {0.99: 1.0, 1.0: 1.0}),
    ],
)
def test_the_factor(schedule: LRSchedule, at: dict[float, float]) -> None:
    assert {spent: schedule.factor(spent) for spent in at} == pytest.approx(at)


def test_parts_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        LRSchedule("linear", warmup=0.7, decay=0.4)
