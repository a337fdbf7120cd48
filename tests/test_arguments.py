"""Lists at the door: what is accepted stays as it is, and what is not is named with its place."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from agilerl.checks.arguments import Number, checked
from agilerl.errors import ConfigError

NAN, INFINITY = float("nan"), float("inf")


@checked
def take(
    *,
    finite: Sequence[float] = (),
    measured: Sequence[Number] = (),
    ids: Sequence[int] = (),
    words: Sequence[str] = (),
    fixed: tuple[int, str] = (0, ""),
    many: tuple[int, ...] = (),
    named: Mapping[int, int] = MappingProxyType({}),
) -> dict[str, Any]:
    return {
        "finite": finite,
        "measured": measured,
        "ids": ids,
        "words": words,
        "fixed": fixed,
        "many": many,
        "named": named,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("finite", [0.5, -1.0]),
        ("finite", [0.5, 2]),
        ("finite", []),
        ("measured", [0.5, NAN, INFINITY]),
        ("ids", [3, 10**30]),
        ("words", ["", "a"]),
        ("many", (1, 2, 3)),
        ("fixed", (1, "a")),
    ],
)
def test_what_fits_stays_the_same_object(name: str, value: Any) -> None:
    taken = take(**{name: value})[name]
    assert all(a is b for a, b in zip(taken, value, strict=True))
    assert taken is value or isinstance(value, tuple)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("finite", [0.5, NAN], 1),
        ("finite", [INFINITY], 0),
        ("finite", [0.5, "1"], 1),
        ("finite", [0.5, True], 1),
        ("measured", [NAN, None], 1),
        ("measured", [NAN, False], 1),
        ("ids", [1, True], 1),
        ("ids", [1, 2.0], 1),
        ("words", ["a", b"b"], 1),
        ("many", (1, 2, "3"), 2),
        ("fixed", (1, 2), 1),
    ],
)
def test_the_item_that_does_not_fit_is_named(name: str, value: Any, place: int) -> None:
    with pytest.raises(ConfigError, match=rf"for {name}\[{place}\], found"):
        take(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ids", np.array([1, 2]), [1, 2]),
        ("finite", np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        ("finite", np.array([1.5, 2.5]), [1.5, 2.5]),
        ("ids", deque([1, 2]), [1, 2]),
        ("ids", [np.int64(1), 2], [1, 2]),
        ("finite", [np.float32(1.5)], [1.5]),
        ("fixed", (np.int32(1), "a"), (1, "a")),
        ("named", {np.int64(1): np.int64(2)}, {1: 2}),
        ("many", [1, 2], (1, 2)),
    ],
)
def test_other_containers_become_what_is_asked_for(name: str, value: Any, expected: Any) -> None:
    taken = take(**{name: value})[name]
    assert isinstance(taken, type(expected) | type(value))
    assert list(taken) == list(expected)
    assert not isinstance(taken, np.ndarray)
    assert not any(isinstance(item, np.generic) for item in taken)
