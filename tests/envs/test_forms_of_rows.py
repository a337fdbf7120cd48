"""The forms of rows: what each says, which columns are read, and what is wrong with a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agilerl.envs.curation import RowFaultError, RowForm, form_of
from agilerl.errors import EnvError

ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1"}]
SAY = [{"role": "assistant", "content": "2"}]
NO = [{"role": "assistant", "content": "3"}]

READ = {
    "question and answer": ("reasoning", "text", {"question": "1+1", "answer": "2"}, ("1+1", "2", None)),
    "question alone": ("reasoning", "no", {"question": "1+1", "level": 3}, ("1+1", None, None)),
    "an answer of any type": ("reasoning", "any", {"question": "1+1", "answer": 2}, ("1+1", None, None)),
    "prompt": ("reasoning", "no", {"prompt": "1+1"}, ("1+1", None, None)),
    "prompt of messages": ("reasoning", "text", {"prompt": ASK, "answer": "2"}, (ASK, "2", None)),
    "completion as answer": ("reasoning", "text", {"prompt": ASK, "completion": SAY}, (ASK, "2", None)),
    "messages for rewards": ("reasoning", "text", {"messages": ASK + SAY}, (ASK, "2", None)),
    "messages without answer": ("reasoning", "no", {"messages": ASK}, (ASK, None, None)),
    "pairs for rewards": (
        "reasoning",
        "text",
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        ("1+1", "2", None),
    ),
    "whole pairs for rewards": (
        "reasoning",
        "text",
        {"chosen": ASK + SAY, "rejected": ASK + NO},
        (ASK, "2", None),
    ),
    "completion": ("sft", "no", {"prompt": "1+1", "completion": "2"}, ("1+1", "2", None)),
    "completion before answer": (
        "sft",
        "no",
        {"prompt": "1", "completion": "so 2", "answer": "2"},
        ("1", "so 2", None),
    ),
    "messages before prompt": ("sft", "no", {"prompt": "1+1", "messages": ASK + SAY}, (ASK, "2", None)),
    "question for imitation": ("sft", "no", {"question": "1+1", "answer": "2"}, ("1+1", "2", None)),
    "pair": ("preference", "no", {"prompt": "1+1", "chosen": "2", "rejected": "3"}, ("1+1", "2", "3")),
    "pair of messages": ("preference", "no", {"prompt": ASK, "chosen": SAY, "rejected": NO}, (ASK, "2", "3")),
    "pair that repeats": (
        "preference",
        "no",
        {"prompt": ASK, "chosen": ASK + SAY, "rejected": ASK + NO},
        (ASK, "2", "3"),
    ),
    "pair with a question": (
        "preference",
        "no",
        {"question": "1+1", "chosen": "2", "rejected": "3"},
        ("1+1", "2", "3"),
    ),
    "implicit prompt": ("preference", "no", {"chosen": ASK + SAY, "rejected": ASK + NO}, (ASK, "2", "3")),
    "implicit text": (
        "preference",
        "no",
        {"chosen": "Q: 1+1\n\nA: 22", "rejected": "Q: 1+1\n\nA: 23"},
        ("Q: 1+1\n\nA:", " 22", " 23"),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_form_is_read_as_it_is(name: str) -> None:
    purpose, needs, row, expected = READ[name]
    sample = form_of(list(row), purpose, "the dataset", needs=needs).read(row)
    assert (sample.prompt, sample.response, sample.rejected) == expected


def test_the_question_of_a_conversation_is_its_last_message() -> None:
    assert form_of(["messages"], "reasoning", "x").read({"messages": ASK + SAY}).question == "1+1"


WORDS = st.lists(st.sampled_from(["ab", "a", "b", " ", "\n", "no", "x"]), max_size=8).map("".join)


@given(WORDS, WORDS, WORDS)
def test_texts_with_a_common_beginning_are_divided_without_loss(shared: str, chosen: str, rejected: str) -> None:
    row = {"chosen": shared + chosen, "rejected": shared + rejected}
    try:
        sample = RowForm(None, "chosen", pairs=True).read(row)
    except RowFaultError:
        return
    assert sample.prompt + sample.response == row["chosen"]
    assert sample.prompt + sample.rejected == row["rejected"]
    assert sample.prompt.strip()
    assert sample.response[0].isspace()  # no word is divided
    assert sample.response.strip() != sample.rejected.strip() or sample.response != sample.rejected


@pytest.mark.parametrize(
    ("purpose", "needs", "columns", "message"),
    [
        ("reasoning", "no", ["Question", "answer"], r"column question or prompt or messages .* found .* 'Question'"),
        ("reasoning", "text", ["question", "solution"], r"column answer or completion or chosen .* found question"),
        ("sft", "no", ["text"], r"x has whole texts .* train on them with SFTGym"),
        ("sft", "no", ["text", "answer"], r"column messages or prompt or question .* found answer, text; .* column"),
        ("sft", "no", ["prompt", "text"], "column completion or answer or chosen in x"),
        ("preference", "no", ["prompt", "chosen"], r"column rejected .* found chosen, prompt"),
        ("preference", "no", ["prompt", "Chosen", "rejected"], r"column chosen .* 'Chosen'?"),
    ],
)
def test_a_missing_column_is_told_with_the_nearest(purpose: str, needs: str, columns: list[str], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        form_of(columns, purpose, "x", needs=needs)


QA, TALK, PAIR = RowForm("question", "answer"), RowForm("messages", "messages"), RowForm("prompt", "chosen", pairs=True)
ALONE = RowForm(None, "chosen", pairs=True)


@pytest.mark.parametrize(
    ("form", "row", "kind", "message"),
    [
        (QA, {"answer": "2"}, "missing", "column question, found no such column"),
        (QA, {"question": None, "answer": "2"}, "missing", "question, found None"),
        (QA, {"question": "1", "answer": None}, "missing", "answer, found None"),
        (QA, {"question": 5, "answer": "2"}, "not_text", "question, found 5"),
        (QA, {"question": "1", "answer": 2.5}, "not_text", "answer, found 2.5"),
        (QA, {"question": ["1"], "answer": "2"}, "not_text", r"question, found \['1'\]"),
        (QA, {"question": " \n", "answer": "2"}, "empty", r"question, found ' \\n'"),
        (QA, {"question": "1", "answer": ""}, "empty", "answer, found ''"),
        (QA, {"question": [], "answer": "2"}, "empty", r"column question, found \[\]"),
        (QA, {"question": "a\ud800", "answer": "2"}, "not_text", "half of a character"),
        (RowForm("question", "answer", "any"), {"question": "1", "answer": None}, "missing", "answer, found None"),
        (
            RowForm("question", grades_text=True),
            {"question": "1", "answer": 5},
            "not_text",
            r"text .* column answer, found 5",
        ),
        (TALK, {"messages": "hello"}, "not_text", "column messages, found 'hello'"),
        (TALK, {"messages": [{"role": "user"}]}, "not_text", "in the column messages"),
        (TALK, {"messages": [{"role": "user", "content": None}]}, "not_text", "with texts in the column messages"),
        (TALK, {"messages": ASK}, "missing", "ends with the assistant"),
        (TALK, {"messages": SAY}, "missing", "the assistant's answer to a message"),
        (TALK, {"messages": [*ASK, {"role": "assistant", "content": ""}]}, "empty", "in the last message"),
        (TALK, {"messages": [*ASK, {**SAY[0], "tool_calls": [{}]}]}, "not_text", "found tool calls"),
        (
            TALK,
            {"messages": [*ASK, {**SAY[0], "reasoning_content": "so"}]},
            "not_text",
            "found reasoning_content beside",
        ),
        (ALONE, {"chosen": ASK + SAY, "rejected": [*ASK, {**SAY[0], "thinking": "so"}]}, "not_text", "found thinking"),
        (PAIR, {"prompt": "1", "chosen": "2", "rejected": "2"}, "alike", r"chosen and rejected .* found '2'"),
        (PAIR, {"prompt": "1", "chosen": ASK, "rejected": "2"}, "not_text", "one message of the assistant in"),
        (PAIR, {"prompt": "1", "chosen": "2", "rejected": None}, "missing", "column rejected, found None"),
        (ALONE, {"chosen": "2", "rejected": "3"}, "missing", "chosen and rejected .* column prompt"),
        (ALONE, {"chosen": ASK + SAY, "rejected": [*SAY, *NO]}, "missing", "chosen and rejected .*last message"),
        (ALONE, {"chosen": SAY, "rejected": NO}, "missing", "chosen and rejected .*last message"),
        (ALONE, {"chosen": ASK + SAY, "rejected": ASK + SAY}, "alike", "to differ"),
        (ALONE, {"chosen": "a b", "rejected": "a b"}, "alike", "to differ"),
        (ALONE, {"chosen": "a b", "rejected": "a "}, "empty", "after the shared beginning"),
        (ALONE, {"chosen": ASK, "rejected": [ASK[0], ASK[0]]}, "missing", "the assistant"),
    ],
)
def test_what_is_wrong_with_a_row(form: RowForm, row: dict, kind: str, message: str) -> None:
    with pytest.raises(RowFaultError, match=message) as caught:
        form.read(row)
    assert caught.value.kind == kind
