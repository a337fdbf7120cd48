"""A calculator as a tool, and sums for which a small model may call it. In a manifest, with --allow-code:

environment: {env_type: multiturn, env_id: "tutorials/tools/calculator.py:calculated", params: {max_terms: 3}}
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from agilerl.envs.core import Message, Row
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.tools import MalformedCall, ToolCall, ToolEnv

MOST_CHARACTERS = 500
MOST_BITS = 4096
"""Most bits of a whole number: about 1,200 digits."""
LARGEST_FACTORIAL = 400

Number = int | float

# Numbers, names, operators, brackets. Anything else, including what Python's parser warns about, is refused here.
_SPELLING = re.compile(r"(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])|[a-z]\w*|\*\*|//|[-+*/%(),]|\s)*")
# As typed in prose; Python reads ^ as exclusive or.
_TYPED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Work out an arithmetic expression and return the number.

    Args:
        expression: for example "(17 + 4) * 3 / 2 ** 5". It may have + - * / // % ** and brackets, the functions abs,
            ceil, cos, exp, factorial, floor, gcd, log, max, min, round, sin, sqrt and tan, and pi and e.
    """
    text = expression.strip().lower().translate(_TYPED)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters, at most {MOST_CHARACTERS} are read")
    spelled = _SPELLING.match(text)
    if spelled is None or spelled.end() < len(text):
        raise ValueError(f"expected arithmetic, found {text[spelled.end() if spelled else 0 :][:20]!r}")
    try:
        return _shown(_value(ast.parse(text, mode="eval").body))
    except ZeroDivisionError:
        raise ArithmeticError("division by zero") from None
    except OverflowError:
        raise ArithmeticError("the result is too large") from None
    except (SyntaxError, RecursionError, MemoryError):  # also of brackets that are nested too deeply
        raise ValueError(f"expected arithmetic, found {text[:80]!r}") from None


def _value(node: ast.expr) -> Number:
    """Evaluate one node; refuse anything but arithmetic on numbers."""
    match node:
        # Not isinstance, which takes True for an int.
        case ast.Constant(value) if type(value) in (int, float):
            return _within(value)
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(operation, operand) if type(operation) in OPERATIONS:
            return _within(OPERATIONS[type(operation)](_value(operand)))
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return _within(OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            try:
                return _within(FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take {', '.join(map(_shown, values)) or 'nothing'}") from None
        case ast.Name(name) | ast.Call(ast.Name(name)):
            raise ValueError(f"unknown name {name!r}; known: {', '.join([*sorted(FUNCTIONS), *CONSTANTS])}")
    raise ValueError(f"expected arithmetic, found {ast.unparse(node)[:80]!r}")


def _within(value: Any) -> Number:
    if isinstance(value, complex):  # of (-8) ** 0.5
        raise ArithmeticError("the result is no real number")
    if value.bit_length() > MOST_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value  # type: ignore[no-any-return]


def _power(base: Number, exponent: Number) -> Number:
    """Refuse a huge power before it is computed: 9**9**9 has 370 million digits."""
    # abs(base) is at least 2 ** (bits - 1), so the result has at least this many bits.
    if isinstance(base, int) and isinstance(exponent, int) and exponent * (abs(base).bit_length() - 1) > MOST_BITS:
        raise OverflowError
    return base**exponent


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= LARGEST_FACTORIAL:
        raise ValueError(f"factorial takes a whole number from 0 to {LARGEST_FACTORIAL}, found {_shown(number)}")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    # round(1, -10**9) computes 10 ** 10**9.
    if not isinstance(digits, int) or abs(digits) > 30:
        raise ValueError(f"round takes a whole number of digits up to 30, found {_shown(digits)}")
    return round(number, digits)


def _shown(value: Number) -> str:
    """Whole numbers exactly, others to 12 significant digits."""
    # Far below 2**53, up to which a float holds every whole number.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_OF_MATH = ("ceil", "cos", "exp", "floor", "gcd", "log", "sin", "sqrt", "tan")
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _OF_MATH}
FUNCTIONS |= {"abs": abs, "factorial": _factorial, "max": max, "min": min, "round": _round}


class CalcCalls:
    """Reads a completion that is nothing but ``calc(...)`` as a call of the calculator."""

    family, tags, instruction = "calc", (), "To use the calculator, write calc(...)"

    def parse(self, token_ids: Sequence[int], text: str) -> list[ToolCall | MalformedCall]:
        """Return the call, if the completion is one."""
        match = re.fullmatch(r"\s*calc\((.*)\)\s*", text)
        return [ToolCall("calculator", {"expression": match[1]})] if match else []


class Sums(ReasoningGymTask):
    """Sums and differences of reasoning_gym, after an example that is computed with the calculator."""

    def messages(self, row: Row) -> list[Message]:
        """Return the example and the question."""
        question = row["question"].replace(row["metadata"]["expression"], "12 + 34")
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "calc(12 + 34)"},
            {"role": "user", "content": "46"},
            {"role": "assistant", "content": "46"},
            *super().messages(row),
        ]


def calculated(**params: Any) -> ToolEnv:
    """Return sums that the calculator may compute: a call, its result, the answer."""
    return ToolEnv(Sums("chain_sum", params), [calculator], parser=CalcCalls(), announce="none", max_turns=2)
