"""Keep completions from being run as programs: the second wall, in front of the process without privileges.

Nine reasoning_gym scorers pass the model's answer to ``eval``, directly or through ``sympy.parse_expr``, which rewrites
it first (``lambda``, factorials, repeated decimals), gives it Python's builtins, and evaluates texts inside it again:
``__import__('os').system(...)`` would run, and ``9**9**9**9`` would never end. An answer is read as a syntax tree
first, and only what a right answer can consist of is let through.
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
"""Brackets, factorials and more of sympy's own syntax, continued lines, and numbers such as 1e999999999."""


def readable(task: str, answer: str) -> bool | None:
    """Say whether the scorer of reasoning_gym's dataset ``task`` can read ``answer``; None where it must not try.

    False is for what is no expression of Python's, which parse_expr might all the same make one of: it is scored as
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
    """Say whether ``answer`` may be handed to the scorer of reasoning_gym's dataset ``task``."""
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
    """Return an answer as Python reads it, as it is and without white space around it; none where it reads nothing."""
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
    """Whether Python reads nothing in ``answer`` but these nodes, with constants of these types.

    What it does not read at all ``eval`` does not run, and the scorer may compare it as the text that it is; but
    ``parse_expr`` may, after rewriting it.
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
    """Refuse calls of anything but mathematical functions, constants of other types, and powers that explode.

    Texts in a formula are no right answer, and sympy evaluates them: ``sin('exit()')``.
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
