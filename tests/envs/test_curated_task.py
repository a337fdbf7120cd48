"""Datasets divided into training, exam and test: no leakage, exact counts, the same rows every time."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from agilerl.envs.datasets import CuratedTask
from agilerl.envs.examples import PreferenceTask, SFTTask
from agilerl.envs.graded import GradedTask
from agilerl.envs.prompts import render_prompt
from agilerl.envs.sources import mix
from agilerl.envs.tools import ToolEnv
from agilerl.errors import ConfigError, EnvError
from agilerl.llm_envs import PreferenceGym, ReasoningGym, SFTGym
from agilerl.rewards import exact_match
from tests.envs.conftest import TEMPLATE, make_tokenizer

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(40)]
SPLITS = ("train", "exam", "test")
LEFT_OUT = ("missing", "not_text", "empty", "alike", "special_tokens", "too_long", "leaking", "unused")

TRIMMING = make_tokenizer(TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"))
"""Renders prompts alike that differ in outer spaces."""


def sides(task: CuratedTask) -> dict[str, list[dict[str, Any]]]:
    sizes = {"train": task.train_size, "exam": task.exam_prompts, "test": task.test_prompts}
    return {split: [task.row(split, i) for i in range(sizes[split])] for split in SPLITS}


def adds_up(counts: Mapping[str, int]) -> bool:
    return counts["read"] == sum(counts[name] for name in (*SPLITS, *LEFT_OUT))


def made(rows: Any = ROWS, *, fit: Any = None, most: int | None = None, **options: Any) -> CuratedTask:
    task = CuratedTask(rows, **{"exam_prompts": 4, "test_prompts": 6, **options})
    if fit is not None:
        task.fit(fit, most)
    return task


# -- division ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["a", " a", "b", "b ", "c", "d", " e ", "e", "f", "g", "h"]), min_size=8, max_size=40),
    st.integers(1, 2),
    st.integers(0, 2),
)
def test_no_rendered_prompt_is_on_two_sides(questions: list[str], exam: int, test: int) -> None:
    rows = [{"question": question, "answer": str(i)} for i, question in enumerate(questions)]
    if len({question.strip() for question in questions}) <= exam + test:
        with pytest.raises(EnvError, match=r"different prompts|rows to train"):
            made(rows, exam_prompts=exam, test_prompts=test, fit=TRIMMING)
        return
    try:
        task = made(rows, exam_prompts=exam, test_prompts=test, fit=TRIMMING)
    except EnvError:
        pytest.fail("there are enough prompts")
    found = sides(task)
    prompts = {
        split: [tuple(render_prompt(TRIMMING, task.messages(row))) for row in rows] for split, rows in found.items()
    }
    assert not set(prompts["train"]) & (set(prompts["exam"]) | set(prompts["test"]))
    assert not set(prompts["exam"]) & set(prompts["test"])
    assert (
        (len(set(prompts["exam"])), len(set(prompts["test"])))
        == (exam, test)
        == (len(found["exam"]), task.test_prompts)
    )
    assert adds_up(task.counts)
    assert task.counts["repeated"] == len(prompts["train"]) - len(set(prompts["train"]))
    assert sum(map(len, found.values())) + task.counts["leaking"] == len(rows)


def test_before_fitting_prompts_are_compared_as_conversations() -> None:
    rows = [*ROWS, *({**row, "question": f" {row['question']}"} for row in ROWS)]
    task = made(rows)
    assert task.counts["leaking"] == 0
    task.fit(TRIMMING, None)
    assert task.counts["leaking"] == 10
    assert task.counts["repeated"] == 30
    assert adds_up(task.counts)


def test_panels_depend_neither_on_the_order_of_rows_nor_on_the_seed() -> None:
    task = made()
    panels = {split: {row["question"] for row in rows} for split, rows in sides(task).items() if split != "train"}
    for other in (made(ROWS[::-1]), made(seed=7), made(Dataset.from_list(ROWS))):
        found = sides(other)
        assert {split: {row["question"] for row in found[split]} for split in panels} == panels
    larger = sides(made(exam_prompts=9))
    assert {row["question"] for row in larger["test"]} == panels["test"]
    assert {row["question"] for row in larger["exam"]} > panels["exam"]
    fewer = made([row for row in ROWS if row["question"] != "39+1="])
    assert len({row["question"] for row in sides(fewer)["test"]} & panels["test"]) >= 5


def test_training_rows_are_all_that_is_left_in_an_order_of_the_seed() -> None:
    task = made()
    epochs = [[task.row("train", 30 * epoch + i)["question"] for i in range(30)] for epoch in range(3)]
    held_out = {row["question"] for split in ("exam", "test") for row in sides(task)[split]}
    assert len(held_out) == 10
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(row["question"] for row in ROWS) - held_out}
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = made()
    assert again.row("train", 77)["question"] == epochs[2][17]
    assert made(seed=1).row("train", 0)["question"] != epochs[0][0]


def test_datasets_of_their_own_lose_nothing_to_training() -> None:
    exam, test = ROWS[:8], ROWS[4:14]
    task = made(ROWS, exam=exam, test=test)
    found = sides(task)
    held_out = {row["question"] for row in ROWS[:14]}
    assert {row["question"] for row in found["train"]} == {row["question"] for row in ROWS} - held_out
    assert {row["question"] for row in found["exam"]} <= {row["question"] for row in ROWS[:4]}
    assert {row["question"] for row in found["test"]} <= {row["question"] for row in test}
    assert (len(found["exam"]), len(found["test"])) == (4, 6)
    assert adds_up(task.counts)
    # 14 rows of training, 4 of the exam that are in the test; 4 of the test are not needed
    counts = {"read": 58, "train": 26, "exam": 4, "test": 6, "leaking": 18, "unused": 4}
    assert {name: count for name, count in task.counts.items() if count} == counts


def test_one_panel_of_its_own_and_one_of_the_training_rows() -> None:
    task = made(ROWS[:30], test=ROWS[25:])
    found = {split: {row["question"] for row in rows} for split, rows in sides(task).items()}
    assert found["train"] | found["exam"] == {row["question"] for row in ROWS[:25]}
    assert found["test"] <= {row["question"] for row in ROWS[25:]}
    assert adds_up(task.counts)


def test_a_mixture_gives_every_panel_its_shares() -> None:
    other = [{"question": f"{i}*1=", "answer": str(i)} for i in range(40)]
    task = made(mix([(ROWS, 3), (other, 1)]), exam_prompts=8, test_prompts=4)
    found = {split: sum("+" in row["question"] for row in sides_of(task, split)) for split in ("exam", "test")}
    assert found == {"exam": 6, "test": 3}
    train = [task.row("train", i)["question"] for i in range(1000)]
    assert sum("+" in question for question in train) == 750
    assert task.train_size is None
    assert adds_up(task.counts)


def sides_of(task: CuratedTask, split: str) -> list[dict[str, Any]]:
    return [task.row(split, i) for i in range(task.panel_size(split))]


# -- malformed rows ----------------------------------------------------------------------------------------------------


def test_a_malformed_row_stops_by_default_and_changes_no_panel_where_it_is_dropped() -> None:
    bad = {"question": None, "answer": "1"}
    with pytest.raises(EnvError, match=r"row 40.*bad_rows"):
        made([*ROWS, bad])
    with pytest.raises(EnvError, match=r"row 40.*1 more of 42"):
        made([*ROWS, bad, bad])
    clean, task = made(), made([*ROWS[:20], bad, *ROWS[20:]], bad_rows="drop")
    assert (task.counts["read"], task.counts["train"], task.counts["missing"]) == (41, 30, 1)
    assert adds_up(task.counts)
    assert all(sides_of(task, split) == sides_of(clean, split) for split in ("exam", "test"))


@pytest.mark.parametrize("purpose", ["sft", "reasoning"])
def test_a_row_that_opens_again_what_the_template_has_closed_stops_before_training(purpose: str) -> None:
    closes = make_tokenizer(TEMPLATE.replace("%}<assistant>{%", "%}<assistant><think>\n</think>\n{%"))
    thinks = {"question": "7+7=", "answer": "<think>\nso\n</think>\n14"}
    task = made([*ROWS, thinks], purpose=purpose, grader=exact_match)
    if purpose == "reasoning":
        task.fit(closes, None)  # nobody learns it
    else:
        with pytest.raises(
            EnvError, match=r"row 40 of the train dataset: expected an answer that goes on .*'<think>' again"
        ):
            task.fit(closes, None)


def test_the_length_is_that_of_the_templated_prompt(tokenizer) -> None:
    longest = max(len(render_prompt(tokenizer, [{"role": "user", "content": row["question"]}])) for row in ROWS)
    assert longest == 8  # three markers around five characters
    assert made(fit=tokenizer, most=8).counts["too_long"] == 0
    task = made(fit=tokenizer, most=7, exam_prompts=2, test_prompts=3)
    assert task.counts["too_long"] == 30
    assert {len(row["question"]) for rows in sides(task).values() for row in rows} == {4}


def test_panels_shrink_to_the_rows_that_there_are() -> None:
    with pytest.warns(UserWarning, match=r"40 rows.* 128 and 400"):
        task = made(exam_prompts=128, test_prompts=400, shrink_panels=True)
    found = {split: {row["question"] for row in rows} for split, rows in sides(task).items()}
    assert (task.exam_prompts, task.test_prompts) == (len(found["exam"]), len(found["test"])) == (10, 10)
    assert not found["train"] & (found["exam"] | found["test"])
    assert not found["exam"] & found["test"]
    assert len(found["train"]) == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.fit(None, None)  # is said once


def test_panels_of_datasets_for_them_shrink_to_what_these_have() -> None:
    few = [{"question": f"special {i}", "answer": "x"} for i in range(5)]
    with pytest.warns(UserWarning, match="5 are used for exams and 20 for the test"):
        task = made(exam=few, exam_prompts=128, test_prompts=400, shrink_panels=True)
    assert [task.row("exam", i)["question"][:7] for i in range(5)] == ["special"] * 5


def test_each_dataset_of_a_mixture_gives_its_share_of_smaller_panels() -> None:
    mixed = mix([(rows_called("a", 90), 2), (rows_called("b", 10), 1)])
    with pytest.warns(UserWarning, match="100 rows"):
        task = CuratedTask(mixed, shrink_panels=True)
    for split in ("exam", "test"):
        names = [task.row(split, i)["question"][0] for i in range(task.panel_size(split))]
        assert len(names) >= 2
        assert abs(names.count("a") - 2 * names.count("b")) <= 2
    assert {task.row("train", position)["question"][0] for position in range(20)} == {"a", "b"}


def rows_called(name: str, count: int) -> list[dict[str, str]]:
    return [{"question": f"{name}{i}", "answer": "x"} for i in range(count)]


def test_hardly_any_row_is_refused() -> None:
    with pytest.raises(EnvError, match=r"400 .*, found 5"):
        CuratedTask(rows_called("a", 5), shrink_panels=True)


def test_nothing_left_is_told(tokenizer) -> None:
    with pytest.raises(EnvError, match=r"none: too long 40, read 40; row 0 of .* a prompt of 7 tokens, and 3 fit; "):
        made(fit=tokenizer, most=3)
    rows = [{**row, "question": f"<user>{row['question']}<end>"} for row in ROWS]
    why = (
        r"none: special tokens 40, read 40; row 0 of .* special token '<user>' in '<user>0\+.*; remove it, as the chat"
    )
    with pytest.raises(EnvError, match=why):
        made(rows, fit=tokenizer)
    with pytest.raises(EnvError, match=r"too long 40, empty 1, read 41; row 0 of .* 3 fit; .*; row 40 of .* text"):
        made([*ROWS, {"question": " ", "answer": "1"}], fit=tokenizer, most=3, bad_rows="drop")
    with pytest.raises(EnvError, match=r"37 .*exam .*, found 34"):
        made(exam_prompts=37)
    with pytest.raises(EnvError, match=r"found none .*exam \(34\)"):
        made(exam_prompts=34)


def test_datasets_of_different_forms_are_refused() -> None:
    with pytest.raises(EnvError, match=r"question and answer .*prompt and answer "):
        made(ROWS, exam=[{"prompt": "1", "answer": "2"}])
    with pytest.raises(EnvError, match="columns"):
        made(mix([(ROWS, 1), ([{"prompt": "1", "answer": "2"}], 1)]))


# -- what tasks and environments make of the forms --------------------------------------------------------------------

TALK = [
    {"messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}], "level": i}
    for i in range(20)
]


def test_columns_and_prompts_reach_the_grader() -> None:
    seen = {}

    def by_level(prompts, completions, level, answer):
        seen.update(prompts=prompts, level=level, answer=answer)
        return [float(lv == 0) for lv in level]

    task = made([{**row, "prompt": row["question"]} for row in ROWS], columns={"task": "question"}, grader=by_level)
    rows = sides_of(task, "exam")
    assert task.rewards(["x"] * 4, rows) == [float(row["level"] == 0) for row in rows]
    assert seen["prompts"] == [row["task"] for row in rows] == [row["prompt"] for row in rows]
    assert seen["level"] == [row["level"] for row in rows]
    assert task.grader == "by_level"


def test_several_graders_are_a_list_as_in_trl() -> None:
    def short(completions, **columns):
        return [1.0 / len(text) for text in completions]

    def shouted(text: str) -> str:
        """Shout."""
        return text.upper()

    graders = [exact_match, (short, 0.5)]
    gym = ReasoningGym(ROWS, ROWS, TRIMMING, graders, None)
    for task in (
        made(grader=graders),
        gym.task,
        GradedTask(made(), graders),
        ToolEnv(ROWS, [shouted], grader=graders).task,
    ):
        row = task.row("exam", 0)
        found = task.grade([row["answer"]], [row])
        assert found.scores == {"exact_match": [1.0], "short": [1.0 / len(row["answer"])]}
        assert found.rewards == [1.0 + 0.5 / len(row["answer"])]
    assert GradedTask(made(), graders).weights == {"exact_match": 1.0, "short": 0.5}
    with pytest.raises(EnvError, match="answer or completion or chosen"):  # which exact_match needs
        made([{"prompt": row["question"]} for row in ROWS], grader=graders)
    for wrong in ([], [1], {"a": 2}):
        with pytest.raises(ConfigError, match=r"grader"):
            made(grader=wrong)


def test_without_answers_another_grader_is_needed() -> None:
    prompts = [{"prompt": row["question"]} for row in ROWS]
    with pytest.raises(EnvError, match="answer or completion or chosen"):
        made(prompts)
    task = made(prompts, grader=lambda completion: float(len(completion)))
    row = task.row("train", 0)
    assert (row["question"], row["answer"]) == (row["prompt"], None)
    assert task.reward("12345", row) == 5.0


def test_answers_of_any_type_are_for_own_graders() -> None:
    numbers = [{**row, "answer": i} for i, row in enumerate(ROWS)]
    task = made(numbers, grader=lambda completion, answer: float(int(completion) == answer))
    row = task.row("exam", 0)
    assert task.reward(str(row["answer"]), row) == 1.0
    with pytest.raises(EnvError, match=r"row 0 .* column answer, found 0"):
        made(numbers)


def test_conversations_are_put_as_they_are(tokenizer) -> None:
    task = made(TALK, fit=tokenizer)
    row = task.row("exam", 0)
    assert task.messages(row) == row["messages"][:1]
    assert (row["question"], row["answer"]) == (row["messages"][0]["content"], row["messages"][1]["content"])
    assert task.reward(row["answer"], row) == 1.0
    with pytest.raises(ConfigError, match=r"holds conversations, .* conversation_template"):
        made(TALK, conversation_template=[{"role": "user", "content": "{question}"}])


def test_a_template_is_filled_with_the_prompt_of_any_name() -> None:
    template = [{"role": "system", "content": "Level {level}"}, {"role": "user", "content": "{question}!"}]
    task = made(ROWS, columns={"prompt": "question"}, conversation_template=template)
    row = task.row("train", 0)
    assert [m["content"] for m in task.messages(row)] == [f"Level {row['level']}", f"{row['prompt']}!"]


def test_demonstrations_and_pairs_come_from_rows(tokenizer) -> None:
    def told(examples):
        return [tokenizer.decode(example.ids) for example in examples]

    thought = [
        {"prompt": row["question"], "completion": f"so {row['answer']}", "answer": row["answer"]} for row in ROWS
    ]
    task = SFTTask(made(thought, purpose="sft"))
    task.fit(tokenizer, None)
    row = task.row("train", 0)
    assert told(task.examples(tokenizer, row)) == [f"<user>{row['prompt']}<end><assistant>so {row['answer']}<end>"]
    assert task.reward(row["answer"], row) == 1.0
    assert (task.train_size, task.counts["train"], task.exam_prompts) == (30, 30, 4)
    talk = SFTTask(made(TALK, purpose="sft"))
    row = talk.row("train", 0)
    assert told(talk.examples(tokenizer, row)) == [f"<user>{row['question']}<end><assistant>{row['answer']}<end>"]
    for pairs in (
        [{"prompt": row["question"], "chosen": row["answer"], "rejected": "?"} for row in ROWS],
        [{"chosen": f"{row['question']} {row['answer']}", "rejected": f"{row['question']} ?"} for row in ROWS],
        [
            {"chosen": m["messages"], "rejected": [m["messages"][0], {"role": "assistant", "content": "?"}]}
            for m in TALK
        ],
    ):
        task = PreferenceTask(made(pairs, purpose="preference"))
        row = task.row("train", 0)
        chosen, rejected = (text.split("<assistant>") for text in told(task.examples(tokenizer, row)))
        assert chosen[0] == rejected[0] == f"<user>{row['question']}<end>"
        assert chosen[1] == f"{row['answer']}<end>"
        assert rejected[1].strip() == "?<end>"


@pytest.mark.processes
def test_environments_take_files_and_mixtures(tokenizer, tmp_path) -> None:
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("question,answer\n" + "".join(f"{i}+2=,{i + 2}\n" for i in range(8)))
    mixture = mix([(tmp_path / "rows.parquet", 1), (tmp_path / "rows.csv", 1)])
    env = ReasoningGym(mixture, str(tmp_path / "rows.csv"), tokenizer, lambda completion: 1.0, None)
    questions = [prompt["question"] for _ in range(125) for prompt in env.reset()]
    assert sum(question.endswith("+2=") for question in questions) == 500
    with env.eval_mode():
        assert [prompt["question"] for prompt in env.reset()] == [f"{i}+2=" for i in range(8)]
    talk = SFTGym(TALK, mixture, tokenizer, data_batch_size_per_gpu=2)
    assert len(talk.reset()) == 2
    with talk.eval_mode():
        assert len(talk) == 48
        assert len(talk.reset()) == 2
    pairs = [{"chosen": "ask: yes", "rejected": "ask: no"}]
    batch = PreferenceGym(pairs, pairs, tokenizer, data_batch_size_per_gpu=1).reset()
    assert [tokenizer.decode(ids[:n]) for ids, n in zip(batch.ids, batch.lengths)] == [
        "<user>ask:<end><assistant> yes<end>",
        "<user>ask:<end><assistant> no<end>",
    ]


def test_an_environment_leaves_out_what_does_not_fit(tokenizer) -> None:
    rows = [*ROWS, {"question": "x" * 60, "answer": "1"}]
    task = made(rows)
    env = ReasoningGym.from_task(task, tokenizer, 30, max_context_length=20)
    assert task.counts["too_long"] == 1
    assert len({prompt["question"] for prompt in env.reset()}) == 30


def test_environments_check_all_rows_at_the_start(tokenizer) -> None:
    with pytest.raises(EnvError, match=r"row 40 of the test dataset: .* answer, found 5"):
        SFTGym(ROWS, [*ROWS, {"question": "a", "answer": 5}], tokenizer)
