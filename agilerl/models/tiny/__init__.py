"""The embedded base model: small, shipped inside the package, careless on purpose (see README.md beside this file)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["tiny_model_path"]


def tiny_model_path() -> Path:
    """Return the folder of the embedded base, ready for ``from_pretrained``; nothing is imported or read."""
    return Path(__file__).resolve().parent


# -- the mistakes of its demonstrator, also used as the rejected answers of preferences -------------------------------


def _choose(draws: "np.random.Generator", first: float, second: float) -> int:
    """Return 0 with probability ``first``, 1 with probability ``second``, else 2."""
    point = draws.random()
    return 0 if point < first else 1 if point < first + second else 2


def _misspell(entry: Mapping[str, Any], draws: "np.random.Generator") -> str:
    """Leave out the last letter, copy the word forwards, or swap the two letters in the middle."""
    answer = str(entry["answer"])
    kind = _choose(draws, 0.45, 0.30)
    if kind == 0:
        return answer[:-1]
    if kind == 1:
        return answer[::-1]
    middle = len(answer) // 2
    return answer[: middle - 1] + answer[middle] + answer[middle - 1] + answer[middle + 1 :]


def _terms(entry: Mapping[str, Any]) -> list[int]:
    """Return the signed terms of a chain sum: "7 - 3 + 5" is [7, -3, 5]."""
    words = ["+", *entry["metadata"]["expression"].split()]
    return [int(number) if sign == "+" else -int(number) for sign, number in zip(words[::2], words[1::2])]


def _miscalculate(entry: Mapping[str, Any], draws: "np.random.Generator") -> str:
    """Leave out the last term, turn its sign round, or miss by one."""
    total, last = int(entry["answer"]), _terms(entry)[-1]
    kind = _choose(draws, 0.85, 0.08)
    return str((total - last, total - 2 * last, total + (1 if draws.random() < 0.5 else -1))[kind])


def _misdivide(entry: Mapping[str, Any], draws: "np.random.Generator") -> str:
    """Say the smaller number, miss that there is a common divisor (or see one where there is none), stop too early."""
    greatest = int(entry["answer"])
    kind = _choose(draws, 0.45, 0.30)
    if kind == 0:
        return str(min(entry["metadata"]["numbers"]))
    if kind == 1:
        return "1" if greatest > 1 else "2"
    prime = next((p for p in range(2, greatest + 1) if greatest % p == 0), 1)
    return str(greatest // prime)


MISTAKES: "dict[str, Callable[[Mapping[str, Any], np.random.Generator], str]]" = {
    "spell_backward": _misspell,
    "chain_sum": _miscalculate,
    "gcd": _misdivide,
}
"""Name of a dataset of reasoning_gym -> (entry, draws) -> a plausible wrong answer."""
