"""What runs in the scorers' process; imported before the process loses access to files."""

from typing import Any

from agilerl.envs.upstream import build_dataset, known_tasks, quiet

known_tasks()  # imports all datasets, and what they import

_BUILT: dict[str, Any] = {}
"""Datasets by name and parameters."""


def score_alone(completion: str, dataset: str, params: Any, entry: Any) -> float:
    """Score an answer with a dataset's scorer; parameters and row are encoded."""
    key = f"{dataset} {params!r}"
    if key not in _BUILT:
        _BUILT[key] = build_dataset(dataset, decoded(params), seed=0, size=1)
    with quiet():
        return float(_BUILT[key].score_answer(completion, decoded(entry)))


def draw_alone(completion: str, dataset: str, params: Any) -> float:
    """Return 1.0 if a dataset makes its first problems or refuses to; 0.0 if they do not fit into memory."""
    try:
        with quiet():
            problems = build_dataset(dataset, decoded(params), seed=0, size=2)
            for index in range(2):
                problems[index]
    except MemoryError:
        return 0.0
    except Exception:  # the training process reports any other error
        return 1.0
    return 1.0


def decoded(value: Any) -> Any:
    """Decode what ``agilerl.envs.scorers`` encoded."""
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {decoded(key): decoded(part) for key, part in parts}
    container = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return container(decoded(part) for part in parts)
