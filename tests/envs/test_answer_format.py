"""Answer formats: what prompts ask for, what is found in completions, and what graders get of it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from agilerl.envs import CuratedTask, ReasoningGymTask
from agilerl.envs.answer_format import AnswerFormat, AnswerFormatTask, Format
from agilerl.envs.core import Task
from agilerl.envs.graded import GradedTask, TaskGrader, all_weights, exam_grader
from agilerl.models.tiny import tiny_model_path
from agilerl.rewards import Accuracy, CombinedGrader

FOUND: Mapping[Format, Sequence[tuple[str, str | None]]] = {
    "whole": [(" 17 ", " 17 "), ("", "")],
    "tags": [
        ("It is <answer> 17 </answer>.", "17"),
        ("<answer>16</answer> no: <answer>17</answer>", "17"),
        ("<answer>16 <answer>17</answer></answer>", "17"),
        ("<answer>17</answer> or <answer>18", "17"),
        ("<answer>17</answer> </answer>", "17"),
        ("<answer></answer>", ""),
        ("<answer>17", None),
        ("</answer>17<answer>", None),
        ("17", None),
    ],
    "last_number": [
        ("17 - 5 = 12.", "12"),
        ("It is \u22125.", "-5"),
        ("about -3.25%", "-3.25"),
        ("$1,234,567.50 in all", "1234567.50"),
        ("1,2,3", "3"),
        ("12,3456", "3456"),
        ("3-5", "5"),
        ("of 1e-5", "1e-5"),
        ("so...5", "5"),
        ("less than .5", ".5"),
        ("the 17th", "17"),
        ("x2 and no number", None),
        ("", None),
    ],
    "after": [
        ("The answer is 17.", "17"),
        ("the ANSWER is: **3.5**. That was easy.", "3.5"),
        ("The answer is 16. No, the answer is 17\nbecause", "17"),
        ("The answer is\n\n17! 18", "17"),
        ("The answer is 17 or 18.", "17 or 18"),
        ("The answer is", ""),
        ("17 is the answer", None),
    ],
    "boxed": [
        (r"so \boxed{17}.", "17"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{16 \boxed{17}}", "17"),
        (r"\boxed{17} or \boxed{18", "17"),
        (r"}} {\boxed {17}", "17"),
        (r"\boxed{}", ""),
        (r"\boxed{{17}", None),
        ("17", None),
    ],
}


@pytest.mark.parametrize(("kind", "text", "answer"), [(k, *case) for k, cases in FOUND.items() for case in cases])
def test_what_is_found(kind: Format, text: str, answer: str | None) -> None:
    assert AnswerFormat(kind).find(text) == answer


@pytest.mark.parametrize(
    ("kind", "prefill", "text", "answer"),
    [
        ("after", "The answer is", " 17.", "17"),
        ("tags", "<answer>", "17</answer>", "17"),
        ("boxed", r"Thus \boxed{", "17}", "17"),
        ("last_number", "1", "7", "17"),
        ("tags", "As in <answer>1</answer>:", "17", None),
        ("last_number", "First, 1 + 2", " is", None),
    ],
)
def test_an_answer_may_begin_in_a_prefill_but_not_end_there(
    kind: Format, prefill: str, text: str, answer: str | None
) -> None:
    assert AnswerFormat(kind).find(text, prefill) == answer


@pytest.mark.parametrize("kind", ["tags", "last_number", "after", "boxed"])
def test_a_megabyte_takes_linear_time(kind: Format) -> None:
    parts = ["1", "1,", "1,000,", "1e", "-", "<answer>", "</answer>", r"\boxed{", "{", "}", "\\", "The answer is ", " "]
    for part in [*parts, "*", ".", "\n"]:
        begun = time.process_time()
        AnswerFormat(kind).find("<answer>The answer is" + r"\boxed" + part * (2**20 // len(part)))
        assert time.process_time() - begun < 5, part


class _Sum(Task):
    """One question; its messages are a test's."""

    name, grader, exam_prompts = "sum", "equal", 1

    def __init__(self, *messages: tuple[str, str]) -> None:
        self._messages = messages or (("user", "8 + 9?"),)

    def row(self, split: Any, index: int) -> dict[str, Any]:
        return {"question": "8 + 9?", "answer": "17"}

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self._messages]

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion == row["answer"])


