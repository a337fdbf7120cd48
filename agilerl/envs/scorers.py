"""Score answers with reasoning_gym's scorers; those that do more than compare run in an unprivileged process.

Some scorers evaluate the answer, and some take as much time or memory as the answer asks for. Only those reviewed and
found to do neither (``IN_THIS_PROCESS``) run here; all others, including those of future versions, run in a worker.
"""

import ast
import json
import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.config.environment import EnvironmentConfig
from agilerl.envs.upstream import build_dataset, known_tasks, quiet
from agilerl.errors import RewardError
from agilerl.rewards.grader import BaseGrader, Columns
from agilerl.rewards.isolated import IsolatedGrader

IN_THIS_PROCESS = frozenset(
    "ab acre advanced_geometry aiw "  # noqa: SIM905
    "arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation boxnet "
    "caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation complex_arithmetic count_bits "
    "count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery "
    "family_relationships figlet_font fraction_simplification futoshiki game_of_life game_of_life_halting gcd "
    "graph_color group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu knight_swap knights_knaves "
    "largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix "
    "maze mini_sudoku modulo_grid needle_haystack number_filtering number_format number_sequence "
    "palindrome_generation palindrome_partitioning path_star polynomial_equations power_function "
    "prime_factorization products quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges "
    "self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban "
    "spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals "
    "tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles".split()
)
"""Datasets whose scorers compare, count and convert, in roughly linear time in the answer's length."""

CPU_SECONDS = 5.0
"""Processor time for one answer; the slowest correct ones (integrals) take 0.5."""
PATIENCE = 60.0
"""Seconds for one answer on a busy machine."""
MEMORY = 2 * 2**30

_LOCKS: dict[int, "threading.RLock"] = {}
"""By process id: after a fork, a thread that held the lock does not exist to release it."""
_SHARED: weakref.WeakValueDictionary[int, IsolatedGrader] = weakref.WeakValueDictionary()
"""This process's worker, by process id; all tasks share it, and it ends with the last of them."""


class Scorers:
    """The scorers of a task, one for each level of its curriculum.

    The worker is started on demand, which takes two to five seconds, and restarted after an answer that ran out of time
    (5 s of processor time) or memory (2 GiB) or crashed it; such an answer is worth 0.0.
    """

    def __init__(self, name: str, levels: Sequence[Mapping[str, Any]], datasets: Sequence[Any]) -> None:
        """Take the name of the dataset, its parameters at each level, and the datasets that were built from them."""
        self.name, self.levels, self.datasets = name, levels, datasets
        self._worker: IsolatedGrader | None = None

    def score(self, answer: str, row: Columns, level: int) -> float:
        """Return the score of an answer at a level, from 0 to 1.

        An answer that the scorer cannot read (it raises), or that would run as a program inside it, is wrong: 0.0. One
        that it takes for right and that is not (``pays_for_nothing``) is worth what no answer is. Raises RewardError if
        the scorer cannot read even the problem's correct answer, or the worker cannot start.
        """
        if answer != row["answer"]:
            source = str(row["metadata"]["source_dataset"])
            verdict = readable(source, answer)
            if verdict is None:
                return 0.0
            # An empty answer, not 0.0: some scorers pay a little for any text, and no answer may get more than that.
            answer = "" if pays_for_nothing(source, answer, row) else answer if verdict else UNREADABLE
        try:
            return self._ask(answer, row, level)
        except Exception as error:  # a third-party scorer may raise anything
            self._blame(row, level, error)
            return 0.0

    def close(self) -> None:
        """Release the worker, which ends if no other task uses it."""
        self._worker = None

    def _ask(self, answer: str, row: Columns, level: int) -> float:
        dataset, source = self.datasets[level], str(row["metadata"]["source_dataset"])
        if self.name == "composite":
            dataset = dataset.datasets.get(source, dataset)
        if source in IN_THIS_PROCESS or not type(dataset).__module__.startswith("reasoning_gym."):
            with quiet():  # a dataset registered by the user is code that they trust
                return float(dataset.score_answer(answer, row))
        params = self.levels[level]
        if self.name == "composite":
            # Of datasets with the same name a composite keeps the last.
            params = next(spec["config"] for spec in reversed(params["datasets"]) if spec["name"] == source)
        columns = {"dataset": [source], "params": [encode(params)], "entry": [encode(row)]}
        with _LOCKS.setdefault(os.getpid(), threading.RLock()):
            (outcome,) = self._share_worker()([""], [answer], **columns)
        if isinstance(outcome, Exception):
            raise outcome
        score = float(outcome)  # type: ignore[arg-type]
        if not 0.0 <= score <= 1.0:
            raise RewardError(f"expected a score from 0 to 1 from the scorer of {source}, found {score}")
        return score

    def _share_worker(self) -> IsolatedGrader:
        """Return this process's worker; a forked process gets its own."""
        worker = _SHARED.get(os.getpid())
        if worker is None:
            worker = _SHARED[os.getpid()] = IsolatedGrader(
                "agilerl.envs.scorers:scorer",
                timeout=PATIENCE,
                memory_bytes=MEMORY,
                confined=True,
                cpu_seconds=CPU_SECONDS,
            )
        self._worker = worker  # the last task to let go of it ends it
        return worker

    def _blame(self, row: Columns, level: int, error: Exception) -> None:
        """Raise unless the problem's correct answer can be scored, i.e. unless the completion is at fault."""
        answer = UNREADABLE if row["answer"] is None else row["answer"]
        try:
            self._ask(answer, row, level)
        except Exception as again:
            if row["answer"] is None and not isinstance(again, RewardError):
                return  # this dataset has no answer to test the scorer with
            raise RewardError(
                f"the scorer of {self.name} fails on the problem's correct answer {answer!r}: {again!r}; on the "
                f"completion's it failed with {error!r}"
            ) from again


