"""Whether two mathematical answers are equal, by math-verify; the only file that imports it."""

import logging

from math_verify import parse, verify

from agilerl.rewards.grader import extract_answer

# It warns once that its time limit is off; that limit only works in a main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_accuracy(completion: str, answer: str) -> float | None:
    """Return 1.0 if the answer that ``completion`` gives is ``answer``, mathematically; else 0.0.

    The text between answer tags counts, else the whole completion, in which math-verify finds the answer in prose, in
    LaTeX or in a box. ``answer`` may be LaTeX without its dollar signs; None if it cannot be read as mathematics. There
    is no time limit here, although a short text can take forever; ``Accuracy`` has one.
    """
    given = extract_answer(completion)
    if given == answer.strip():
        return 1.0
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        return None
    return float(verify(gold, parse(given, parsing_timeout=None), timeout_seconds=None))
