"""Which datasets of reasoning_gym evaluate text or open files: derived from its sources and from what they do.

A version of it that adds one fails here: then its scorer, generator or parameter has to be read, and put into
``IN_THIS_PROCESS``, ``FILE_PARAMS`` or ``EVALUATED`` of the package, or kept out of them.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from agilerl.config.named_files import FILE_PARAMS
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.scorers import ALGEBRA, ARITHMETIC, IN_THIS_PROCESS, PYTHON_LISTS
from agilerl.envs.upstream import EVALUATED, known_tasks, quiet
from agilerl.errors import ConfigError
from tests.envs.what_is_called import EVALUATES, OPENS, calls

SCORING = {
    "binary_matrix": {"eval"},
    "bitwise_arithmetic": {"eval"},  # of the problem
    "coin_flip": {"Fraction"},
    "countdown": {"parse_expr"},
    "intermediate_integration": {"parse_expr", "simplify"},
    "n_queens": {"eval"},
    "number_sorting": {"eval"},  # of the problem's answer
    "polynomial_multiplication": {"parse_expr"},
    "pool_matrix": {"loadtxt"},  # of lines
    "propositional_logic": {"parse_expr", "simplify"},  # its own
    "puzzle24": {"parse_expr"},
    "simple_integration": {"parse_expr", "simplify"},
    "spiral_matrix": {"eval"},
    "string_insertion": {"eval"},
}
"""What is called, that evaluates or opens, from a dataset's ``score_answer`` on."""
EXPLODING = {"codeio", "rubiks_cube", "rush_hour"}
"""Scorers that a short answer keeps busy, or makes take all memory: found by trying."""
GENERATING = {
    "arc_agi": {"load_data"},
    "basic_arithmetic": {"eval"},
    "bf": {"compile"},  # its own
    "bitwise_arithmetic": {"eval"},
    "caesar_cipher": {"read_data_file", "read_text"},
    "codeio": {"exec", "get_data_file_path", "open"},  # of programs that come with the package
    "composite": {"open"},  # a method that nobody calls
    "countdown": {"symbols"},
    "dice": {"simplify"},  # its own
    "emoji_mystery": {"read_data_file", "read_text"},
    "figlet_font": {"figlet_format", "get_data_file_path", "open"},  # fonts of a list
    "group_anagrams": {"get_data_file_path", "open"},
    "letter_counting": {"read_data_file", "read_text"},
    "letter_jumble": {"read_data_file", "read_text"},
    "polynomial_multiplication": {"symbols"},
    "propositional_logic": {"parse_expr", "simplify"},
    "puzzle24": {"symbols"},
    "rubiks_cube": {"compile"},  # of a regular expression
    "rush_hour": {"get_data_file_path", "open"},
    "sentence_reordering": {"read_data_file", "read_text"},
    "simple_integration": {"Fraction"},
    "spell_backward": {"read_data_file", "read_text"},
    "word_ladder": {"get_data_file_path", "open"},
    "word_sequence_reversal": {"read_data_file", "read_text"},
    "word_sorting": {"read_data_file", "read_text"},
}
"""The same from making the dataset and its problems on."""
FILES_THAT_EVALUATE = {
    "algebra/intermediate_integration.py",
    "algebra/polynomial_multiplication.py",
    "algebra/simple_integration.py",
    "algorithmic/binary_matrix.py",
    "algorithmic/number_sorting.py",
    "algorithmic/spiral_matrix.py",
    "algorithmic/string_insertion.py",
    "arithmetic/basic_arithmetic.py",
    "arithmetic/bitwise_arithmetic.py",
    "arithmetic/gsm_symbolic/generators_00_49.py",  # of fractions that stand beside it
    "arithmetic/gsm_symbolic/generators_50_99.py",
    "code/codeio.py",
    "games/countdown.py",
    "games/n_queens.py",
    "games/puzzle24.py",
    "logic/propositional_logic.py",
}
"""All files with a call of eval, exec, or one of sympy's readers: some are reached in ways that are hard to follow."""


def datasets() -> dict[str, tuple[type, type]]:
    from reasoning_gym.factory import DATASETS

    assert known_tasks()  # registers composite
    return DATASETS


def found(*starts: str) -> dict[str, set[str]]:
    every = {name: {c for c, _ in calls(kind, *starts)} & (EVALUATES | OPENS) for name, (kind, _) in datasets().items()}
    return {name: names for name, names in every.items() if names}


