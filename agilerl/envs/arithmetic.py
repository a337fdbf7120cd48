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


class _Dataset:
    def __init__(self, config: Any) -> None:
        self.config, self.seed, self.size = config, config.seed, config.size

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1 for the right answer, its share of the text if the text has more than it, else 0."""
        right: str = entry["answer"]
        if not answer or right not in answer:
            return 0.0
        return len(right) / len(answer)


@dataclass
class GCDConfig:
    """How many numbers, and from which range."""

    min_numbers: int = 2
    max_numbers: int = 2
    min_value: int = 1
    max_value: int = 1000
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise ValueError for ranges that are empty or too low."""
        _check(self.min_numbers >= 2, "min_numbers must be at least 2")
        _check(self.max_numbers >= self.min_numbers, "max_numbers must be >= min_numbers")
        _check(self.min_value >= 1, "min_value must be positive")
        _check(self.max_value > self.min_value, "max_value must be > min_value")


class GCD(_Dataset):
    """Greatest common divisors; numbers without one above 1 are drawn again, twice at most."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        # As in reasoning_gym, where each index has its own generator.
        c, rng = self.config, Random(self.seed + index)
        for _ in range(3):
            count = rng.randint(c.min_numbers, c.max_numbers)
            numbers = [rng.randint(c.min_value, c.max_value) for _ in range(count)]
            divisor = math.gcd(*numbers)
            if divisor > 1:
                break
        listed = ", ".join(map(str, numbers))
        return {
            "question": f"Find the Greatest Common Divisor (GCD) of these numbers: {listed}. "
            "Give only the GCD as your final answer.",
            "answer": str(divisor),
            "metadata": {
                "source_dataset": "gcd",
                "source_index": index,
                "numbers": numbers,
                "result": divisor,
                "num_terms": len(numbers),
                "difficulty": {"num_terms": (c.min_numbers, c.max_numbers), "value": (c.min_value, c.max_value)},
            },
        }


@dataclass
class ChainSumConfig:
    """How many terms, and of how many digits."""

    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    allow_negation: bool = False
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise ValueError for ranges that are empty or too low."""
        _check(self.min_terms > 0, "min_terms must be positive")
        _check(self.max_terms >= self.min_terms, "max_terms must be >= min_terms")
        _check(self.min_digits > 0, "min_digits must be positive")
        _check(self.max_digits >= self.min_digits, "max_digits must be >= min_digits")


class ChainSum(_Dataset):
    """Sums and differences."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        c, rng = self.config, Random(self.seed + index)
        count = rng.randint(c.min_terms, c.max_terms)
        digits = rng.randint(c.min_digits, c.max_digits)
        highest = 10**digits - 1
        # A single digit may be 0; several begin with another one.
        lowest = -highest if c.allow_negation else 0 if digits == 1 else 10 ** (digits - 1)
        terms = [rng.randint(lowest, highest) for _ in range(count)]
        signs = [rng.choice(["+", "-"]) for _ in range(count - 1)]
        expression = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
        total = terms[0] + sum(term if sign == "+" else -term for sign, term in zip(signs, terms[1:], strict=True))
        return {
            "question": f"State the final answer to the following arithmetic problem: {expression} =",
            "answer": str(total),
            "metadata": {
                "source_dataset": "chain_sum",
                "source_index": index,
                "num_terms": count,
                "num_digits": digits,
                "expression": expression,
                "difficulty": {"num_terms": (c.min_terms, c.max_terms), "num_digits": (c.min_digits, c.max_digits)},
            },
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Score as other datasets, without commas; an equal number in other words, such as +01.0, is right too."""
        plain = (answer or "").replace(",", "")
        try:
            if Decimal(plain) == Decimal(entry["answer"]):
                return 1.0
        except InvalidOperation:
            pass
        return super().score_answer(plain, entry)


DATASETS: dict[str, tuple[type, type]] = {"gcd": (GCD, GCDConfig), "chain_sum": (ChainSum, ChainSumConfig)}
"""The class of a dataset and that of its parameters, by name."""


def create_dataset(name: str, **params: Any) -> _Dataset:
    """Return a dataset with parameters; raises ValueError for values that it refuses."""
    dataset, parameters = DATASETS[name]
    config = parameters(**params)
    config.validate()
    return dataset(config)  # type: ignore[no-any-return]


def _check(fits: bool, rule: str) -> None:
    if not fits:
        raise ValueError(rule)
