"""Each cause of "why is it not learning?", provoked in a real run, is named in its report with the number.

So is what a bad grader pays for, once the policy has found it.
"""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from agilerl.cli.after import run_eval
from agilerl.cli.progress import log, watch
from agilerl.config.manifest import load_manifest
from agilerl.data import Trajectory
from agilerl.population import Population
from agilerl.report.load import load_run
from agilerl.runs.completions import completion_steps, read_completions
from agilerl.runs.hacks import hacks
from agilerl.training.evaluation import constant_answer
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.training.small_runs import SMALL

GRADERS = """
from zlib import crc32


def constant(completion):
    return 0.25


def falls_through(completion):
    if completion[:1] in "1234":
        return 1


def rarely(completion, answer):
    return float(crc32((completion + answer).encode()) % 40 == 0)


def noise(completion):
    return float(crc32(completion.encode()) % 7)


def failing(completion):
    if sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("the judge is away")
    return float(len(completion) % 2)


def harder(completion, question):
    return 1 / (crc32(question.encode()) % 4)


def first(completion):
    return float(completion[:1] in "1234")


def cut(completion_ids):
    return min(len(completion_ids), 8) / 8


def empty(completion):
    return 1 / (1 + len(completion.strip()))


def alike(completion):
    return float(completion == "1")


def copied(completion, question):
    return float(completion in question.split())


def right(completion, answer):
    return float(completion == answer)


def often(completion, question):
    return float(completion == "1101010"[crc32(question.encode()) % 7])
"""
TINY = (
    *("training.pop_size=1", "selection_strategy.name=none", "training.max_steps=96", "training.max_error_rate=1"),
    *("environment.data_batch_size_per_gpu=4", "environment.eval_prompts=4", "environment.test_prompts=2"),
    *("algorithm.group_size=4", "algorithm.batch_size=16"),
)
MANY_GROUPS = ("environment.data_batch_size_per_gpu=32", "algorithm.group_size=2", "training.max_steps=256")
MANY_STEPS = ("algorithm.lr=1e-2", "algorithm.clip_coef=0.001", "algorithm.batch_size=4", "algorithm.update_epochs=4")
PANELS = ("environment.eval_prompts=12", "environment.test_prompts=12")
CASES = [
    ("constant", (), "earned 0.25"),
    ("falls_through", (), "got no grade (the grader returned None ... and all others earned 1"),
    ("rarely", MANY_GROUPS, "of the groups all completions earned the same"),
    ("failing", (), "failing gave no grade to "),
    ("harder", PANELS, "of 12 test questions got no grade ... of 12 exam questions got no grade and are left out"),
    ("first", ("algorithm.max_output_tokens=1",), "100% of the completions were cut at the limit of 1 "),
    ("first", ("algorithm.max_output_tokens=1", "algorithm.mask_truncated=true"), "the gradient is 0"),
    ("noise", MANY_STEPS, "of the tokens were clipped"),
    ("first", ("algorithm.lr=1e-6",), "the learning rate is 1e-06, and 0.001 is usual"),
]


