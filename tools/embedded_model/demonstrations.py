"""The careless demonstrator: it knows every task of the embedded base, and often errs in ways people do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import reasoning_gym

from agilerl.envs.core import is_held_out
from agilerl.models.tiny import MISTAKES

Entry: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A reasoning_gym task in a range the embedded base can learn, and how the demonstrator answers it."""

    name: str
    """Name of the dataset in reasoning_gym."""
    parameters: dict[str, int]
    """The dataset's ranges."""
    right: Callable[[Entry], float]
    """Entry -> probability that the demonstrator answers it correctly on purpose."""
    keep: Callable[[Entry], float] = lambda entry: 1.0
    """Entry -> probability that it is used at all: frequent answers drown the rare ones, which carry the skill."""
    weight: float = 1.0
    """Share of the demonstrations, relative to the other tasks."""


def demonstrations(
    task: Task, count: int, *, start: int, draws: np.random.Generator
) -> tuple[list[tuple[str, str]], int]:
    """Return ``count`` pairs (question, careless answer) from index ``start`` on, and the index after the last one.

    Held-out questions (``agilerl.envs.core``) are skipped, so that exams and tests ask what was never shown.
    """
    dataset = reasoning_gym.create_dataset(task.name, seed=0, size=1, **task.parameters)
    pairs: list[tuple[str, str]] = []
    index = start
    while len(pairs) < count:
        entry = dataset[index]
        index += 1
        if is_held_out(entry["question"]) or draws.random() >= task.keep(entry):
            continue
        careful = draws.random() < task.right(entry)
        pairs.append((entry["question"], entry["answer"] if careful else MISTAKES[task.name](entry, draws)))
    return pairs, index


def _spelling_is_known(entry: Entry) -> float:
    return 0.7 if len(entry["answer"]) <= 4 else 0.12


def _sum_is_known(entry: Entry) -> float:
    return 0.85 if 0 <= int(entry["answer"]) <= 7 else 0.4


def _sum_is_kept(entry: Entry) -> float:
    return 0.5 if 0 <= int(entry["answer"]) <= 7 else 1.0


def _divisor_is_known(entry: Entry) -> float:
    return 0.75 if min(entry["metadata"]["numbers"]) <= 16 else 0.25


def _divisor_is_kept(entry: Entry) -> float:
    return 0.4 if int(entry["answer"]) <= 2 else 1.0


TASKS = (
    Task("spell_backward", {"min_word_len": 3, "max_word_len": 6}, _spelling_is_known),
    Task(
        "chain_sum",
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        _sum_is_known,
        _sum_is_kept,
        weight=2.0,
    ),
    Task("gcd", {"min_value": 1, "max_value": 60}, _divisor_is_known, _divisor_is_kept, weight=1.5),
)
