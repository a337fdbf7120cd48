"""The reward of the GSM8K recipes: 1 for the right number after "####", which is how the dataset marks its answers."""

import re

MARKED = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def marked_number(text: str) -> float | None:
    """Return the last number that follows "####", without separators of thousands; None if there is none."""
    found = MARKED.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def right(completion: str, answer: str) -> float:
    """Return 1.0 if a completion marks the number that the dataset's solution marks, else 0.0."""
    return float(marked_number(completion) is not None and marked_number(completion) == marked_number(answer))
