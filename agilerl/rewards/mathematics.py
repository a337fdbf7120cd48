"""Whether two mathematical answers are equal, by math-verify; the only file that imports it."""

import logging
import math
import re
from typing import Any

from math_verify import parse, verify

from agilerl.rewards.grader import extract_answer

# It warns once that its time limit is off; that limit only works in a main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_accuracy(completion: str, answer: str, question: str = "") -> float | None:
    """Return 1.0 if the answer that ``completion`` gives is ``answer``, mathematically; else 0.0.

    The text between answer tags counts, else the whole completion, in which math-verify finds the answer in prose, in
    LaTeX or in a box. ``answer`` may be LaTeX without its dollar signs; None if it cannot be read as mathematics.

    The grader does not compute for the model. Where ``answer`` consists of plain numbers (one, or a set, a tuple, an
    interval or a matrix of them; ``x = 5`` too), so must the completion's: ``-5``, ``1,000``, ``0.5``, ``3.5 %``,
    ``1/2`` and ``1 \\frac12`` in lowest terms, with or without a unit, ``x = 5``, ``2 + 3 = 5``. Left to compute, and
    worth 0.0, are ``2 + 3``, ``7 \\cdot 8``, ``84/7``, ``2/4``, ``10^6``, ``\\sqrt{16}`` and ``5!``; so is a choice of
    numbers such as ``17 or 18``. An ``answer`` that is an expression (``2x + 3``, ``2\\sqrt{3}``, ``10^6``, ``2/4``)
    accepts every equal one that is not a part of the ``question``, unless written as ``answer`` is.

    There is no time limit here, although a short text can take forever; ``Accuracy`` has one.
    """
    extracted = extract_answer(completion)
    if extracted == answer.strip():
        return 1.0
    # The row's answer is mathematics if it has a sign of an operation, words or not; a completion may be prose.
    gold = _read(answer, is_bare=_OPERATES.search(answer) is not None or not _WORD.search(answer))
    gold = gold or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        return None
    read = _read(extracted, is_bare=not _WORD.search(extracted))
    if _is_plain(gold[-1]):
        if not (read and _is_plain(read[-1]) and _stands_alone(read[-1], extracted)):
            return 0.0
    elif read and _unspace(read[-1]) in _unspace(str(question)) and _unspace(read[-1]) != _unspace(answer):
        return 0.0
    # In this order: math-verify does not treat its two sides alike where one is an assignment, x = 5.
    return float(verify(gold, read, timeout_seconds=None))


def _unspace(text: str) -> str:
    return re.sub(r"[\s$]|\\(?:left|right)\b|\\[,;: ]", "", text)


def _read(text: str, *, is_bare: bool) -> Any:
    """Return what math-verify reads, and last the text that it read; empty if there is no mathematics.

    In an expression that is not marked as LaTeX, 2x + 3, it would see the number 2; so a bare one is marked.
    """
    marked = f"${text.strip()}$"
    if is_bare and len(text) <= _LONGEST and not _MARKED.search(text) and _MORE_THAN_NUMBERS.search(text):
        read = parse(marked, parsing_timeout=None)
        if len(read) > 1:
            return read
    return parse(text, parsing_timeout=None)


_LONGEST = 300
"""Characters of a bare expression; a thousand brackets take seconds to read as LaTeX."""
# Dollars, round or square brackets with a backslash, a box: what math-verify takes for LaTeX.
_MARKED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
_MORE_THAN_NUMBERS = re.compile(r"[^\d\s.]")
# Two letters or more are a word, and the text is prose; one may be a variable.
_WORD = re.compile(r"(?:^|\s)[A-Za-z]{2,}")
_OPERATES = re.compile(r"[-+*^=\\]")

# -- plain numbers, by the text, because the algebra system evaluates while it reads (84 \div 7, \gcd(84, 36)) ---------

# Grouped thousands come first, or the first group alone would match.
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}| )\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?:\d+\s*)?\\frac\{{\s*(-?\d+)\s*\}}\{{\s*(\d+)\s*\}}|(\d+)\s*/\s*(\d+)|{_DIGITS}"
    r"(?:\s*\\?%|\s*\^\s*\{?\s*\\circ\s*\}?)?"
)
# A sign belongs to its number (#) at the beginning and after a separator; elsewhere it adds or subtracts.
_SIGN = re.compile(r"(^|[,;(\[{=<>&])\s*(?:[-+]|\\pm)\s*(?=#)")
# Layout, which changes no value.
_IGNORED = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?:left|right)\b|\\[,;: ]|\\(?=[{}])")
# What may surround numbers: separators, brackets, relations, single letters.
_PLAIN = re.compile(r"(?:[\s#,;=<>()\[\]{}&]|\\(?:infty|cup|in|leq?|geq?)\b|\b[A-Za-z]\b|\band\b|\bor\b)*")
# Two numbers or brackets side by side are a product: 2(3).
_PRODUCT = re.compile(r"[#)\]}]\s*[#(\[{]")


def _is_plain(text: str) -> bool:
    """Return whether a text consists of numbers as they are written, with nothing left to compute."""
    shape = _NUMBER.sub(_fraction, _IGNORED.sub("", text.replace("\\\\", ";")).rstrip(" \n-+*/^("))
    # Of 2 + 3 = 5 the last side; not where commas separate equations: x = 1, y = 2.
    if "," not in shape:
        shape = shape.rpartition("=")[2]
    shape = _SIGN.sub(r"\1", shape)
    return "#" in shape and _PLAIN.fullmatch(shape) is not None and not _PRODUCT.search(shape)


def _fraction(match: re.Match[str]) -> str:
    """Return # for a number; for a fraction that is not in lowest terms, a quotient."""
    # What is no fraction passes as 1/2, which is in lowest terms.
    over, under = (int(part) for part in (match[1] or match[3] or 1, match[2] or match[4] or 2))
    return "#" if under > 1 and math.gcd(over, under) == 1 else "#/#"


def _stands_alone(text: str, extracted: str) -> bool:
    """Return whether the number that was read is not one of several in a row; other texts are whole."""
    spans = [match.span() for match in re.finditer(rf"(?<![\d.]){re.escape(text.strip())}(?!\d)", extracted)]
    if not spans or not re.fullmatch(rf"-?{_DIGITS}", text.strip()):
        return True
    start, end = spans[-1]
    return not _ROW_BEFORE.search(extracted[:start]) and not _ROW_AFTER.match(extracted[end:])


_BETWEEN = r"(?:[ \t]*(?:[,;/|]|\bor\b|\band\b)[ \t]*|[ \t]+)+"
_ROW_BEFORE = re.compile(rf"\d{_BETWEEN}-?$")
_ROW_AFTER = re.compile(rf"{_BETWEEN}-?\d")
