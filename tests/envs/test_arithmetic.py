"""The two datasets that need no reasoning_gym are reasoning_gym's own, to the bit."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.envs import arithmetic
from tests.training.small_runs import environment

reasoning_gym = pytest.importorskip("reasoning_gym")

SETTINGS = [
    ("gcd", {}),
    ("gcd", {"max_value": 60}),
    ("gcd", {"min_numbers": 2, "max_numbers": 5, "min_value": 3, "max_value": 12}),
    ("chain_sum", {}),
    ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    ("chain_sum", {"min_terms": 1, "max_terms": 4, "max_digits": 6, "allow_negation": True}),
]


@pytest.mark.parametrize(("name", "params"), SETTINGS)
def test_questions_answers_and_metadata_are_the_same(name: str, params: dict[str, object]) -> None:
    for seed in (0, 42, 2**40):
        ours = arithmetic.create_dataset(name, seed=seed, size=200, **params)
        theirs = reasoning_gym.create_dataset(name, seed=seed, size=200, **params)
        for index in range(200):
            assert repr(ours[index]) == repr(theirs[index])  # repr: 1 is not 1.0, a list is not a tuple


@pytest.mark.parametrize("name", arithmetic.DATASETS)
def test_parameters_and_what_they_refuse_are_the_same(name: str) -> None:
    from reasoning_gym.factory import DATASETS

    def declared(config: type) -> list[tuple[object, ...]]:
        return [(f.name, f.default) for f in fields(config)]

    assert declared(arithmetic.DATASETS[name][1]) == declared(DATASETS[name][1])
    for key, value in [(f.name, bad) for f in fields(DATASETS[name][1])[:4] for bad in (-1, 0, 1, 10**6)]:
        refused = []
        for create in (arithmetic.create_dataset, reasoning_gym.create_dataset):
            try:
                create(name, seed=0, size=1, **{key: value})
            except (AssertionError, ValueError) as error:
                refused.append(str(error))
        assert len(refused) in (0, 2)
        assert len(set(refused)) <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.none(), st.text(max_size=8), st.sampled_from(["7", "+7", "07", "7.0", "1,7", "x7y", "NaN", "sNaN", "1e9"])
    )
)
def test_scores_are_the_same(answer: str | None) -> None:
    for name in arithmetic.DATASETS:
        ours, theirs = (f(name, seed=0, size=1) for f in (arithmetic.create_dataset, reasoning_gym.create_dataset))
        for right in ("7", "-7", "12"):
            entry = {"answer": right}
            assert ours.score_answer(answer, entry) == theirs.score_answer(answer, entry)


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in MISSING else found(name, package)
sys.meta_path.insert(0, Missing())
"""


def without(missing: set[str], code: str, place: Path) -> str:
    """Return what a program prints that does not find these libraries."""
    program = f"MISSING = {missing!r}\n{WITHOUT}\n{code}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_without_reasoning_gym_the_two_work_and_others_say_what_to_install(tmp_path: Path) -> None:
    code = """
from agilerl.envs.procedural import Curriculum, ReasoningGymTask
from agilerl.errors import ConfigError
task = ReasoningGymTask("gcd", {"max_value": 60}, exam_prompts=20, test_prompts=20)
row = task.row("exam", 3)
print(row["question"], row["answer"], task.reward(row["answer"], row), task.reward("no", row))
large = ReasoningGymTask("gcd", {"max_value": 10**6}, exam_prompts=2, test_prompts=0)  # tried in a worker first
print(large.row("exam", 0)["question"])
for wrong in ({"name": "spell_backward"}, {"name": "gcd", "curriculum": Curriculum()}):
    try:
        ReasoningGymTask(**wrong)
    except ConfigError as error:
        print(error)
"""
    first, second, unknown, curriculum = without({"reasoning_gym"}, code, tmp_path).splitlines()
    assert first.endswith("1.0 0.0")
    from agilerl.envs.procedural import ReasoningGymTask

    row = ReasoningGymTask("gcd", {"max_value": 60}, exam_prompts=20, test_prompts=20).row("exam", 3)
    assert first.startswith(f"{row['question']} {row['answer']} ")
    assert "Greatest Common Divisor" in second
    assert "pip install 'lora-evolution[tasks]'" in unknown
    assert "pip install 'lora-evolution[tasks]'" in curriculum


@pytest.mark.processes
def test_without_pycosat_only_zebra_puzzles_is_missing(tmp_path: Path) -> None:
    code = """
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.upstream import known_tasks
from agilerl.errors import EnvError
print(len(known_tasks()), ReasoningGymTask("lcm", exam_prompts=1, test_prompts=0).name)
try:
    ReasoningGymTask("zebra_puzzles", exam_prompts=1, test_prompts=0)
except EnvError as error:
    print(error)
"""
    works, missing = without({"pycosat"}, code, tmp_path).splitlines()
    count, name = works.split()
    assert (int(count) > 100, name) == (True, "lcm")
    assert "pip install pycosat" in missing
