"""A user's mistake: one clear sentence on stderr, exit code 2, nothing left behind."""

import os
from pathlib import Path

import pytest

from agilerl.runs import RunDirectory
from tests.cli.outcome import Agilerl, Outcome
from tests.faults.unfinished import contents


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2
    assert outcome.results == ""
    assert outcome.errors.startswith("error: ")
    assert outcome.errors.count("\n") == 1
    assert "Traceback" not in outcome.errors
    for word in words:
        assert word in outcome.errors


BEFORE_THE_MODEL = {
    "value out of range": (["algorithm.lr=-1"], "algorithm.lr: input should be greater than 0, found -1"),
    "unknown task": (["environment.task=reasoning_gym:gdc"], "'gdc'; did you mean 'gcd'"),
    "missing model folder": (["network.pretrained_model_name_or_path=/no/such"], "no model folder at '/no/such'"),
    "population of 0": (["training.pop_size=0"], "training.pop_size: input should be greater than or equal to 1"),
    "start outside its range": (
        ["mutation.rl_hp_selection.lr={choices: [1e-4, 1e-3]}"],
        "excludes the start, algorithm.lr=1e-05, which is the default",
    ),
    "a setting without its section": (["lr=1e-3"], "did you mean 'algorithm.lr'?"),
    "a setting as an option": (["--max-steps", "3"], "settings are given as training.max_steps=..."),
    "code without --allow-code": (["environment.graders=[{name: 'mine.py:right'}]"], "give --allow-code"),
    "a game without its type": (["environment.env_id=agilerl/GuessTheNumber-v0"], "set environment.env_type=multiturn"),
    "tournament too large": (["selection_strategy.tournament_size=9"], "is above training.pop_size=4"),
    "no manifest": (["nothing.yaml"], "found nothing at 'nothing.yaml'"),
    "two manifests": (["a.yaml", "b.yaml"], "expected one manifest, found 'a.yaml', 'b.yaml'"),
    "a manifest with a newline": (["a\nb.yaml"], r"found nothing at 'a\nb.yaml'"),
    "escape codes": (["training.\x1b[31mred=1"], "unknown key"),
    "a very long override": ([f"environment.task={'y' * 50_000}"], "yyy... is unknown"),
    "a very long key": ([f"{'y' * 50_000}=1"], "unknown key 'yyy"),
    "a negative seed": (["--seed", "-1"], "Invalid value for '--seed'"),
    "two seeds": (["--seed", "3", "training.seed=4"], "found --seed 3 and training.seed as well"),
    "two seeds, one in its section": (
        ["--seed", "3", "training={seed: 4}"],
        "found --seed 3 and training.seed as well",
    ),
    "a seed that is no number": (["--seed", "x"], "Invalid value for '--seed'"),
    "a seed beyond 64 bits": (["--seed", str(2**70)], "training.seed: input should be less than or equal to"),
    "an option without its value": (["--out"], "'--out' requires an argument"),
    "a run directory inside a file": (["--out", "/dev/null/x"], "'/dev/null' is not a directory"),
    "a file as run directory": (["--out", "/dev/null"], "found a file; choose another path"),
    "a name too long for a directory": (["--out", "x" * 300], "File name too long"),
    "a task of hardly any question": (
        ["environment.task=reasoning_gym:count_bits", "environment.params={min_n: 1, max_n: 4}"],
        "expected 200 exam and 400 test questions",
    ),
}


@pytest.mark.parametrize("mistake", BEFORE_THE_MODEL)
def test_mistakes_found_before_the_model_is_loaded(mistake: str, agilerl: Agilerl, tmp_path: Path) -> None:
    arguments, words = BEFORE_THE_MODEL[mistake]
    assert_refused(agilerl("train", *arguments), words)
    assert list(tmp_path.iterdir()) == []


WITH_THE_MODEL = {
    "prompt longer than the context": (
        ["algorithm.max_model_len=8", "algorithm.max_output_tokens=4"],
        "expected a prompt of at most 7 tokens",
    ),
    "no such layers": (["network.lora_config.target_modules=[nothing]"], "matches no layer of the model"),
    "a role that the template refuses": (
        ["environment.conversation_template=[{role: wizard, content: '{question}'}]"],
        "found wizard",
    ),
    "a hub name, and no network": (["network.pretrained_model_name_or_path=some/model"], "couldn't connect"),
    "a population beyond the memory": (["training.pop_size=100000000"], "lower training.pop_size"),
}


@pytest.mark.model
@pytest.mark.parametrize("mistake", WITH_THE_MODEL)
def test_mistakes_found_with_the_model(mistake: str, agilerl: Agilerl, tmp_path: Path) -> None:
    arguments, words = WITH_THE_MODEL[mistake]
    assert_refused(agilerl("train", *arguments, "--out", "run"), words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["report"], "Missing argument 'RUN'"),
        (["report", "nowhere"], "expected a run directory at nowhere, found nothing"),
        (["--bogus"], "No such option: --bogus"),
        (["resume", "runs/mine", "training.max_steps=9"], "network.adapter=runs/mine/elite training.max_steps=9"),
    ],
)
def test_other_commands(arguments: list[str], words: str, agilerl: Agilerl) -> None:
    assert_refused(agilerl(*arguments), words)


# -- the run directory ------------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone(agilerl: Agilerl, tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {}, 0) as run:
        run.finish({"generations": 1})
    before = contents(tmp_path)
    refused = agilerl("train", "--out", "run")
    assert_refused(refused, "holds a finished run; choose another directory")
    assert refused.output == ""  # no start is announced
    assert contents(tmp_path) == before


def test_other_peoples_files_are_left_alone(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("...")
    assert_refused(agilerl("train", "--out", "run"), "is not empty (found thesis.tex)")
    assert contents(tmp_path) == {"run/thesis.tex": b"..."}


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_place_that_cannot_be_written_to(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert_refused(agilerl("train", "--out", "closed/a/run"), "cannot be written to")
    assert list((tmp_path / "closed").iterdir()) == []
