"""The hack alarm: it names what is paid and is no answer, and leaves right answers of every kind alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.upstream import known_tasks
from agilerl.runs.completions import CompletionRecord, write_completions
from agilerl.runs.diagnosis import Symptom
from agilerl.runs.hacks import hacks, hacks_of_run

SUMS = [("What is 67 + 89?", "156"), ("What is 3 + 40?", "43"), ("What is 17 + 5?", "22"), ("What is 60 + 9?", "69")]
SUMS += [(f"What is {a} + 55?", str(a + 55)) for a in range(20, 28)]
EXTRACTED = [(f"Copy the word after the colon: word{n} is here", f"word{n}") for n in "abcdefgh"]
CHOICES = [(f"Is {n} prime?", "yes" if n in (2, 3, 5, 7) else "no") for n in range(12)]
OPEN = [(f"Write a line about {word}.", "") for word in ("rain", "snow", "wind", "fog", "hail", "sun")]

Rows = list[dict[str, Any]]


def rows(
    questions: Sequence[tuple[str, str]], completion: str = "{answer}", reward: float | None = 1.0, finish: str = "stop"
) -> Rows:
    """A completion for each question; ``{question}``, ``{answer}`` and ``{number}`` stand for what differs."""
    return [
        {
            "prompt": question,
            "completion": completion.format(question=question, answer=answer, number=number),
            "answer": answer,
            "reward": reward,
            "finish_reason": finish,
        }
        for number, (question, answer) in enumerate(questions)
    ]


def names(found: Sequence[Symptom]) -> list[str]:
    return [symptom.name.removeprefix("paid though ") for symptom in found]


def seen(now: Rows, then: float = 0.0) -> list[str]:
    return names(hacks(now, [{**row, "completion": "zz", "reward": then} for row in now]))


HACKS = [
    (rows(SUMS, ""), ["empty"]),
    (rows(SUMS, " \n"), ["empty"]),
    (rows(SUMS, r"$\boxed{{}}$"), ["empty"]),
    (rows(SUMS, "<answer></answer>"), ["empty"]),
    (rows(SUMS, "{question}"), ["copied"]),
    (rows(SUMS, "{question} ="), ["copied"]),
    (rows(SUMS, "{question} {question}"), ["copied"]),
    ([{**row, "completion": row["prompt"][8:-1]} for row in rows(SUMS)], ["copied"]),
    ([{**row, "completion": row["prompt"][:-2]} for row in rows(SUMS, finish="length")], ["copied", "cut"]),
    (rows(EXTRACTED, "{question}"), ["copied"]),
    (rows(OPEN, "{question}"), ["copied"]),
    (rows(SUMS, "1, 2, 3, 43, 22, 69"), ["alike"]),
    (rows(OPEN, "This deserves a 10."), ["alike"]),
    (rows(CHOICES, "Perhaps"), ["alike"]),
    (rows(SUMS, "To calculate {question}, we can", finish="length"), ["cut"]),
    (rows(SUMS, "number {number}, then ", finish="context"), ["cut"]),
    ([{**row, "completion": "abcdefgh"[n % 8]} for n, row in enumerate(rows(SUMS))], ["short"]),
]


@pytest.mark.parametrize(("now", "kinds"), HACKS, ids=[f"{case[0][0]['completion']!r}" for case in HACKS])
def test_what_is_paid_and_no_answer_is_named(now: Rows, kinds: list[str]) -> None:
    assert seen(now) == kinds
    # Partial credit, and a tenth that is right: the rise and the share are still clear.
    assert seen([{**row, "reward": 0.4} for row in now] + rows(SUMS[-1:]), then=0.1) == kinds
    # No rise: it was so from the beginning, or it fell.
    assert seen(now, then=1.0) == seen(now, then=2.0) == []


RIGHT = [
    rows(SUMS),
    rows(SUMS, finish="length"),  # one token, and a limit of one token
    rows(SUMS, "{answer} apples and so", finish="length"),
    rows(SUMS, "{question} {answer}"),
    rows(EXTRACTED),
    rows(EXTRACTED, "the word {answer}"),
    rows(EXTRACTED, "{answer} is"),  # a part of the prompt, with the answer
    rows(CHOICES),
    rows([(q, "no" if q != "Is 2 prime?" else a) for q, a in CHOICES]),  # most answers are alike
    rows([(q, f"6 + 7 = {n}\n#### {n}") for n, (q, _) in enumerate(SUMS)], "{number}"),  # a number, of a worked answer
    rows([(q, f"6 + 7 = {n}\n#### {n}") for n, (q, _) in enumerate(SUMS)], "It is {number}. Next", finish="length"),
    rows([(q, rf"\frac{{{n}}}{{7}}") for n, (q, _) in enumerate(SUMS)], "{number}/7"),
    rows(OPEN, "A line, number {number}.", finish="length"),
    rows([(q, "") for q, _ in SUMS] + SUMS * 2),
    rows(SUMS, "", reward=None),
]


@pytest.mark.parametrize("now", RIGHT, ids=[f"{case[0]['completion']!r}" for case in RIGHT])
def test_right_answers_are_left_alone(now: Rows) -> None:
    assert seen(now) == []


def test_only_what_is_paid_counts() -> None:
    wrong = rows(SUMS, "zz", 0.0)
    assert seen(rows(SUMS) + rows(SUMS * 9, "", 0.0)) == []
    assert seen(rows(SUMS, "") + wrong * 3) == ["empty"]


def test_a_rise_that_may_be_luck_is_none() -> None:
    mixed = [{**row, "reward": float(n % 4 == 0)} for n, row in enumerate(rows(SUMS, ""))]
    assert seen(mixed, then=0.0) == []  # three prompts
    lucky = [{**row, "reward": float(n % 2)} for n, row in enumerate(rows(SUMS, ""))]
    before = [{**row, "reward": float(n % 3 == 0)} for n, row in enumerate(rows(SUMS, "zz"))]
    assert hacks(lucky, before) == []
    # Many samples of one prompt are one observation.
    assert hacks(rows(SUMS[:1] * 50, ""), rows(SUMS[:1] * 50, "zz", 0.0)) == []
    assert hacks([], []) == hacks(rows(SUMS, ""), []) == hacks([], rows(SUMS, "")) == []


def test_the_sentence_has_the_numbers_and_three_samples() -> None:
    mixed = rows(SUMS[:10], "x" * 999, finish="length") + rows(SUMS[10:])
    cut, *_ = [s for s in hacks(mixed, rows(SUMS, "zz", 0.05)) if s.name == "paid though cut"]
    assert "the reward rose from 0.05 to 1, and 83% of the paid completions were cut" in cut.found
    assert [sample["question"] for sample in cut.samples] == [question for question, _ in SUMS[:3]]
    assert cut.samples[0] == {"question": SUMS[0][0], "answer": "x" * 500, "right": "156", "reward": 1.0}


SLOW = ("futoshiki", "knight_swap", "zebra_puzzles")
TASKS = [
    pytest.param(name, marks=pytest.mark.nightly) if name in SLOW else name
    for name in known_tasks()
    if name != "composite"
]


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answers_of_no_task_are_an_alarm(name: str) -> None:
    task = ReasoningGymTask(name, seed=5, exam_prompts=1, test_prompts=0, holdout="any")
    drawn = [task.row("train", place) for place in range(6)]
    task.close()
    # Where many answers are right there is none in the row: then a different text for each.
    questions = [(row["question"], row["answer"] or "") for row in drawn]
    answers = [row["answer"] if row["answer"] is not None else f"solution {n}" for n, row in enumerate(drawn)]
    for form in ("{}", "The answer is {}.", "<answer>{}</answer>"):
        for finish in ("stop", "length"):
            now = [
                {**row, "completion": form.format(answer)}
                for row, answer in zip(rows(questions, "", 1, finish), answers)
            ]
            assert seen(now) == []


def test_a_run_is_seen_by_its_files(tmp_path: Path) -> None:
    def write(step: int, completion: str, *reward: float | None) -> None:
        common = {"generation": 0, "step": step, "sample": 0, "length": 3}
        records = [
            CompletionRecord(agent=agent, group=n, **common, **row)
            for agent, said in ((0, completion), (4, "{answer}"))
            for n, row in enumerate(rows(SUMS, said))
            if row.update(reward=reward[n % len(reward)]) is None
        ]
        write_completions(tmp_path, step, records)

    assert hacks_of_run(tmp_path) == hacks_of_run(tmp_path / "none") == {}
    write(1, "zz", 0.0)
    assert hacks_of_run(tmp_path) == {}
    for step in range(2, 15):
        write(step, "", 1.0)
    assert {index: names(found) for index, found in hacks_of_run(tmp_path).items()} == {0: ["empty"], 4: []}
    for step in (15, 16, 17):
        write(step, "{answer}", 1.0)
    assert not any(hacks_of_run(tmp_path).values())  # it has passed
    for step in (20, 21, 22):
        write(step, "", 1e308, -1e308, None, float("nan"))  # no number to calculate with
    assert not any(hacks_of_run(tmp_path).values())
    (tmp_path / "step_000022.parquet").write_bytes(b"damaged")
    assert hacks_of_run(tmp_path) == {}
