"""Runs that cannot have an elite: the reason is said, and as early as it is known."""

from pathlib import Path

import pytest

from tests.cli.outcome import Agilerl
from tests.training.small_runs import SMALL, lines

pytestmark = pytest.mark.model

GRADERS = """
def never(completion, answer, question):
    return None


def in_training(prompts, completions, answer):
    return [float(len(c)) if len(completions) != 24 else None for c in completions]


def sometimes(prompts, completions, answer):
    return [1.0 if place % 2 else None for place, _ in enumerate(completions)]
"""
EVERY_STEP = (*SMALL, "training.max_steps=96", "training.evo_steps=1")


def graders(path: Path, name: str) -> tuple[str, ...]:
    path.write_text(GRADERS, encoding="utf-8")
    return (*EVERY_STEP, f"environment.graders=[{{name: '{path.name}:{name}'}}]", "--allow-code", "--out", "run")


def test_a_grader_without_any_grade_ends_the_run_at_the_first_exam(agilerl: Agilerl, tmp_path: Path) -> None:
    found = agilerl("train", *graders(tmp_path / "mine.py", "never"))
    assert (found.code, found.errors.count("\n")) == (2, 1)
    for word in ("error: ", "None", "all 8 of its exam", "0.0"):
        assert word in found.errors
    trained = [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert set(trained) == {1}


@pytest.mark.parametrize("name", ["in_training", "sometimes"])
def test_where_some_grade_was_given_the_run_goes_to_its_end(name: str, agilerl: Agilerl, tmp_path: Path) -> None:
    found = agilerl("train", *graders(tmp_path / "mine.py", name), "--quiet")
    assert found.code == 1
    assert "None" in found.errors
    assert (tmp_path / "run" / "summary.json").exists()


def test_time_that_is_up_before_the_first_iteration(agilerl: Agilerl, tmp_path: Path) -> None:
    found = agilerl("train", *EVERY_STEP, "training.max_seconds=0.001", "--quiet", "--out", "run")
    assert (found.code, found.errors.count("\n")) == (1, 1)
    assert "training.max_seconds" in found.errors
    again = agilerl("resume", "run", "--quiet")
    assert (again.code, again.errors) == (found.code, found.errors)
