"""Keep completions from being run as programs: a second barrier in front of the unprivileged process.

Nine reasoning_gym scorers pass the model's answer to ``eval``, directly or through ``sympy.parse_expr``, which rewrites
it first (``lambda``, factorials, repeated decimals), gives it Python's builtins, and evaluates nested strings again:
``__import__('os').system(...)`` would run, and ``9**9**9**9`` would never end. So an answer is first parsed to a
syntax tree, and only the constructs of a correct answer are let through.
"""

import ast
import re
import warnings

PYTHON_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

UNREADABLE = "?"
"""An answer that no scorer can read."""

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
NOT_ALGEBRA = re.compile(r"[\[{!\\:]|[\d.][eE][+-]?\d")
"""Brackets, factorials and other sympy syntax, line continuations, and numbers such as 1e999999999."""


def readable(task: str, answer: str) -> bool | None:
    """Return whether the scorer of reasoning_gym's ``task`` can read ``answer``; None if it must not try.

    False is for what is not a Python expression, although parse_expr might make one of it; it is scored as
    ``UNREADABLE`` is.
    """
    if is_harmless(task, answer):
        return True
    if task in ARITHMETIC | ALGEBRA and len(answer) <= LONGEST:
        try:
            return None if any(_trees(answer)) else False
        except (MemoryError, RecursionError):
            return None
    return None


def is_harmless(task: str, answer: str) -> bool:
    """Return whether ``answer`` may be passed to the scorer of reasoning_gym's ``task``."""
    if task in PYTHON_LISTS:
        return _consists_of(answer, LITERALS, (str, int, float))
    if task in ARITHMETIC:
        return NOT_ARITHMETIC.search(answer) is None and _consists_of(answer, SUMS, (int, float))
    if task in ALGEBRA:
        return NOT_ALGEBRA.search(answer) is None and _consists_of(answer, FORMULAS, (int, float))
    if task == "coin_flip":
        return re.search(r"[eE]", answer) is None  # it builds a Fraction: "1e999999999" has a billion digits
    return True


def _trees(answer: str) -> list[ast.Expression]:
    """Parse an answer as Python, both unchanged and stripped; empty if it does not parse."""
    trees = []
    for text in dict.fromkeys((answer, answer.lstrip(), answer.strip())):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns about odd literals such as 0or 1
                trees.append(ast.parse(text, mode="eval"))
        except (SyntaxError, ValueError):
            continue
    return trees


def _consists_of(answer: str, allowed: tuple[type[ast.AST], ...], values: tuple[type, ...]) -> bool:
    """Return whether ``answer`` consists only of these nodes, with constants of these types.

    ``eval`` does not run what does not parse, and the scorer may compare it as text; but ``parse_expr`` may run it
    after rewriting it.
    """
    if len(answer) > LONGEST:
        return False
    try:
        trees = _trees(answer)
    except (MemoryError, RecursionError):
        return False
    if not trees:
        return allowed is LITERALS
    return all(isinstance(node, allowed) and _is_small(node, values) for tree in trees for node in ast.walk(tree))


def _is_small(node: ast.AST, values: tuple[type, ...]) -> bool:
    """Refuse calls of non-mathematical functions, constants of other types, and huge powers.

    Strings in a formula are never right, and sympy evaluates them: ``sin('exit()')``.
    """
    if isinstance(node, ast.Constant):
        return isinstance(node.value, values) and not isinstance(node.value, bool)
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
