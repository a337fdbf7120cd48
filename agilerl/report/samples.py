"""Sampled completions for the report's browser: the best and the worst of each group, within a size limit."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from agilerl.errors import CheckpointError
from agilerl.report.load import RunRecord, number
from agilerl.runs import RunLayout

_MOST_STEPS = 20
_MOST_GROUPS = 1200
_MOST_GROUPS_A_STEP = 6
_MOST_CHARACTERS = 2000

T = TypeVar("T")


def sample_groups(run: RunRecord) -> list[dict[str, Any]]:
    """Return groups picked evenly over steps and agents, each with its best and worst completion.

    A file that cannot be read is skipped, with a sentence in the run's notes.
    """
    from agilerl.runs.completions import completion_steps, read_completions  # imports pyarrow, so only if needed

    folder = RunLayout(run.path).completions
    groups: list[dict[str, Any]] = []
    steps = _evenly(completion_steps(folder), _MOST_STEPS)
    for step in steps:
        try:
            rows = read_completions(folder, step)
        except CheckpointError as error:
            run.notes.append(str(error))
            continue
        grouped: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            grouped[row["agent"]][row["group"]].append(row)
        room = max(1, min(_MOST_GROUPS_A_STEP, _MOST_GROUPS // (len(steps) * max(1, len(grouped)))))
        for agent in sorted(grouped):
            for group in _evenly(sorted(grouped[agent]), room):
                groups.append(_group(grouped[agent][group]))
    return groups


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    graded = sorted((row for row in rows if math.isfinite(number(row["reward"]))), key=lambda row: -row["reward"])
    shown = [graded[0], graded[-1]] if graded else rows[:2]
    same = len(shown) < 2 or shown[0] is shown[1]
    first = rows[0]
    return {
        "step": first["step"],
        "generation": first["generation"],
        "agent": first["agent"],
        "group": first["group"],
        "prompt": _cut(first["prompt"]),
        "answer": _cut(first["answer"]),
        "size": len(rows),
        "mean": sum(row["reward"] for row in graded) / len(graded) if graded else None,
        "spread": graded[0]["reward"] - graded[-1]["reward"] if graded else 0,
        "best": _shown(shown[0]),
        "worst": None if same else _shown(shown[1]),
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    reward = number(row["reward"])
    return {
        "text": _cut(row["completion"]),
        "reward": reward if math.isfinite(reward) else None,
        "length": row["length"],
        "finish": row["finish_reason"],
    }


def _cut(text: str | None) -> str:
    text = text or ""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]} … (truncated, {len(text):,} characters in total)"


def _evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
