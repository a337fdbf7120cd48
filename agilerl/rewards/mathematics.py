"""Whether two mathematical answers are the same, by math-verify; the one file that imports it."""

import logging

from math_verify import parse, verify

from agilerl.rewards.functions import extract_answer

# It warns once that we have switched its own time limit off, which works in a main thread only.
logging.getLogger("math_verify").setLevel(logging.ERROR)

__all__ = ["math_accuracy"]


def math_accuracy(completion: str, answer: str) -> float | None:
    """Return 1.0 if the answer that ``completion`` gives is ``answer``, mathematically; else 0.0.

    What stands between answer tags counts, else the whole completion, where math-verify finds the answer in prose, in
    LaTeX or in a box. ``answer`` may be LaTeX without its dollars; None where it cannot be read as mathematics. Nothing
    here limits the time, which a short text can make endless: ``Accuracy`` does.
    """
    given = extract_answer(completion)
    if given == answer.strip():
        return 1.0
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        return None
    return float(verify(gold, parse(given, parsing_timeout=None), timeout_seconds=None))
