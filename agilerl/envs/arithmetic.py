"""Two datasets of reasoning_gym that need nothing of it: those of the main job and of the README's manifest.

Where reasoning_gym is not installed, these take its place (``agilerl.envs.upstream``): a machine without a C compiler
cannot install one of its requirements. Questions, answers, metadata and scores are the same to the bit, which a test
compares; so the order of the draws below is not free.
"""

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from random import Random
from typing import Any


def _share(answer: str | None, right: str) -> float:
    """Return 1 for the right answer, its share of the text if the text has more than it, else 0."""
    return len(right) / len(answer) if answer and right in answer else 0.0


@dataclass
class GCD:
    """Greatest common divisors; numbers without one above 1 are drawn again, twice at most."""

    min_numbers: int = 2
    max_numbers: int = 2
    min_value: int = 1
    max_value: int = 1000
    seed: int | None = None
    size: int = 500

    def __post_init__(self) -> None:
        """Raise ValueError for ranges that are empty or too low."""
        _check(self.min_numbers >= 2, "min_numbers must be at least 2")
        _check(self.max_numbers >= self.min_numbers, "max_numbers must be >= min_numbers")
        _check(self.min_value >= 1, "min_value must be positive")
        _check(self.max_value > self.min_value, "max_value must be > min_value")

    def __getitem__(self, index: int) -> dict[str, Any]:
        # As in reasoning_gym, where each index has its own generator.
        rng = Random((self.seed or 0) + index)
        for _ in range(3):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(self.min_value, self.max_value) for _ in range(count)]
            divisor = math.gcd(*numbers)
            if divisor > 1:
                break
        ranges = {"num_terms": (self.min_numbers, self.max_numbers), "value": (self.min_value, self.max_value)}
        return {
            "question": f"Find the Greatest Common Divisor (GCD) of these numbers: {', '.join(map(str, numbers))}. "
            "Give only the GCD as your final answer.",
            "answer": str(divisor),
            "metadata": {
                "source_dataset": "gcd",
                "source_index": index,
                "numbers": numbers,
                "result": divisor,
                "num_terms": count,
                "difficulty": ranges,
            },
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return the score of an answer, from 0 to 1."""
        return _share(answer, entry["answer"])


@dataclass
class ChainSum:
    """Sums and differences."""

    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    allow_negation: bool = False
    seed: int | None = None
    size: int = 500

    def __post_init__(self) -> None:
        """Raise ValueError for ranges that are empty or too low."""
        _check(self.min_terms > 0, "min_terms must be positive")
        _check(self.max_terms >= self.min_terms, "max_terms must be >= min_terms")
        _check(self.min_digits > 0, "min_digits must be positive")
        _check(self.max_digits >= self.min_digits, "max_digits must be >= min_digits")

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = Random((self.seed or 0) + index)
        count = rng.randint(self.min_terms, self.max_terms)
        digits = rng.randint(self.min_digits, self.max_digits)
        highest = 10**digits - 1
        # A single digit may be 0; several begin with another one.
        lowest = -highest if self.allow_negation else 0 if digits == 1 else 10 ** (digits - 1)
        terms = [rng.randint(lowest, highest) for _ in range(count)]
        expression, total = str(terms[0]), terms[0]
        for term in terms[1:]:
            sign = rng.choice(["+", "-"])
            expression += f" {sign} {term}"
            total += term if sign == "+" else -term
        ranges = {"num_terms": (self.min_terms, self.max_terms), "num_digits": (self.min_digits, self.max_digits)}
        return {
            "question": f"State the final answer to the following arithmetic problem: {expression} =",
            "answer": str(total),
            "metadata": {
                "source_dataset": "chain_sum",
                "source_index": index,
                "num_terms": count,
                "num_digits": digits,
                "expression": expression,
                "difficulty": ranges,
            },
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Score without commas; an equal number in other words, such as +01.0, is right too."""
        plain = (answer or "").replace(",", "")
        try:
            if Decimal(plain) == Decimal(entry["answer"]):
                return 1.0
        except InvalidOperation:
            pass
        return _share(plain, entry["answer"])


DATASETS: dict[str, tuple[type, type]] = {"gcd": (GCD, GCD), "chain_sum": (ChainSum, ChainSum)}
"""The class of a dataset and that whose fields are its parameters, by name, as in reasoning_gym's registry."""


def create_dataset(name: str, **params: Any) -> Any:
    """Return a dataset with parameters; raises ValueError for values that it refuses."""
    return DATASETS[name][0](**params)


def _check(fits: bool, rule: str) -> None:
    if not fits:
        raise ValueError(rule)