# -- what runs in the worker -------------------------------------------------------------------------------------------


class _Scorer(BaseGrader):
    """Scores an answer with a dataset's scorer; parameters and row are encoded."""

    def open(self) -> None:
        """Import all datasets, and what they import, before the process loses access to files."""
        known_tasks()
        self._datasets: dict[str, Any] = {}

    def __call__(self, completion: str, dataset: str, params: Any, entry: Any) -> float:
        key = f"{dataset} {params!r}"
        if key not in self._datasets:
            self._datasets[key] = build_dataset(dataset, _decode(params), seed=0, size=1)
        with quiet():
            return float(self._datasets[key].score_answer(completion, _decode(entry)))


scorer = _Scorer()


def encode(value: Any) -> Any:
    """Return a value as JSON that the worker can decode; JSON has no tuples, sets or other keys than text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if type(value) is kind:
            return {kind.__name__: [encode(part) for part in value]}
    raise RewardError(f"expected rows of text, numbers and containers of them, found {type(value).__name__}")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {_decode(key): _decode(part) for key, part in parts}
    container = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return container(_decode(part) for part in parts)


# -- wrong answers that reasoning_gym scores as right ------------------------------------------------------------------

NOT_A_NUMBER = re.compile(r"(?is)(?=.*(?:nan|inf))(?:[-+*\d.\s()ij]|nan|infinity|inf)+")
"""Arithmetic with nan or infinity, which comparisons such as ``min(1.0, nan)`` take for the best score."""


def pays_for_nothing(task: str, answer: str, row: Columns) -> bool:
    """Return whether ``answer`` is wrong, although the scorer of reasoning_gym's ``task`` might give it a full score.

    ``coin_flip`` gives it to any beginning of the right number, ``0`` for 0.375; ``game_of_life_halting`` to any text;
    ``puzzle24`` to any numbers that make 24, whichever the question has. It and ``countdown`` read the numbers from the
    text, where ``103 # 4 25`` and ``1.5`` have some that are not calculated with, and ``0x67`` has none.
    """
    if task == "coin_flip":
        over, _, under = answer.replace(",", "").partition("/")
        try:
            # Negated, so that nan, which is not close to anything, earns nothing.
            return not abs(float(over) / float(under or 1) - float(row["answer"])) <= COIN_FLIP_TOLERANCE
        except (ValueError, ZeroDivisionError):
            return True
    if task == "game_of_life_halting":
        return answer.lower() != str(row["answer"]).lower()
    if task in ARITHMETIC:
        numbers = sorted(row["metadata"]["numbers"])
        # With other numbers in its text countdown gives the answer no full score, but something for trying.
        if task == "countdown" and sorted(map(int, re.findall(r"\b\d+\b", answer))) != numbers:
            return False
        nodes = (node for tree in (_trees(answer) or ())[-1:] for node in ast.walk(tree))
        used: list[Any] = [node.value for node in nodes if isinstance(node, ast.Constant)]
        return sorted(used) != numbers
    return NOT_A_NUMBER.fullmatch(answer) is not None


COIN_FLIP_TOLERANCE = 1e-4
"""Largest error of a right probability, as in reasoning_gym."""


# -- the screen: completions do not run as programs, a second barrier in front of the worker --------------------------
#
# Nine reasoning_gym scorers pass the model's answer to ``eval``, directly or through ``sympy.parse_expr``, which
# rewrites it first (``lambda``, factorials, repeated decimals), gives it Python's builtins, and evaluates nested
# strings again: ``__import__('os').system(...)`` would run, and ``9**9**9**9`` would never end. So an answer is first
# parsed to a syntax tree, and only the constructs of a correct answer are let through.


PYTHON_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

UNREADABLE = "?"
"""An answer that no scorer can read."""

# No names: ``eval`` finds the scorer's variables, so ``[oracle_answer]`` would be the right answer. A bare word that is
# right (ABCDE) equals the row's answer, which is not screened.
LITERALS = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
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
    return False if task in ARITHMETIC | ALGEBRA and _trees(answer) == [] else None


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


def _trees(answer: str) -> list[ast.Expression] | None:
    """Parse an answer as Python, both unchanged and stripped; empty if it does not parse, None if too long or deep."""
    trees: list[ast.Expression] = []
    if len(answer) > LONGEST:
        return None
    for text in dict.fromkeys((answer, answer.lstrip(), answer.strip())):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns about odd literals such as 0or 1
                trees.append(ast.parse(text, mode="eval"))
        except (SyntaxError, ValueError):
            continue
        except (MemoryError, RecursionError):
            return None
    return trees


def _consists_of(answer: str, allowed: tuple[type[ast.AST], ...], values: tuple[type, ...]) -> bool:
    """Return whether ``answer`` consists only of these nodes, with constants of these types.

    ``eval`` does not run what does not parse, and the scorer may compare it as text; but ``parse_expr`` may run it
    after rewriting it.
    """
    trees = _trees(answer)
    if not trees:
        return trees is not None and allowed is LITERALS
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


# -- answers that solve nothing and earn more than chance, measured; plans name them -----------------------------------


def shortcuts(config: EnvironmentConfig) -> Iterator[str]:
    """Yield a sentence for each dataset of a run's task that pays for such an answer under the task's own reward."""
    family, _, name = (config.task or "").partition(":")
    if family != "reasoning_gym" or config.env_type != "reasoning" or config.graders is not None:
        return
    names = [spec["name"] for spec in config.params["datasets"]] if name == "composite" else [name]
    for dataset in dict.fromkeys(names):
        if config.reward in SHORTCUTS.get(dataset, {}):
            answer, mean, chance = SHORTCUTS[dataset][config.reward]
            yield f"{answer} earns {mean:.2f} on {dataset} (chance {chance:.2f}; measured with default parameters)"


SHORTCUTS: Mapping[str, Mapping[str, Sequence[Any]]] = json.loads(
    Path(__file__).with_name("shortcuts.json").read_text()
)
"""The best-paying answer by task and reward, with its mean reward and that of chance, the right answer of another
question; written by ``benchmarking/degenerate.py --write``."""
