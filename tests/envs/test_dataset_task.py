import pytest

from agilerl.envs.datasets import DatasetTask, fill_template
from agilerl.errors import ConfigError, EnvError

ROWS = [{"question": f"{i} + {i}", "answer": str(2 * i), "level": i % 2} for i in range(10)]


def exact(completion, answer, question):
    return float(completion == answer)


def test_panels_keep_their_order_and_their_columns():
    task = DatasetTask(ROWS, ROWS[:3], ROWS[3:8], reward_fn=exact)
    assert [task.row("exam", i) for i in range(3)] == ROWS[:3]
    assert [task.row("test", i) for i in range(5)] == ROWS[3:8]
    assert (task.train_size, task.exam_prompts, task.test_prompts) == (10, 3, 5)
    with pytest.raises(EnvError, match=r"0 to 2 .*exam .*found 3"):
        task.row("exam", 3)


def test_braces_in_questions_and_templates_survive():
    row = {"question": "the set {answer} {x} {0}", "answer": "7"}
    (message,) = fill_template([{"role": "user", "content": "{question} as {{json}} {}: {answer}"}], row)
    assert message["content"] == "the set {answer} {x} {0} as {{json}} {}: 7"


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (([], ROWS), EnvError, r"row .* train dataset, found none"),
        ((ROWS, []), EnvError, r"row .* exam dataset, found none"),
        (
            ([{"question": "a"}], ROWS),
            EnvError,
            r"column answer or completion or chosen .* train dataset, found question; .* column with",
        ),
        ((ROWS, [{"prompt": "a", "answer": "b"}]), EnvError, "question and answer in the train.*prompt and answer in"),
        ((ROWS, [{"Question": "a", "answer": "b"}]), EnvError, r"the exam dataset.*; .* 'Question'?"),
        ((["a"], ROWS), EnvError, r"row 0 of the train dataset: .* found 'a'"),
    ],
)
def test_bad_datasets(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        DatasetTask(*arguments, reward_fn=exact)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ([{"role": "user", "content": "{quesiton}"}], r"expected \{question\}.*placeholders \['quesiton'\]"),
        ([{"role": "user", "content": "{answer}"}], "otherwise every prompt is the same"),
        ([{"content": "{question}"}], "expected role and content"),
    ],
)
def test_bad_templates(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DatasetTask(ROWS, ROWS, reward_fn=exact, conversation_template=template)
