"""What the tests of documented arguments share: how an argument is changed, and what must come of it.

A table for each entry point has an entry for each argument; ``facts`` is a function that uses the entry point with some
arguments and returns what can be seen of it. The facts before and after a change are compared, and bits count. If it
yields them in stages, the first that differs ends the comparison.
"""

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from agilerl.errors import AgileRLError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """Another value; the facts must be others than with ``base`` alone."""

    value: Any
    base: Mapping[str, Any] = field(default_factory=dict)
    """What else has to be set for the argument to matter, in both cases."""


@dataclass(frozen=True)
class Refused:
    """A value that this machine, or the package, does not have: an error that names the argument."""

    value: Any
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned:
    """A value that has no effect here, which is said."""

    value: Any


@dataclass(frozen=True)
class Proven:
    """An effect that needs a larger scene than these: the test that shows it, from ``tests/`` on."""

    test: str


@dataclass(frozen=True)
class NoOp:
    """Accepted without effect; docs/coming_from_agilerl.md gives the reason."""

    reason: str


Entry = Change | Refused | Warned | Proven | NoOp


def to(value: Any, **base: Any) -> Change:
    return Change(value, base)


def bits(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def scratch() -> TemporaryDirectory[str]:
    """Return a new folder where tests have theirs, which may be memory: runs save with fsync."""
    return TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


def stages(facts: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the facts: all at once, or one stage after the other if ``facts`` is a generator."""
    found = facts(**given)
    yield from found if isinstance(found, Generator) else [found]


class Before:
    """The facts without the change, found out as far as needed. They are the same every time: else a difference would
    prove nothing.
    """

    def __init__(self, facts: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self._both = zip_longest(stages(facts, given), stages(facts, given))
        self._known: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for number in count():
            if number == len(self._known):
                if (both := next(self._both, None)) is None:
                    return
                assert both[0] == both[1]
                self._known.append(both[0])
            yield self._known[number]


_BEFORE: dict[str, Before] = {}


def check(entry: Entry | None, name: str, facts: Callable[..., Any]) -> None:
    """Check that an argument does what its entry says."""
    if isinstance(entry, Change):
        before = _BEFORE.setdefault(f"{facts} {dict(entry.base)}", Before(facts, entry.base))
        after = stages(facts, {**entry.base, name: entry.value})
        assert any(one != other for one, other in zip_longest(before, after))
    elif isinstance(entry, Refused):
        with pytest.raises(AgileRLError, match=name):
            list(stages(facts, {**entry.base, name: entry.value}))
    elif isinstance(entry, Warned):
        with pytest.warns(UserWarning, match=name):
            list(stages(facts, {name: entry.value}))
    elif isinstance(entry, Proven):
        file, _, test = entry.test.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    elif isinstance(entry, NoOp):
        page = (ROOT / "docs" / "coming_from_agilerl.md").read_text(encoding="utf-8")
        rows = page.split("## Accepted without effect", 1)[1].split("\n## ", 1)[0].splitlines()
        assert any(re.search(rf"\b{name}\b", row) and entry.reason in row for row in rows)
    else:
        raise AssertionError(f"{name} has no entry: say how it is changed, and what comes of it")


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's own parameters."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in inspect.signature(function).parameters.items() if n != "self" and p.kind not in several]
