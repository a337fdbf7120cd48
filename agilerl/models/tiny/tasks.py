"""The tasks of the embedded base: their ranges, and the mistakes its careless demonstrator makes in each."""

import numpy as np

from agilerl.models.tiny.demonstrator import Entry, Task

__all__ = ["TASKS"]


def _choose(draws: np.random.Generator, first: float, second: float) -> int:
    """Return 0 with probability ``first``, 1 with probability ``second``, else 2."""
    point = draws.random()
    return 0 if point < first else 1 if point < first + second else 2


def _spelling_is_known(entry: Entry) -> float:
    return 0.7 if len(entry["answer"]) <= 4 else 0.12


def _misspell(entry: Entry, draws: np.random.Generator) -> str:
    """Leave out the last letter, copy the word forwards, or swap the two letters in the middle."""
    answer = str(entry["answer"])
    kind = _choose(draws, 0.45, 0.30)
    if kind == 0:
        return answer[:-1]
    if kind == 1:
        return answer[::-1]
    middle = len(answer) // 2
    return answer[: middle - 1] + answer[middle] + answer[middle - 1] + answer[middle + 1 :]


def _terms(entry: Entry) -> list[int]:
    """Return the signed terms of a chain sum: "7 - 3 + 5" is [7, -3, 5]."""
    words = ["+", *entry["metadata"]["expression"].split()]
    return [int(number) if sign == "+" else -int(number) for sign, number in zip(words[::2], words[1::2])]


def _sum_is_known(entry: Entry) -> float:
    return 0.85 if 0 <= int(entry["answer"]) <= 7 else 0.4


def _miscalculate(entry: Entry, draws: np.random.Generator) -> str:
    """Leave out the last term, turn its sign round, or miss by one."""
    total, last = int(entry["answer"]), _terms(entry)[-1]
    kind = _choose(draws, 0.85, 0.08)
    return str((total - last, total - 2 * last, total + (1 if draws.random() < 0.5 else -1))[kind])


def _sum_is_kept(entry: Entry) -> float:
    return 0.5 if 0 <= int(entry["answer"]) <= 7 else 1.0


def _divisor_is_known(entry: Entry) -> float:
    return 0.75 if min(entry["metadata"]["numbers"]) <= 16 else 0.25


def _misdivide(entry: Entry, draws: np.random.Generator) -> str:
    """Say the smaller number, miss that there is a common divisor (or see one where there is none), stop too early."""
    greatest = int(entry["answer"])
    kind = _choose(draws, 0.45, 0.30)
    if kind == 0:
        return str(min(entry["metadata"]["numbers"]))
    if kind == 1:
        return "1" if greatest > 1 else "2"
    prime = next((p for p in range(2, greatest + 1) if greatest % p == 0), 1)
    return str(greatest // prime)


def _divisor_is_kept(entry: Entry) -> float:
    return 0.4 if int(entry["answer"]) <= 2 else 1.0


TASKS = (
    Task("spell_backward", {"min_word_len": 3, "max_word_len": 6}, _spelling_is_known, _misspell),
    Task(
        "chain_sum",
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        _sum_is_known,
        _miscalculate,
        _sum_is_kept,
        weight=2.0,
    ),
    Task("gcd", {"min_value": 1, "max_value": 60}, _divisor_is_known, _misdivide, _divisor_is_kept, weight=1.5),
)
