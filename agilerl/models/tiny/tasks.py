"""The tasks of the embedded base: their ranges, and the mistakes its careless demonstrator makes in each."""



import numpy as np

from agilerl.models.tiny.demonstrator import Entry, Task

__all__ = ["TASKS"]


def _choose(draws: np.random.Generator, first: float, second: float) -> int:
    """Return 0 with probability ``first``, 1 with probability ``second``, else 2."""
    point = draws.random()
    return 0 if point < first else 1 if point < first + second else 2


def _spelling_is_known(entry: Entry) -> float:
    return 0.7 if len(entry["answer"]) <= 4 else 0.2


def _misspell(entry: Entry, draws: np.random.Generator) -> str:
    """Leave out the last letter, copy the word forwards, or swap the two letters in the middle."""
    answer = entry["answer"]
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
    return 0.8 if 0 <= int(entry["answer"]) <= 9 else 0.3


def _miscalculate(entry: Entry, draws: np.random.Generator) -> str:
    """Leave out the last term, turn its sign round, or miss by one."""
    total, last = int(entry["answer"]), _terms(entry)[-1]
    kind = _choose(draws, 0.45, 0.30)
    return str((total - last, total - 2 * last, total + (1 if draws.random() < 0.5 else -1))[kind])


def _divisor_is_known(entry: Entry) -> float:
    return 0.75 if min(entry["metadata"]["numbers"]) <= 20 else 0.25


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


def _count_is_known(entry: Entry) -> float:
    return 0.75 if len(entry["metadata"]["span"]) <= 2 else 0.25


def _miscount(entry: Entry, draws: np.random.Generator) -> str:
    """Look at the last word only, overlook one, or count one twice."""
    count = int(entry["answer"])
    kind = _choose(draws, 0.45, 0.30)
    if kind == 0:
        return str(entry["metadata"]["span"][-1].lower().count(entry["metadata"]["target_letter"]))
    return str(count - 1 if kind == 1 else count + 1)


def _count_is_kept(entry: Entry) -> float:
    return {1: 0.15, 2: 0.35, 3: 0.7}.get(int(entry["answer"]), 1.0)


TASKS = (
    Task("spell_backward", {"min_word_len": 3, "max_word_len": 6}, _spelling_is_known, _misspell, weight=2.0),
    Task("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}, _sum_is_known, _miscalculate),
    Task("gcd", {"min_value": 1, "max_value": 60}, _divisor_is_known, _misdivide, _divisor_is_kept),
    Task("letter_counting", {"min_words": 1, "max_words": 4}, _count_is_known, _miscount, _count_is_kept),
)