def _asked(kind: Format, *messages: tuple[str, str]) -> list[tuple[str, str]]:
    task = AnswerFormatTask(_Sum(*messages), kind)
    return [(m["role"], m["content"]) for m in task.messages(task.row("train", 0))]


def test_the_last_question_asks_for_the_format_unless_the_conversation_does() -> None:
    instruction = "Give your final answer between <answer> and </answer>."
    assert _asked("tags") == [("user", f"8 + 9?\n\n{instruction}")]
    turns = [("system", "Be short."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "8 + 9?")]
    assert _asked("tags", *turns) == [*turns[:3], ("user", f"8 + 9?\n\n{instruction}")]
    assert _asked("tags", ("system", "8 + 9?"), ("assistant", "Well,")) == [
        *(("system", "8 + 9?"), ("user", instruction), ("assistant", "Well,"))
    ]
    prefill = ("assistant", "The answer is")  # of the base's formats, the instruction with it is obeyed most often
    assert _asked("after", ("user", "8 + 9?"), prefill) == [*_asked("after"), prefill]
    for kind, mark in (("tags", "Use <answer>."), ("boxed", r"Use \boxed{}."), ("after", "Say: The answer is")):
        assert _asked(kind, ("system", mark), ("user", "8 + 9?")) == [("system", mark), ("user", "8 + 9?")]
    for kind in ("whole", "last_number"):
        assert _asked(kind) == [("user", "8 + 9?")]
    assert "\\boxed{}" in _asked("boxed")[0][1]
    assert '"The answer is"' in _asked("after")[0][1]


@pytest.mark.parametrize("name", ["gcd", "chain_sum", "letter_counting"])
def test_a_procedural_task_grades_what_is_found(name: str) -> None:
    inner = ReasoningGymTask(name, exam_prompts=4, test_prompts=0, shrink_panels=True)
    task = AnswerFormatTask(inner, "tags")
    row = task.row("exam", 0)
    answer, question = row["answer"], row["question"]
    assert (task.name, task.grader, task.exam_prompts) == (name, "exact", 4)
    texts = [f"So: <answer>{answer}</answer>", answer, "", f"<answer>{question}</answer>", f"<answer>{answer}"]
    texts += [f"<answer>{answer} or 3</answer>", f"<answer>{answer}</answer><answer></answer>"]
    assert task.rewards(texts, [row] * len(texts)) == [1.0, *[0.0] * 6]
    assert [task.reward(text, row) for text in texts] == task.grade_exam(texts, [row] * len(texts)).rewards
    boxed = AnswerFormatTask(inner, "boxed")
    assert [boxed.reward(text, row) for text in (rf"\boxed{{{answer}}}", answer)] == [1.0, 0.0]
    task.close()


def test_datasets_and_graders_get_the_answer_as_the_completion() -> None:
    seen: list[str] = []

    def custom(completion: str, answer: str) -> float:
        seen.append(completion)
        return 0.5

    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]
    inner = CuratedTask(rows, exam_prompts=4, test_prompts=4)
    graders = CombinedGrader({"accuracy": (Accuracy(), 1.0), "custom": (custom, 1.0)})
    task = AnswerFormatTask(GradedTask(inner, graders, TaskGrader(inner)), "after")
    row = task.row("exam", 0)
    texts = [f"{row['question']} The answer is {row['answer']}.", f"It is {row['answer']}.", ""]
    assert task.rewards(texts, [row] * 3) == [1.5, 0.5, 0.5]
    assert seen == [row["answer"], "", ""]
    assert task.grade_exam(texts, [row] * 3).rewards == [1.0, 0.0, 0.0]
    assert exam_grader(task) == "exact_match"
    assert all_weights(task, {"custom": 3.0}) == {"accuracy": 1.0, "custom": 3.0}


def test_rows_that_do_not_fit_with_the_instruction_are_left_out() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    rows = [{"question": "x " * n, "answer": "y"} for n in range(1, 60)]
    task = AnswerFormatTask(CuratedTask(rows, exam_prompts=4, test_prompts=4), "boxed")
    task.fit(tokenizer, 127)
    assert task.counts["train"] > 4
    for split, count in (("exam", 4), ("test", 4), ("train", task.counts["train"])):
        for index in range(count):
            place = task.place_at(split, index, tokenizer, 128)  # type: ignore[arg-type]
            assert place.skipped == 0
            assert len(place.prompt_ids) <= 127
