"""``docs/speed.md`` shows what the benchmarks measured: its tables are made of the committed JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarking import peers

ROOT = Path(__file__).resolve().parent.parent


def results(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarking" / "results" / f"peers_cpu{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return rows


@pytest.mark.parametrize("rows", [[*results(""), *results("_30M")], results("_135M")], ids=["small", "135M"])
def test_tables_are_those_of_the_results(rows: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert [line for line in peers.ratio_table(rows).splitlines() if line not in page] == []
