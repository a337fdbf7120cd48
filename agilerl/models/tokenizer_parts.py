"""Checks of the parts of tokenizer.json that can be abused: regular expressions and replacements."""

import json
from collections.abc import Iterator
from typing import Any

from agilerl.errors import ConfigError

_GROWTH = 256
"""How many times longer a text may become; a space that becomes a three-byte mark is common."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_tokenizer_parts(tokenizer: Any, name: str) -> None:
    """Raise ConfigError for a tokenizer that a short text can make run for ever, or fill the memory.

    A regular expression with nested repeats tries every way to divide a text among them; six replacements of one letter
    by a hundred turn it into a million million letters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in _PARTS if backend is not None else ():
        found = getattr(backend, part, None)
        growth, values = 1.0, None if found is None else json.loads(found.__getstate__())
        for step in _steps(values):
            pattern = step.get("pattern")
            expression = pattern.get("Regex") if isinstance(pattern, dict) else None
            if isinstance(expression, str) and _repeats_repeats(expression):
                raise ConfigError(
                    f"the tokenizer of {name!r}: the regular expression {expression[:80]!r} of its {part} has nested "
                    "repeats, which can take for ever; use the tokenizer from its original source"
                )
            growth *= _growth(step, pattern)
        if growth > _GROWTH or (part == "normalizer" and _is_blown_up(found, values)):
            raise ConfigError(
                f"the tokenizer of {name!r}: its {part} can make a text more than {_GROWTH} times as long; use the "
                "tokenizer from its original source"
            )


def _steps(values: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a description, at any depth."""
    if isinstance(values, dict):
        yield values
    for inner in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _steps(inner)


def _growth(step: dict[str, Any], pattern: Any) -> float:
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")).encode())
    if step.get("type") != "Replace" or not isinstance(pattern, dict):
        return 1.0
    content, literal = len(str(step.get("content", "")).encode()), pattern.get("String")
    # An expression may match the empty string, between every two characters.
    return max(content / max(len(literal.encode()), 1), 1.0) if isinstance(literal, str) else 1.0 + content


def _is_blown_up(normalizer: Any, values: Any) -> bool:
    """Return whether a normalizer with a compiled table makes some character far longer, found by trying it."""
    if not any(step.get("type") == "Precompiled" for step in _steps(values)):
        return False
    pieces = ("".join(map(chr, range(start, start + 128))) for start in range(1, 0xD780, 128))
    return any(len(normalizer.normalize_str(piece)) > 8 * len(piece) + 1000 for piece in pieces)


def _repeats_repeats(pattern: str) -> bool:
    """Return whether a group with an unbounded repeat inside is itself repeated without bound, or refers back."""
    inside, closed, place = [False], False, 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            if pattern[place + 1 : place + 2] in tuple("123456789kg"):
                return True
            place, closed = place + 1, False
        elif character == "[":
            place, closed = _end_of_class(pattern, place), False
        elif character == "(":
            inside.append(False)
            closed = False
        elif character == ")" and len(inside) > 1:
            closed = inside.pop()
            inside[-1] = inside[-1] or closed
        elif character in "*+" or (character == "{" and _is_unbounded(pattern[place:])):
            if closed:
                return True
            inside[-1] = True
        elif character not in "?{":
            closed = False
        place += 1
    return False


def _is_unbounded(rest: str) -> bool:
    """Return whether a text begins with ``{n,}``, or ``{n,m}`` with a large m: after a group with repeats, ten is."""
    low, comma, high = rest[1:].partition("}")[0].partition(",")
    if not low.strip().isdecimal() and not high.strip().isdecimal():
        return False
    return bool(comma) and (not high.strip() or (high.strip().isdecimal() and int(high) > 10))


def _end_of_class(pattern: str, place: int) -> int:
    """Return the index of the bracket that ends a character class, nested classes skipped."""
    level = 0
    for here in range(place, len(pattern)):
        if here > place and pattern[here - 1] == "\\" and pattern[here - 2] != "\\":
            continue
        level += (pattern[here] == "[") - (pattern[here] == "]")
        if level == 0:
            return here
    return place