@pytest.mark.model
@pytest.mark.parametrize(("grader", "settings", "found"), CASES, ids=[case[2] for case in CASES])
def test_the_report_names_the_cause(grader: str, settings: tuple[str, ...], found: str, tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    reward = f"environment.graders=[{{name: '{tmp_path / 'graders.py'}:{grader}'}}]"
    session = build(load_manifest(None, [*TINY, reward, *settings]), allow_code=True)
    for _ in train(session, tmp_path / "run", command=["test"]):
        pass
    said = "\n".join(load_run(tmp_path / "run").symptoms)
    assert all(part in said for part in found.split(" ... "))


SUMS = (
    *("training.pop_size=1", "training.evo_steps=3", "selection_strategy.name=none", "algorithm.max_output_tokens=8"),
    *("environment.task=reasoning_gym:chain_sum", "environment.params={max_terms: 2, max_digits: 2}"),
    *("environment.data_batch_size_per_gpu=8", "environment.eval_prompts=4", "environment.test_prompts=12"),
    *("algorithm.group_size=8", "algorithm.batch_size=64", "algorithm.lr=1e-2", "training.max_steps=768"),
)
SENTENCES = {
    "cut": "of the paid completions were cut at the limit without the right answer",
    "empty": "of the paid completions are empty",
    "alike": "of the paid completions are one and the same text",
}


@pytest.mark.model
@pytest.mark.parametrize("kind", [*SENTENCES, "right"])
def test_a_hack_that_was_learned_is_an_alarm(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    reward = f"environment.graders=[{{name: '{tmp_path / 'graders.py'}:{kind}'}}]"
    session = build(load_manifest(None, [*SUMS, reward]), allow_code=True)
    screen = io.StringIO()
    watch(train(session, tmp_path / "run", command=["test"]), session, Console(file=screen, width=100))
    found = load_run(tmp_path / "run").symptoms
    alarms = {sentence: symptom for sentence, symptom in found.items() if symptom.name.startswith("paid though")}
    text, page = screen.getvalue(), (tmp_path / "run/report.html").read_text(encoding="utf-8")
    if kind == "right":
        assert not alarms
        assert "of the paid completions" not in text + page
        return
    (symptom,) = [s for sentence, s in alarms.items() if SENTENCES[kind] in sentence]
    assert len(symptom.samples) == 3
    assert text.count(SENTENCES[kind]) == 2  # while it runs, and at the end
    result = text[text.rindex("What may keep agents from learning") :]
    for sample in symptom.samples:
        assert f"{sample['question']} -> {sample['answer'] or '(empty)'} (reward 1; right: {sample['right']})" in result
        assert sample["question"] in page
    assert SENTENCES[kind] in page
    code = {"allow_code": True, "allow_addresses": False}
    shown = {"samples": 0, "temperature": 1.0, "full": 1.0, "with_base": True, "worst": 0}
    run_eval(tmp_path / "run", [], **shown, **code, quiet=False, as_json=False)
    assert SENTENCES[kind] in capsys.readouterr().out
    run_eval(tmp_path / "run", [], **shown, **code, quiet=False, as_json=True)
    assert f"paid though {kind}" in [one["name"] for one in json.loads(capsys.readouterr().out)["hacks"]]


@pytest.mark.model
def test_real_copies_are_an_alarm(tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    reward = f"environment.graders=[{{name: '{tmp_path / 'graders.py'}:copied'}}]"
    session = build(load_manifest(None, [*SUMS, reward]), allow_code=True)
    told: list[str] = []
    log(train(session, tmp_path / "run", command=["test"]), session, told.append)
    folder = tmp_path / "run/completions"
    first, *later = completion_steps(folder)
    paid = [row for step in later for row in read_completions(folder, step) if row["reward"]]  # what it would learn
    assert "paid though copied" in [symptom.name for symptom in hacks(paid, read_completions(folder, first))]
    advice = [line for line in map(json.loads, told) if line["event"] == "advice"]
    assert {line["text"] for line in advice} == set(load_run(tmp_path / "run").symptoms)
    assert all("samples" in line for line in advice)


# Right answer, answer given, how often.
CONSTANT = {
    "all alike": (
        [("1", "1", 40), ("2", "1", 60)],
        '100% of the elite\'s answers in the test are "1", and 40% of these',
    ),
    "most alike": ([("1", "1", 40), ("2", "1", 35), ("2", "2", 25)], '75% of the elite\'s answers in the test are "1"'),
    "the commonest of two classes": ([("1", "1", 90), ("2", "1", 10)], "100% of"),
    "two classes told apart": ([("1", "1", 88), ("1", "2", 2), ("2", "2", 9), ("2", "1", 1)], ""),
    "half right": ([("1", "1", 36), ("1", "2", 4), ("2", "1", 20), ("2", "2", 40)], ""),
    "too few": ([("1", "1", 2), ("2", "1", 3)], ""),
}


@pytest.fixture(scope="module")
def population() -> Population:
    return build(load_manifest(None, SMALL)).population


@pytest.mark.model
@pytest.mark.parametrize("base", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", CONSTANT)
def test_a_constant_answer_is_said_only_where_it_is_wrong(case: str, base: float, population: Population) -> None:
    counts, said = CONSTANT[case]
    population.examiner.answered = [
        Trajectory([1], [2], [True], None, [float(right == given)], text=f" {given}\n")
        for right, given, count in counts
        for _ in range(count)
    ]
    sentence = constant_answer(population, base)
    assert (said in sentence) if said and base < 1 else sentence == ""  # no agent is better than a base at 1.0
    # What got no grade is not wrong.
    population.examiner.answered = [Trajectory([1], [2], [True], None, [math.nan], text="1")] * 100
    assert constant_answer(population, base) == ""


@pytest.mark.model
def test_the_end_of_a_run_says_that_its_elite_gives_one_answer(tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    # The constant answer is right for some of the questions, as with a class that most rows have.
    reward = f"environment.graders=[{{name: '{tmp_path / 'graders.py'}:often'}}]"
    session = build(load_manifest(None, [*SUMS, reward, "environment.test_prompts=40"]), allow_code=True)
    screen = io.StringIO()
    watch(train(session, tmp_path / "run", command=["test"]), session, Console(file=screen, width=100))
    text = screen.getvalue()
    assert "The elite is better than the base" in text
    (said,) = [line for line in text.splitlines() if "of the elite's answers in the test are" in line]
    assert said.strip() in load_run(tmp_path / "run").symptoms
