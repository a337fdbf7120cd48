import pytest
from datasets import Dataset

from agilerl.envs.datasets import DatasetTask, filled
from agilerl.errors import ConfigError, EnvError, RewardError

ROWS = [{"question": f"{i} + {i}", "answer": str(2 * i), "level": i % 2} for i in range(10)]


def exact(completion, answer, question):
    return float(completion == answer)


@pytest.mark.parametrize("wrap", [list, tuple, Dataset.from_list])
def test_each_epoch_shows_every_row_once_in_another_order(wrap):
    task = DatasetTask(wrap(ROWS), wrap(ROWS[:3]), reward_fn=exact)
    epochs = [[task.row("train", 10 * epoch + i)["question"] for i in range(10)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row["question"] for row in ROWS)
    assert epochs[0] != epochs[1]
    again = DatasetTask(ROWS, ROWS, reward_fn=exact)
    assert again.row("train", 13)["question"] == epochs[1][3]
    assert again.row("train", 3)["question"] == epochs[0][3]
    other = DatasetTask(ROWS, ROWS, reward_fn=exact, seed=43)
    assert [other.row("train", i)["question"] for i in range(10)] != epochs[0]


def test_panels_keep_their_order_and_their_columns():
    task = DatasetTask(ROWS, ROWS[:3], ROWS[3:8], reward_fn=exact)
    assert [task.row("exam", i) for i in range(3)] == ROWS[:3]
    assert [task.row("test", i) for i in range(5)] == ROWS[3:8]
    assert (task.train_size, task.exam_prompts, task.test_prompts) == (10, 3, 5)
    with pytest.raises(EnvError, match=r"0 to 2 .*exam .*found 3"):
        task.row("exam", 3)


def test_template_is_filled_with_columns():
    template = [{"role": "system", "content": "Level {level}."}, {"role": "user", "content": "{question} = ?"}]
    task = DatasetTask(ROWS, ROWS, reward_fn=exact, conversation_template=template)
    assert task.messages(ROWS[3]) == [
        {"role": "system", "content": "Level 1."},
        {"role": "user", "content": "3 + 3 = ?"},
    ]


def test_braces_in_questions_and_templates_survive():
    row = {"question": "the set {answer} {x} {0}", "answer": "7"}
    (message,) = filled([{"role": "user", "content": "{question} as {{json}} {}: {answer}"}], row)
    assert message["content"] == "the set {answer} {x} {0} as {{json}} {}: 7"


def test_rewards_come_from_the_function_with_all_columns():
    calls = []

    def by_level(prompts, completions, answer, level):
        calls.append(prompts)
        return [None if lv else float(c == a) for c, a, lv in zip(completions, answer, level)]

    task = DatasetTask(ROWS, ROWS, reward_fn=by_level)
    assert task.rewards(["0", "2", "5"], ROWS[:3]) == [1.0, None, 0.0]
    assert calls == [["0 + 0", "1 + 1", "2 + 2"]]
    assert DatasetTask(ROWS, ROWS, reward_fn=exact).reward("4", ROWS[2]) == 1.0


def test_a_failing_reward_function_is_not_silent():
    def broken(completion, answer, question):
        raise KeyError(answer)

    with pytest.raises(RewardError, match="broken raised KeyError"):
        DatasetTask(ROWS, ROWS, reward_fn=broken).rewards(["0", "1"], ROWS[:2])


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


def test_a_row_without_an_answer_is_named():
    with pytest.raises(EnvError, match=r"row 2 of the exam dataset: .* answer, found None"):
        DatasetTask(ROWS, [*ROWS[:2], {"question": "?", "answer": None}], reward_fn=exact)