def test_scorers_that_evaluate_or_open() -> None:
    assert found("score_answer") == SCORING


def test_they_run_in_a_process_of_their_own() -> None:
    assert set(known_tasks()) == IN_THIS_PROCESS | set(SCORING) | EXPLODING | {"composite"}
    assert IN_THIS_PROCESS.isdisjoint({*SCORING, *EXPLODING})
    assert {n for n, c in SCORING.items() if c & {"eval", "parse_expr"}} - (PYTHON_LISTS | ARITHMETIC | ALGEBRA) == {
        "bitwise_arithmetic",
        "number_sorting",
        "propositional_logic",
    }


def test_generators_that_evaluate_or_open() -> None:
    assert found("__init__", "__getitem__") == GENERATING


def test_files_that_evaluate() -> None:
    root = Path(reasoning_gym.__file__).parent
    evaluating = {"eval", "exec", "parse_expr", "sympify", "parse_latex", "lambdify", "literal_eval"}
    names = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in evaluating:
                names.add(str(path.relative_to(root)))
    assert names == FILES_THAT_EVALUATE


def test_the_search_sees_what_it_is_for() -> None:
    class Dataset:
        def score_answer(self, answer: str) -> float:
            return self.helped(answer)

        def helped(self, answer: str) -> Any:
            return eval(answer)

    assert {name for name, _ in calls(Dataset, "score_answer")} == {"helped", "eval"}


# -- parameters --------------------------------------------------------------------------------------------------------

OPENED: list[str] = []
CANARY = "canary-of-agilerl.txt"


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and CANARY in str(arguments[0]):
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def opened() -> list[str]:
    """What is opened from now on that has the name of the canary."""
    sys.addaudithook(_heard)  # there is no way to take it away again
    return OPENED


def texts() -> Iterator[tuple[str, str, Any]]:
    """Yield each parameter of a dataset that takes any text, with a text and with a list of it."""
    for name, (_, config) in datasets().items():
        for field in dataclasses.fields(config):
            if field.name not in ("seed", "size", "datasets") and field.type not in (int, float, bool):
                yield name, field.name, field


def test_which_parameters_are_opened(opened: list[str], tmp_path: Path) -> None:
    """By making each task with the name of a file for each parameter; what refuses it opens nothing."""
    canary = tmp_path / CANARY
    canary.write_text("alpha\nbeta\ngamma\n" * 9)
    opening = set()
    for name, parameter, _ in texts():
        for value in (str(canary), [str(canary)], [str(canary)] * 4):
            del opened[:]
            try:
                with quiet():
                    task = ReasoningGymTask(name, {parameter: value}, exam_prompts=1, test_prompts=0, holdout="any")
                    row = task.row("train", 0)
                    if name in IN_THIS_PROCESS:
                        task.reward("1", row)
            except Exception:
                pass
            if opened:
                opening.add((name, parameter))
    assert opening == {(name, parameter) for name, names in FILE_PARAMS.items() for parameter in names}


def test_which_parameters_are_evaluated(tmp_path: Path) -> None:
    """By giving each parameter a text that leaves a trace when it runs, checked as manifests are, and scoring."""
    trace = tmp_path / "trace"
    text = f"open({str(trace)!r},'w').close()"
    for name, parameter, _ in texts():
        for value in (text, [text], [text] * 4):
            try:
                with quiet():
                    task = ReasoningGymTask(name, {parameter: value}, exam_prompts=1, test_prompts=0, holdout="any")
                    task.row("train", 0)
            except Exception:
                continue
            assert name not in EVALUATED, (name, parameter)
        assert not trace.exists(), (name, parameter)


@pytest.mark.processes
def test_evaluated_parameters_take_names_and_operators() -> None:
    for name, params in {
        "simple_integration": {"symbols": ["t"]},
        "polynomial_multiplication": {"variables": ["a", "b_1"], "operators": ["+"]},
        "basic_arithmetic": {"operators": ["+", "-"], "format_style": "natural"},
    }.items():
        task = ReasoningGymTask(name, params, exam_prompts=1, test_prompts=0)
        row = task.row("train", 0)
        assert task.reward(row["answer"], row) == 1.0
    with pytest.raises(ConfigError):
        ReasoningGymTask("simple_integration", {"symbols": ["x y"]}, exam_prompts=1, test_prompts=0)
