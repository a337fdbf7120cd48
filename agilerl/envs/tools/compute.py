"""Tools that compute: a calculator that reads arithmetic and nothing else, and Python in a sandbox."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from agilerl.arguments import Count, Name, Positive, checked
from agilerl.envs.tools.tool import Tool
from agilerl.rewards.sandbox import run_python

MOST_CHARACTERS = 500
MOST_BITS = 4096
"""Most bits of a whole number: about 1,200 digits."""
LARGEST_FACTORIAL = 400

Number = int | float

# Numbers, names, operators, brackets. Anything else, including what Python's parser warns about, is refused here.
_SPELLING = re.compile(r"(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])|[a-z]\w*|\*\*|//|[-+*/%(),]|\s)*")
_TYPED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Work out an arithmetic expression and return the number.

    Args:
        expression: for example "(17 + 4) * 3 / 2 ** 5". It may have + - * / // % ** and brackets, the functions abs,
            ceil, cos, exp, factorial, floor, gcd, log, max, min, round, sin, sqrt and tan, and pi and e.
    """
    try:
        return _shown(_value(_parsed(expression)))
    except ZeroDivisionError:
        raise ArithmeticError("division by zero") from None
    except OverflowError:
        raise ArithmeticError("the result is too large") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None


def _parsed(expression: str) -> ast.expr:
    text = expression.strip().lower().translate(_TYPED)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters, at most {MOST_CHARACTERS} are read")
    read = _SPELLING.match(text)
    place = read.end() if read else 0
    if place < len(text):
        raise ValueError(f"expected arithmetic, found {text[place : place + 20]!r}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"expected arithmetic, found {text[:80]!r}") from None


def _value(node: ast.expr) -> Number:
    """Evaluate one node; refuse anything but arithmetic on numbers."""
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            return _within(value)
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(operation, operand) if type(operation) in UNARY:
            return _within(UNARY[type(operation)](_value(operand)))
        case ast.BinOp(left, operation, right) if type(operation) in BINARY:
            return _within(BINARY[type(operation)](_value(left), _value(right)))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            return _called(name, [_value(argument) for argument in arguments])
        case ast.Name(name) | ast.Call(ast.Name(name)):
            raise ValueError(f"unknown name {name!r}; known: {', '.join([*FUNCTIONS, *CONSTANTS])}")
    raise ValueError(f"expected arithmetic, found {ast.unparse(node)[:80]!r}")


def _called(name: str, arguments: list[Number]) -> Number:
    try:
        return _within(FUNCTIONS[name](*arguments))
    except TypeError:
        raise ValueError(f"{name} does not take {', '.join(map(_shown, arguments)) or 'nothing'}") from None


def _within(value: Any) -> Number:
    if isinstance(value, complex):
        raise ArithmeticError("the result is no real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError
    return value  # type: ignore[no-any-return]


def _power(base: Number, exponent: Number) -> Number:
    """Refuse a huge power before it is computed: 9**9**9 has 370 million digits."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent * (abs(int(base)).bit_length() - 1) > MOST_BITS:
        raise OverflowError
    power: Number = base**exponent
    return power


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= LARGEST_FACTORIAL:
        raise ValueError(f"factorial takes a whole number from 0 to {LARGEST_FACTORIAL}, found {_shown(number)}")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 30:
        raise ValueError(f"round takes a whole number of digits up to 30, found {_shown(digits)}")
    return round(number, digits)


def _shown(value: Number) -> str:
    """Whole numbers exactly, others to 12 significant digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "max": max,
    "min": min,
    "round": _round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}


# -- Python: every program runs in a separate sandbox -----------------------------------------------------------------


STARTING = 5.0
"""Seconds beyond the program's own timeout, for starting and cleaning up."""


class PythonTool(Tool):
    """The tool ``python(code)``: runs a program and returns what it printed, errors included.

    Nothing is kept from one call to the next. See :func:`agilerl.rewards.sandbox.run_python` for what a program can
    and cannot do.
    """

    @checked
    def __init__(self, *, name: Name = "python", timeout: Positive = 5.0, memory_bytes: Count = 512 * 2**20) -> None:
        """Set the limits of a program.

        Args:
            name: the tool's name for the model.
            timeout: seconds of wall time for a program, more than 0.
            memory_bytes: its address space.
        """
        self.program_timeout, self.memory_bytes = timeout, memory_bytes
        super().__init__(self.run, name=name, timeout=timeout + STARTING)

    def run(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between programs.

        Args:
            code: the program; print what you want to know.
        """
        done = run_python(code, timeout=self.program_timeout, memory_bytes=self.memory_bytes)
        parts = [done.stdout.rstrip(), done.stderr.rstrip()]
        if done.timed_out:
            parts.append(f"(stopped after {self.program_timeout:g} seconds)")
        elif not done.ok and not parts[1]:
            parts.append(f"(ended with status {done.returncode})")
        return "\n".join(filter(None, parts)) or "(nothing was printed)"
