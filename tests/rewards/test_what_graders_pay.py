"""Graders pay for answers in every usual notation, not for what would have to be computed, nor for guesses."""

from typing import Any

import pytest

from agilerl.envs.answer_format import AnswerFormatTask, Format
from agilerl.envs.graded import GradedTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.rewards import LIBRARY, BaseGrader, call_grader, exact_match, library_grader
from agilerl.rewards.mathematics import math_accuracy

RIGHT = {
    "156": [
        "156",
        "The answer is 156.",
        "67 + 89 = 156",
        "$67+89=156$",
        "So we get 67+89=156",
        r"\boxed{156}",
        "**156**",
        "x = 156",
        "$x=156$",
        "156.0",
        "156 apples",
        r"$156\text{ km}$",
        "156 km",
        "<answer>156</answer>",
        "$156$",
        "156 - done",
        "The answer is 156, since 67 + 89 = 156.",
        "So the sum is 156",
    ],
    "-5": ["-5", "$-5$", "x=-5", "The result is -5."],
    "1/2": ["0.5", r"$\frac12$", r"\frac{1}{2}", "0.50", r"$\dfrac{1}{2}$"],
    "0.5": ["1/2", "50%"],
    r"\frac{1}{2}": ["1/2"],
    "-3/4": ["-3/4", r"$-\frac{3}{4}$", r"$\frac{-3}{4}$"],
    "3/2": [r"$1\frac12$"],
    "1000": ["1,000", "1{,}000", "$1{,}000$", "1 000"],
    "1,000": ["1000"],
    "3.5 %": ["3.5%", r"$3.5\%$"],
    "0.035": ["3.5 %"],
    "90": [r"$90^\circ$"],
    "100": [r"\$100", "$100"],
    "{1,2}": [r"$\{1,2\}$"],
    r"\{1,2\}": [r"$\{2, 1\}$"],
    "3, 4": ["$3, 4$", "3,4", "$4$ and $3$"],
    "(3,4)": ["$(3, 4)$", "(3,4)"],
    "(3, 4)": [r"The answer is $\left(3, 4\right)$"],
    "[0,1)": ["$[0,1)$", "[0, 1)"],
    r"[0,1)\cup(2,3]": [r"$[0,1) \cup (2,3]$"],
    "x=5": ["5"],
    "x = 5": ["x=5"],
    "5": ["x = 5"],
    "1/3": [r"$x=\frac13$"],
    "2x+3": ["3+2x", "$2x+3$", r"\boxed{3+2x}", "2(x+1)+1"],
    r"2\sqrt{3}": [r"$\sqrt{12}$", r"2\sqrt{3}"],
    r"\frac{\sqrt3}{2}": [r"$\frac{\sqrt{3}}{2}$"],
    "10^6": ["1000000"],
    "10^{6}": ["$10^6$"],
    "1000000": ["1,000,000"],
    "2/4": ["1/2"],
    r"\pi": [r"$\pi$"],
    r"\frac{\pi}{2}": [r"$\pi/2$"],
    r"\sqrt{2}": [r"$\sqrt2$"],
    "1,2,3": ["1, 2, 3"],
    "-1, 2": ["$x=-1$ or $x=2$", "$x=-1, x=2$"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$"],
    "-3,3": [r"$\pm 3$"],
    r"(-\infty, 3]": [r"$(-\infty,3]$"],
    "(-1, 1/2)": [r"$\left(-1, \frac12\right)$"],
    "x^2+1": ["x^2+1"],
    "$156$": ["156"],
    r"\boxed{156}": ["156"],
    "#### 72": ["72"],
    "156 apples": ["156"],
    "7": ["Step 1: 3\nStep 2: 4\n7"],
    "2": ["2.0"],
    "0": ["0", "-0"],
    "12": ["84/7 = 12", r"$\frac{84}{7}=12$"],
    "A": ["A", r"\boxed{A}"],
    r"1.5\times10^3": ["1500"],
    "3+4i": ["$3+4i$"],
    r"2+\sqrt3": [r"$\sqrt3+2$"],
    "72": ["She sold 48+24 = 72 clips. The answer is 72"],
    "xy+2": ["$2+xy$"],
}
"""Completions that give an answer, by the answer."""
TO_COMPUTE = {
    "156": [
        "67 + 89",
        "67+89",
        "To calculate 67 + 89, we can",
        "What is 67 + 89?",
        "67 + 89 =",
        "$67+89$",
        r"\boxed{67+89}",
        "<answer>67+89</answer>",
        "x = 67+89",
        "$x=67+89$",
        "$156=67+89$",
        "$67+89=67+89$",
        "67 89",
        r"$67\ 89$",
        "{67}{89}",
        "$67+89=x$",
        "Answer: 67 + 89",
        "The answer is (67+89)",
        "zz 67 + 89 zz",
        "67 + 89 or 156?",
    ],
    "56": ["7*8", "7 × 8", r"7 \cdot 8", r"$7\times8$", "$7(8)$", "$(7)(8)$"],
    "12": ["84/7", "84 / 7", r"$\frac{84}{7}$", "84 ÷ 7", r"$84 \div 7$", "84:7", "$84:7$", r"$\gcd(84,36)$", "12/1"],
    "1/2": ["2/4", r"$\frac{2}{4}$", r"$\int_0^1 x dx$", r"$\sin(30^\circ)$"],
    "23/131": ["92/524"],
    "1000000": ["10^6"],
    "1024": ["$2^{10}$"],
    "4": [r"$\sqrt{16}$"],
    "120": ["$5!$"],
    "10": [r"$\binom52$"],
    "5": [r"$\max(3,5)$", "$|-5|$", r"$\lfloor 5.5\rfloor$", "--5", r"\boxed{}", r"$\boxed{}$"],
    "3": [r"$\log_2 8$"],
    "6": [r"$\sum_{i=1}^3 i$"],
    "-5": ["-(5)"],
    "17": ["17 or 18", "The answer is 17 or 18", "$17$ or $18$", "17|18"],
    "18": [
        "17 or 18",
        "The answer is 17 or 18",
        r"\boxed{17} or \boxed{18}",
        "17, 18",
        "17 18",
        "17/18",
        r"$17 \text{ or } 18$",
        r"\boxed{17 or 18}",
        r"\boxed{17, 18}",
    ],
    "0": [r"\boxed{}", "", "$$", "nan", "[]", "{}", "()"],
    "1": ["True"],
    "{3,8}": [r"$\{1+2, 8\}$"],
    r"\{3,8\}": [r"$\{1+2, 8\}$"],
    "(3,8)": ["$(1+2, 8)$"],
    "(6,4)": ["$(2(3),4)$"],
    "[0,4)": ["$[0,2+2)$"],
    "x=5": ["x=2+3"],
    "3, 4": ["4"],
    "2x+3": ["2"],
    r"2\sqrt{3}": ["2"],
    "sin x + 1": ["1"],
    "xy + 2": ["2"],
}
"""Completions that leave it to be computed, or give several, or none."""


@pytest.mark.parametrize("answer", RIGHT)
def test_accuracy_takes_an_answer_in_every_notation(answer: str) -> None:
    assert {text: math_accuracy(text, answer) for text in RIGHT[answer]} == dict.fromkeys(RIGHT[answer], 1.0)


@pytest.mark.parametrize("answer", TO_COMPUTE)
def test_accuracy_does_not_compute(answer: str) -> None:
    assert {text: math_accuracy(text, answer) for text in TO_COMPUTE[answer]} == dict.fromkeys(TO_COMPUTE[answer], 0.0)


RESTATED = ["(x+1)^2", "$(x+1)^2$", r"\boxed{(x + 1)^2}", "Expand $(x+1)^2$.", r"<answer>\left(x+1\right)^2</answer>"]


def test_a_formula_of_the_question_is_no_answer() -> None:
    question, answer = "Expand $(x+1)^2$.", "x^2+2x+1"
    assert [math_accuracy(text, answer, question) for text in RESTATED] == [0.0] * len(RESTATED)
    assert [math_accuracy(text, answer, question) for text in (answer, "$1 + 2x + x^2$")] == [1.0, 1.0]
    assert math_accuracy("1000000", "10^6", "Write 1000000 as a power of ten.") == 0.0
    # Where the answer itself stands in the question, as a choice does, it is right.
    assert math_accuracy(r"$2 \sqrt{3}$", r"2\sqrt{3}", r"Which is larger, $2\sqrt{3}$ or $\sqrt{11}$?") == 1.0
    assert math_accuracy("156", "156", "Is it 155 or 156?") == 1.0


@pytest.mark.parametrize("row", ["{}", "The answer is {}", r"\boxed{{{}}}", "${}$", "<answer>{}</answer>"])
@pytest.mark.parametrize("between", [" ", ", ", " or ", " and "])
def test_a_row_of_numbers_answers_nothing(row: str, between: str) -> None:
    text = row.format(between.join(map(str, range(40))))
    assert [math_accuracy(text, str(number)) for number in range(40)] == [0.0] * 40


QUESTION = {"question": "What is 67 + 89?", "answer": "156"}
TO_156 = ", ".join(map(str, range(117, 157)))
TRIES = [
    *("", "nan", "0", "1", "What is 67 + 89?", "What is 67 + 89 =", "67 + 89", "To calculate 67 + 89, we can", "67 89"),
    *("$67 + 89$", "$x = 67 + 89$", r"\boxed{67 + 89}", "<answer>67 + 89</answer>", "<think>a</think>\n67 + 89"),
    *(
        "155 or 156",
        "156 or 157",
        "$155$ or $156$",
        r"\boxed{155} or \boxed{156}",
        r"\boxed{155, 156}",
        r"\boxed{}",
        "$$",
    ),
    *(" ".join(map(str, range(200))), TO_156, r"\frac{312}{2}", "I don't know", "89"),
    *('He says "156", I say 3', "True or False", "<answer></answer>", "{}", "[]"),
]
"""What a policy would try."""
CODE = ["", "```python\n```", "```python\nadd = None\n```", "```python\nraise SystemExit(0)\n```", *TRIES[:4]]
BOXED_SUM = r"\boxed{67 + 89}"
GRADERS: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "accuracy": ({}, r"\boxed{156}", set()),
    "exact_match": ({}, "156", set()),
    "format_tags": ({}, "<think>a</think><answer>3</answer>", set()),
    "json_valid": ({"required": ["sum"]}, '{"sum": 3}', set()),
    "length": ({"target": 9}, "any", set()),
    "overlong": ({"max_tokens": 9, "cache_tokens": 4}, "any", set()),
    "regex": ({"pattern": r"\\boxed\{\d+\}", "full": True}, r"\boxed{3}", set()),
    "repetition": ({}, "any", set()),
    "sandbox": ({}, "```python\ndef add(a, b):\n    return a + b\n```", set()),
}
"""Parameters, what earns the most, and which tries are paid. Graders of form pay for their form alone, or nothing."""
ASK_A_MODEL = {"judge", "pairwise_judge", "reward_model"}
"""What they pay is up to the model."""


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(set(LIBRARY) - ASK_A_MODEL))
def test_no_grader_pays_for_a_try(name: str) -> None:
    params, right, paid = GRADERS[name]
    grader = library_grader(name, params)
    row = {**QUESTION, "completion_ids": [1] * 9, "tests": ["assert add(67, 89) == 156"]}
    tries = CODE if name == "sandbox" else TRIES
    best, *scores = call_grader(grader, [right, *tries], [row] * (1 + len(tries)))
    if isinstance(grader, BaseGrader):
        grader.close()
    assert {text for text, score in zip(tries, scores) if score is not None and score > 0} == paid
    assert best is not None
    assert best >= max(score for score in scores if score is not None)
    assert best > 0 or right == "any"


FORMS = {
    "whole": "{}",
    "tags": "<answer>{}</answer>",
    "after": "The answer is {}",
    "boxed": r"\boxed{{{}}}",
    "last_number": "So {}",
}
LAST = [r"\boxed{155} or \boxed{156}"]
FOUND = {"boxed": LAST, "last_number": ["155 or 156", "$155$ or $156$", *LAST, r"\boxed{155, 156}", TO_156]}
"""Where the last one counts, one of several is an answer; but a policy has to know which to put last."""


@pytest.mark.parametrize("kind", FORMS)
def test_no_extraction_pays_for_a_try(kind: Format) -> None:
    task = ReasoningGymTask("chain_sum", exam_prompts=1, test_prompts=0)
    row = {**task.row("train", 0), **QUESTION}
    for graded in (task, GradedTask(task, exact_match), GradedTask(task, math_accuracy)):
        extracted = AnswerFormatTask(graded, kind)
        texts = {text: (text, FORMS[kind].format(text)) for text in TRIES}
        paid = [text for text, forms in texts.items() if any(extracted.reward(form, row) for form in forms)]
        assert sorted(paid) == sorted(FOUND.get(kind, []))
        assert extracted.reward(FORMS[kind].format("156"), row) == 1.0
