"""`agilerl init`: three questions, and files that run at once."""

import json
import os
import pty
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agilerl.cli import main
from agilerl.cli.init import propose, sample_rows
from agilerl.config.manifest import load_manifest
from agilerl.runs.completions import read_completions
from tests.cli.outcome import Agilerl

SHORT = (
    *("training.pop_size=2", "training.max_steps=64", "training.evo_steps=1", "algorithm.group_size=4"),
    *("environment.data_batch_size_per_gpu=4", "environment.eval_prompts=8", "environment.test_prompts=8"),
)


@pytest.mark.model
def test_what_it_writes_passes_every_check_and_trains(agilerl: Agilerl, tmp_path: Path) -> None:
    made = agilerl("init")  # without a terminal nothing is asked
    assert (made.code, made.errors) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "my_reward.py", "my_rows.jsonl"]
    assert agilerl("train", "my.yaml", "--dry-run").code == 2  # its code runs only if that is allowed
    shown = " ".join(agilerl("train", "my.yaml", "--allow-code", "--dry-run").output.split())
    assert ", reward my_reward.py:reward" in shown
    assert re.search(r"tokens prompts 14, ", shown)
    plan = agilerl("train", "my.yaml", "--allow-code", "--dry-run", "--json")
    assert (plan.code, plan.errors) == (0, "")
    rows = json.loads(plan.output)["rows"]
    assert rows["read"] == len(sample_rows())
    assert rows["train"] > rows["read"] / 2
    assert agilerl("train", "my.yaml", *SHORT, "--allow-code", "--quiet", "--out", "run").errors == ""
    graded = read_completions(tmp_path / "run" / "completions", 1)
    own: dict[str, Any] = {}
    exec((tmp_path / "my_reward.py").read_text(), own)
    assert [row["reward"] for row in graded] == [own["reward"](row["completion"], row["answer"]) for row in graded]


def test_the_reward_function_that_it_writes_tells_answers_apart(agilerl: Agilerl, tmp_path: Path) -> None:
    agilerl("init", "--quiet")
    assert "# pop_size: 4 " in (tmp_path / "my.yaml").read_text()  # what the budget can pay for
    own: dict[str, Any] = {}
    exec((tmp_path / "my_reward.py").read_text(), own)
    assert [own["reward"](said, "7") for said in (" 7 ", "8", "-12", "seven", "")] == [1.0, 0.1, 0.1, 0.0, 0.0]


PROPOSED = {
    "numbers": (["1", "-2.5", "1,000", "$7"], ("accuracy", "answer_format: after")),
    "short texts": ([f"the number {k}" for k in range(9)], ("exact", "Give only the answer, without an explanation.")),
    "long texts": ([f"it was {k} and he said so to everyone" for k in range(9)], ("function", "")),
}


@pytest.mark.parametrize("case", PROPOSED)
def test_what_is_proposed_follows_from_the_answers(case: str) -> None:
    answers, (reward, asked) = PROPOSED[case]
    proposal = propose(answers, chats=True)
    assert proposal.reward == reward
    assert asked in "".join(proposal.form(reward))
    assert bool(asked) == bool(proposal.form(reward))
    assert propose(answers, chats=False).form(reward) == []  # the embedded model follows no instruction
    room = proposal.tokens - 128 * proposal.after
    assert max(map(len, answers)) / 2 < room <= max(map(len, answers)) / 2 + 12


