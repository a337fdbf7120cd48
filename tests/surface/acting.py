"""What the tests of documented arguments share: how an argument is changed, and what must come of it.

A table for each entry point has an entry for each argument; ``facts`` is a function that uses the entry point with some
arguments and returns what can be seen of it. The facts before and after a change are compared, and bits count.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


_BEFORE: dict[str, Any] = {}


def before(facts: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Return the facts without the change, which are the same every time: else a difference would prove nothing."""
    key = f"{facts} {dict(given)}"
    if key not in _BEFORE:
        first, again = (facts(**given) for _ in range(2))
        assert first == again
        _BEFORE[key] = first
    return _BEFORE[key]


def check(entry: Entry | None, name: str, facts: Callable[..., Any]) -> None:
    """Check that an argument does what its entry says."""
    if isinstance(entry, Change):
        assert facts(**{**entry.base, name: entry.value}) != before(facts, entry.base)
    elif isinstance(entry, Refused):
        with pytest.raises(AgileRLError, match=name):
            facts(**{**entry.base, name: entry.value})
    elif isinstance(entry, Warned):
        with pytest.warns(UserWarning, match=name):
            facts(**{name: entry.value})
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
