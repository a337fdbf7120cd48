"""Keep completions from being run as programs.

Nine reasoning_gym scorers pass the model's answer to ``eval``, directly or through ``sympy.parse_expr`` (whose names
include Python's builtins): ``__import__('os').system(...)`` would run, and ``9**9**9**9`` would never end. An answer is
read as a syntax tree first, and only what a right answer can consist of is let through.
"""

import ast
import re
import warnings

__all__ = ["is_harmless"]

PYTHON_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

LITERALS = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
SUMS = (ast.Expression, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)
FORMULAS = (*SUMS, ast.Pow, ast.Name, ast.Load, ast.Call)
FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh "  # noqa: SIM905
    "exp log ln sqrt Abs abs sign erf Rational Integer".split()
)
LONGEST = 4000
LARGEST_EXPONENT = 64
NOT_ARITHMETIC = re.compile(r"[\[{!eE]")
NOT_ALGEBRA = re.compile(r"[\[{!]|[\d.][eE][+-]?\d")
"""Brackets, factorials (sympy's syntax, not Python's) and numbers such as 1e999999999."""


def is_harmless(task: str, answer: str) -> bool:
    """Say whether ``answer`` may be handed to the scorer of reasoning_gym's dataset ``task``."""
    if task in PYTHON_LISTS:
        return _consists_of(answer, LITERALS)
    if task in ARITHMETIC:
        return NOT_ARITHMETIC.search(answer) is None and _consists_of(answer, SUMS)
    if task in ALGEBRA:
        return NOT_ALGEBRA.search(answer) is None and _consists_of(answer, FORMULAS)
    if task == "coin_flip":
        return re.search(r"[eE]", answer) is None  # it builds a Fraction: "1e999999999" has a billion digits
    return True


def _consists_of(answer: str, allowed: tuple[type[ast.AST], ...]) -> bool:
    if len(answer) > LONGEST:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about odd literals such as 0or 1
            tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True  # what does not parse cannot run either; the scorer gives its own verdict
    except (MemoryError, RecursionError):
        return False
    return all(isinstance(node, allowed) and _is_small(node) for node in ast.walk(tree))


def _is_small(node: ast.AST) -> bool:
    """Refuse calls of anything but mathematical functions, texts that are multiplied, and powers that explode."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if not isinstance(node, ast.BinOp):
        return True
    if isinstance(node.op, ast.Pow):
        base, exponent = list(ast.walk(node.left)), list(ast.walk(node.right))
        numeric = not any(isinstance(n, ast.Name) for n in base)
        nested = any(isinstance(n, ast.Pow) for n in (*exponent, *(base if numeric else ())))
        constants = [n.value for n in exponent if isinstance(n, ast.Constant)]
        small = all(isinstance(c, int | float) and abs(c) <= LARGEST_EXPONENT for c in constants)
        return small and len(constants) <= 2 and not nested
    return all(isinstance(n.value, int | float) for n in ast.walk(node) if isinstance(n, ast.Constant))
