import time

import pytest

from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.scorers import PYTHON_LISTS, is_harmless

EVALUATING = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]


@pytest.mark.parametrize("name", [*EVALUATING, "coin_flip"])
@pytest.mark.parametrize(
    "bomb", ["9**9**9**9", "(9**64)**64**64", "99999999!", "1e999999999", "[0]*10**12", "'a'*10**12"]
)
@pytest.mark.processes
def test_a_completion_cannot_explode(name, bomb):
    task = ReasoningGymTask(name, exam_prompts=1, test_prompts=0)
    row = task.row("train", 0)
    start = time.process_time()
    assert task.reward(bomb, row) == 0.0
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("task", "answer", "harmless"),
    [
        ("countdown", "(3 + 4) * 5 - 6 / 2", True),
        ("countdown", "3 ** 4", False),
        ("countdown", "x + 1", False),
        ("countdown", "'3' * 4", False),
        ("countdown", "so: 3 + 4", False),  # no expression of Python's, but sympy might make one of it
        ("countdown", "lambda: 3", False),
        ("puzzle24", "-(1 - 25)", True),
        ("simple_integration", "x**3/3 + 2*exp(x)*sin(x) - log(x) + C", True),
        ("simple_integration", "x**(3/2) + sqrt(x)", True),
        ("simple_integration", "2**(x)", True),
        ("simple_integration", "(9**64)**64", False),
        ("simple_integration", "x.free_symbols", False),
        ("simple_integration", "exit()", False),
        ("simple_integration", "(lambda: 1)()", False),
        ("simple_integration", "sin(x, evaluate=print)", False),
        ("simple_integration", "lambda x: x", False),
        ("simple_integration", "lambda print(1): x", False),
        ("simple_integration", "sin('exit()')", False),
        ("simple_integration", "'exit()'", False),
        ("simple_integration", "2x + ", False),
        ("polynomial_multiplication", "64*x**4*y**2 - 3*y", True),
        ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("n_queens", "[x for x in 'ab']", False),
        ("binary_matrix", "[[0, -1], [1, 0]]", True),
        ("string_insertion", "ABCDE", False),  # right only where it equals the row's answer, which is not screened
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "f'{exit()}'", False),
        ("coin_flip", "3/8", True),
        ("chain_sum", "exit()", True),  # compared as text, never run
    ],
)
def test_what_is_let_through(task, answer, harmless):
    assert is_harmless(task, answer) is harmless


def test_depth_and_length_are_limited():
    assert not is_harmless("n_queens", "[" * 3000 + "]" * 3000)
    assert not is_harmless("countdown", "1+" * 3000 + "1")


@pytest.mark.parametrize("name", EVALUATING)
def test_right_answers_are_let_through(name):
    task = ReasoningGymTask(name, exam_prompts=1, test_prompts=0)
    for i in range(3 if "integration" in name or name == "puzzle24" else 20):
        row = task.row("train", i)
        answer = row["answer"]
        assert is_harmless(name, answer) or (name == "string_insertion" and task.reward(answer, row) == 1.0), answer


NAMED = ("{}", "[{}]", "[[{}]]", "({},)", "[*{}]", "{{{}}}", "f'{{{}}}'", "(y := {})", "{}.copy()", "{}[0]", "-{}")
"""Ways to write a variable's value."""


@pytest.mark.parametrize("name", EVALUATING)
@pytest.mark.processes
def test_no_variable_of_a_scorer_is_an_answer(name):
    """``[oracle_answer]`` would be right without being solved. The variables are those of the installed scorer."""
    task = ReasoningGymTask(name, exam_prompts=1, test_prompts=0, reward="score")
    row = task.row("train", 0)
    scorer = type(task._scorers.datasets[0]).score_answer
    # ``parse_expr`` evaluates in a namespace of its own.
    variables = {*scorer.__code__.co_varnames, *(scorer.__globals__ if name in PYTHON_LISTS else ())}
    least = task.reward("?", row)
    for answer in (form.format(variable) for variable in variables for form in NAMED):
        assert task.reward(answer, row) <= least, answer


def test_only_the_numbers_of_a_question_make_its_target():
    """The scorers read the numbers from the text, where comments have some and 0x18 has none."""
    for name, numbers, target, right in (
        ("countdown", [1, 5, 10], 15, "1 * (5 + 10.)"),
        ("puzzle24", [1, 2, 3, 4], 24, "1 * 2 * 3 * 4."),
    ):
        task = ReasoningGymTask(name, exam_prompts=1, test_prompts=0, reward="score")
        row = task.row("train", 0)
        row = {**row, "answer": None, "metadata": {**row["metadata"], "numbers": numbers, "target": target}}
        text, total = " ".join(map(str, numbers)), "+".join(map(str, numbers))
        ways = f"{target:#x} # {text}", f"{target // 10}_{target % 10} # {text}", f"{total}+{target - sum(numbers):#b}"
        for answer in (*ways, f"{target:#o} + 0b0 * ({total})", "4*2*3 # 1", "10+5 # 1", "1.5*10"):
            assert task.reward(answer, row) <= 0.05, answer
        assert task.reward(right, row) == 1.0
