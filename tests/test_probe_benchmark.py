"""``docs/probe.md`` ends with the table of the committed results, and the benchmark measures what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from agilerl.training.preflight import Bases
from benchmarking import probe_tasks

ROOT = Path(__file__).resolve().parent.parent


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarking" / "results" / "probe_smollm2.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_ends_with_the_table() -> None:
    page = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
    assert page.partition(probe_tasks.MARK)[2] == f"\n{probe_tasks.table(results())}"


@pytest.mark.model
def test_a_row_has_both_rewards_of_the_same_answers() -> None:
    config = probe_tasks.settings("embedded", "gcd", "whole", 10)
    found = probe_tasks.row(config, Bases(), questions=8, samples=4, longest=400)
    assert 0 < found["exact"]["reward"] <= found["score"]["reward"]
    assert found["score"]["differ"] >= found["exact"]["differ"] > 0
    skipped = probe_tasks.row(config, Bases(), questions=2, samples=1, longest=5)
    assert skipped["reason"] == f"prompts of {skipped['prompt_tokens']} tokens"
