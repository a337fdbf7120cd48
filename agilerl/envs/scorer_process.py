"""What runs in the scorers' process; imported before the process loses access to files."""

import ast
from typing import Any

from agilerl.envs.upstream import build_dataset, known_tasks, quiet

known_tasks()  # imports all datasets, and what they import

_BUILT: dict[str, Any] = {}
"""Datasets by name and parameters."""


def score_alone(completion: str, dataset: str, params: str, entry: str) -> float:
    """Score an answer with a dataset's scorer; parameters and row are Python literals."""
    key = f"{dataset} {params}"
    if key not in _BUILT:
        _BUILT[key] = build_dataset(dataset, ast.literal_eval(params), seed=0, size=1)
    with quiet():
        return float(_BUILT[key].score_answer(completion, ast.literal_eval(entry)))


def draw_alone(completion: str, dataset: str, params: str) -> float:
    """Return 1.0 if a dataset makes its first problems or refuses to; 0.0 if they do not fit into memory."""
    values = ast.literal_eval(params)  # raises for infinity: then no problem is made
    try:
        with quiet():
            problems = build_dataset(dataset, values, seed=0, size=2)
            for index in range(2):
                problems[index]
    except MemoryError:
        return 0.0
    except Exception:  # the training process reports any other error
        return 1.0
    return 1.0
