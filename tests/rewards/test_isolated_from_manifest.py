"""A function of a manifest in a process of its own: what hangs costs one grade."""

import json
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.envs.core import grade_completions, waiting_graders
from agilerl.errors import ConfigError
from agilerl.training.tasks import task

GRADER = """
import os

def patient(completion, answer):
    while completion == "hang":
        pass
    return float(completion == answer)

def where(completion):
    return float(os.getpid())

class Exact:
    def __call__(self, completion, answer):
        return float(completion == answer)
"""
ROWS = [{"question": f"q{i}", "answer": "a"} for i in range(40)]


def manifest(folder: Path, *graders: dict[str, object]) -> Path:
    (folder / "own.py").write_text(GRADER)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    environment = {"dataset": "rows.jsonl", "graders": list(graders), "eval_prompts": 4, "test_prompts": 4}
    path = folder / "own.yaml"
    path.write_text(json.dumps({"environment": environment}))
    return path


@pytest.mark.processes
def test_what_hangs_has_no_grade_and_the_others_do(tmp_path: Path) -> None:
    path = manifest(tmp_path, {"name": "own.py:patient", "isolate": True, "timeout": 0.5, "label": "own"})
    made = task(load_manifest(path), allow_code=True)
    try:
        grades = grade_completions(made, ROWS[:3], ["a", "hang", "b"])
    finally:
        made.close()
    assert grades.rewards == [1.0, None, 0.0]
    assert grades.failures == {"own": [1]}


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.processes
def test_it_really_is_another_process(tmp_path: Path, isolate: bool) -> None:
    import os

    made = task(load_manifest(manifest(tmp_path, {"name": "own.py:where", "isolate": isolate})), allow_code=True)
    try:
        (reward,) = grade_completions(made, ROWS[:1], ["x"]).rewards
    finally:
        made.close()
    assert (reward == os.getpid()) is not isolate


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.processes
def test_workers_are_its_processes_or_threads_and_begin_early(tmp_path: Path, isolate: bool) -> None:
    grader = {"name": "own.py:patient", "isolate": isolate, "workers": 3, "label": "own"}
    made = task(load_manifest(manifest(tmp_path, grader, {"name": "exact_match"})), allow_code=True)
    try:
        (waiting,) = waiting_graders(made, exam=False)
        assert (waiting.workers, waiting.in_order, waiting.name) == (3, False, "own")
        assert grade_completions(made, ROWS[:3], ["a", "b", "a"]).scores["own"] == [1.0, 0.0, 1.0]
    finally:
        made.close()


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ({"name": "own.py:Exact", "isolate": True}, "isolate is for functions without params"),
        ({"name": "own.py:patient", "isolate": True, "params": {"answer": "a"}}, "isolate is for functions without"),
        ({"name": "exact_match", "isolate": True}, "isolate .* found 'exact_match'"),
        ({"name": "own.py:patient", "isolate": True, "timeout": 0}, "timeout"),
        ({"name": "own.py:patient", "workers": 0}, "workers"),
        ({"name": "exact_match", "workers": 2}, "workers .* found 'exact_match'"),
    ],
)
def test_what_cannot_be_isolated_is_a_sentence(tmp_path: Path, grader: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(load_manifest(manifest(tmp_path, grader)), allow_code=True)