@pytest.mark.model
def test_rows_are_read_and_the_base_is_asked(agilerl: Agilerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [{"problem": f"{i} + {i} =", "solution": str(2 * i)} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = agilerl("init", "--data", "rows.jsonl")
    assert (made.code, made.errors) == (0, "")
    read = "100 rows: all answers are numbers, so the reward accuracy is proposed\n"
    assert made.output.startswith(f"Columns: question from problem, answer from solution\n{read}")
    assert re.search(r"\nprompt +<bos>\d+ \+ \d+ =<sep> *\nanswer +.*, reward [01] *\n", made.output)
    assert re.search(r"\nexam +warning: with 20 questions an exam", made.output)
    assert re.search(r"\ntime +up to about [\d.]+ (s|min|h)", made.output)
    assert max(map(len, made.output.splitlines())) <= 80
    e = load_manifest(tmp_path / "my.yaml").environment
    assert [grader.name for grader in e.graders or ()] == ["accuracy"]
    assert (e.eval_prompts, e.test_prompts) == (20, 25)


@pytest.mark.model
def test_a_base_that_gets_nothing_right_is_a_warning(agilerl: Agilerl, tmp_path: Path) -> None:
    rows = [{"question": f"{i} * 12345678 =", "answer": str(12345678 * i)} for i in range(700000, 700100)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = " ".join(agilerl("init", "--data", "rows.jsonl").output.split())
    assert "base mean reward 0.000 of 128 answers" in words
    assert "warning all 128 answers to 16 training questions earn 0" in words
    assert "environment.params" not in words  # rows have none


@pytest.mark.model
def test_what_cannot_run_is_a_warning_and_the_files_are_there(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1,2\n")
    made = agilerl("init", "--data", "rows.csv", "--reward", "exact")
    assert made.code == 0
    assert "\nwarning  " in made.output
    assert (tmp_path / "my.yaml").is_file()


def test_a_model_on_the_hub_is_not_downloaded(agilerl: Agilerl) -> None:
    made = agilerl("init", "--model", "org/model")
    assert (made.code, made.errors) == (0, "")
    assert "\nmodel  not tried here, because it may have to be downloaded" in made.output


ANSWERED = {
    "a task": (["--data", "reasoning_gym:chain_sum", "--reward", "exact"], ["it.yaml"]),
    "rows": (["--data", "rows.csv", "--reward", "accuracy"], ["it.yaml"]),
    "the hub": (["--model", "org/some: model", "--data", "org/rows", "--reward", "exact"], ["it.yaml"]),
    "sample rows": (["--data", "sample", "--reward", "function"], ["it.yaml", "it_reward.py", "it_rows.jsonl"]),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_options_answer_the_questions(case: str, agilerl: Agilerl, tmp_path: Path) -> None:
    options, files = ANSWERED[case]
    (tmp_path / "rows.csv").write_text("question,answer\n" + "".join(f"{i} + 1?,{i + 1}\n" for i in range(80)))
    made = agilerl("init", "new/it.yaml", *options)
    assert (made.code, made.errors) == (0, "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == files
    config = load_manifest(tmp_path / "new" / "it.yaml")
    given = dict(zip(options[::2], options[1::2]))
    assert config.network.pretrained_model_name_or_path == given.get("--model", "embedded")
    e = config.environment
    if case == "a task":
        assert (e.task, e.dataset) == ("reasoning_gym:chain_sum", None)
    if case == "rows":
        assert e.dataset is not None
        assert Path(e.dataset[0].path) == tmp_path / "rows.csv"
        assert 2 <= e.eval_prompts < e.test_prompts <= 80 / 3
    if case == "the hub":
        assert e.dataset is not None
        assert e.dataset[0].path == "org/rows"
    graders = {"exact": [], "accuracy": ["accuracy"], "function": [f"{tmp_path / 'new' / 'it_reward.py'}:reward"]}
    assert [grader.name for grader in e.graders or []] == graders[given["--reward"]]


def test_columns_of_other_names_are_renamed(agilerl: Agilerl, tmp_path: Path) -> None:
    lines = "".join(f'{{"problem": "{i} + 1?", "solution": "{i + 1}", "level": "easy"}}\n' for i in range(80))
    (tmp_path / "rows.jsonl").write_text(lines)
    assert agilerl("init", "-y", "--data", "rows.jsonl").code == 0
    (rows,) = load_manifest(tmp_path / "my.yaml").environment.dataset or ()
    assert rows.columns == {"question": "problem", "answer": "solution"}
    assert agilerl("train", "my.yaml", "--allow-code", "--dry-run").code == 0


NAMED = {
    "in capitals": (("Question", "Answer"), ()),
    "by their last word": (("user_question", "gold answer"), ()),
    "by options": (("frage", "antwort"), ("--question", "frage", "--answer", "antwort")),
    "against their names": (("answer", "problem"), ("--answer", "problem", "--question", "answer")),
}


@pytest.mark.parametrize("case", NAMED)
def test_columns_are_recognised_or_named(case: str, agilerl: Agilerl, tmp_path: Path) -> None:
    (question, answer), options = NAMED[case]
    rows = "".join(f"{i} + 1?,{i + 1},{i}\n" for i in range(20))
    (tmp_path / "rows.csv").write_text(f"{question},{answer},id\n{rows}")
    made = agilerl("init", "--data", "rows.csv", "--quiet", *options)
    assert (made.code, made.errors) == (0, "")
    (dataset,) = load_manifest(tmp_path / "my.yaml").environment.dataset or ()
    assert dataset.columns == {"question": question, "answer": answer}


def test_few_rows_are_a_warning(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n" + "".join(f"{i} + 1?,{i + 1}\n" for i in range(10)))
    warning = (
        "warning: 10 rows leave only 6 distinct prompts for training, besides 2 for the exam and 2 for the test; give "
        "at least 26 more rows\n"
    )
    assert warning in agilerl("init", "--data", "rows.csv", "--model", "org/model").output


@pytest.mark.parametrize(("columns", "missing"), [("a,b,c", "question"), ("question,b,c", "answer")])
def test_rows_that_nothing_can_be_made_of_are_refused(
    columns: str, missing: str, agilerl: Agilerl, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(f"{columns}\n1,2,3\n")
    refused = agilerl("init", "-y", "--data", "rows.csv")
    assert (refused.code, refused.output) == (2, "")
    assert f"expected the column {missing}" in refused.errors
    assert f"--{missing} NAME" in refused.errors
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("taken", ["my.yaml", "my_rows.jsonl", "my_reward.py"])
def test_nothing_is_overwritten(taken: str, agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / taken).write_text("mine")
    refused = agilerl("init", "-y")
    assert refused.code == 2
    assert refused.errors.startswith(f"error: '{taken}' exists")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "mine")]


WRONG = {
    "no manifest": (["my.txt"], "expected a manifest NAME.yaml"),
    "no file": (["--data", "none.jsonl"], "expected a file of rows"),
    "a file elsewhere": (["--data", "/etc/passwd"], "in the folder of the manifest"),
    "an environment": (["--data", "agilerl/GuessTheNumber-v0"], "found an environment"),
    "a reward": (["--reward", "best"], "expected the reward as one of"),
    "a task": (["--data", "reasoning_gym:gdc"], "did you mean 'gcd'"),
    "nothing": (["--model", ""], "found an empty text"),
    "a column of no rows": (["--question", "q"], "are columns of rows, found 'sample'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers_write_nothing(case: str, agilerl: Agilerl, tmp_path: Path) -> None:
    arguments, words = WRONG[case]
    refused = agilerl("init", *arguments)
    assert (refused.code, refused.output) == (2, "")
    assert words in refused.errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_terminal_is_asked_and_asked_again(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("problem,solution\n" + "".join(f"{i} + 1?,{i + 1}\n" for i in range(80)))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        sys.argv = ["agilerl", "init"]
        for number, stream in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, stream, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
        try:
            main()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        os._exit(99)
    seen, start = "", 0
    for question, answer in (
        ("Model", ""),
        ("Data or task", "none.jsonl"),
        ("expected a file of rows", "rows.csv"),
        ("Reward", "exact"),
        ("Run it:", None),
    ):
        limit = time.monotonic() + 60
        while question not in seen[start:]:
            assert time.monotonic() < limit, seen
            seen += os.read(terminal, 4096).decode()
        start = seen.index(question, start) + len(question)
        if answer is not None:
            os.write(terminal, f"{answer}\n".encode())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)
    written = yaml.safe_load((tmp_path / "my.yaml").read_text())
    columns = {"question": "problem", "answer": "solution"}
    assert written["environment"]["dataset"] == {"path": "rows.csv", "columns": columns}
    assert "graders" not in written["environment"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "rows.csv"]
