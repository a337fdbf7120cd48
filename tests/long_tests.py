"""The tests that `make test` leaves out, by the quick ones that try the same claim: `long_tests.txt` says which."""

from pathlib import Path

LEFT_OUT: dict[str, list[str]] = {}
"""Whole names, from the path below ``tests/`` on, or from ``benchmarking/``; that of a table stands for all its rows
but the quick ones."""

_path = ""
for _line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    if _line.startswith("    "):
        _quick, _, _long = _line.strip().partition(" <-")
        _names = [name.replace("the others", _quick.partition("[")[0]) for name in _long.strip().split(" | ") if name]
        LEFT_OUT[f"{_path}::{_quick}"] = [
            name if ".py" in name.partition("[")[0] else f"{_path}::{name}" for name in _names
        ]
    elif not _line.startswith("#"):
        _path = _line
