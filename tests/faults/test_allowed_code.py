"""``--allow-code``: what a manifest names runs when the user says so, and goes on as the code that it was."""

import hashlib
import importlib.util
import json
import py_compile
from pathlib import Path
from typing import Any

import pytest
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.errors import CheckpointError, ConfigError
from agilerl.safety.custom_code import file_of, load_code
from agilerl.training.saved import open_run
from agilerl.training.tasks import task
from tests.cli.outcome import Agilerl
from tests.faults.unfinished import Unfinished, change_config, change_json
from tests.training.small_runs import SMALL, lines

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH

REWARDS = '''
from dataclasses import dataclass


def vowels(completion, answer, scale=1.0):
    """Share of vowels."""
    return scale * sum(c in "aeiou" for c in completion) / max(len(completion), 1)


@dataclass
class Longer:
    than: int

    def __call__(self, completion):
        return float(len(completion) > self.than)


number = 5
'''

ENV = '''
class Echo:
    """Say what you are told."""

    max_turns = 2

    def __init__(self, word="yes"):
        self.word = word

    def reset(self, seed=None):
        return f"Say {self.word}.", {}

    def step(self, action):
        return "Again.", float(self.word in action), False, False, {}
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a manifest and code in it, which is not the working directory."""
    folder = tmp_path / "given"
    (folder / "parts").mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "parts" / "env.py").write_text(ENV)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def manifest(place: Path, **environment: Any) -> Path:
    path = place / "it.yaml"
    path.write_text(yaml.safe_dump({"environment": environment}))
    return path


GRADERS = [
    {"name": "rewards.py:vowels", "params": {"scale": 0.5}, "weight": 0.25},
    {"name": "rewards.py:Longer", "params": {"than": 3}, "label": "long"},
    {"name": "task"},
]


def test_graders_of_a_file_grade(place: Path) -> None:
    config = load_manifest(manifest(place, graders=GRADERS, fitness_grader="vowels"), SMALL)
    made = task(config, allow_code=True)
    row = made.row("train", 0)
    assert made.reward("aeio", row) == pytest.approx(0.25 * 0.5 + 1.0 + (row["answer"] == "aeio"))
    assert made.grade_exam(["ab"], [row]).rewards == [0.25]  # type: ignore[attr-defined]
    assert [g.called for g in config.environment.graders or ()] == ["vowels", "long", "task"]
    assert not list(place.rglob("*.pyc"))


def test_environments_of_a_file_and_of_a_module_play(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place / "parts"))
    for name in ("parts/env.py:Echo", "env:Echo"):
        config = load_manifest(manifest(place, env_type="multiturn", env_id=name, params={"word": "no"}))
        made = task(config, allow_code=True)
        assert made.name == "Echo"
        env = made.take()  # type: ignore[union-attr]
        assert env.reset(seed=0)[0] == "Say no."
        assert env.step("no!")[1] == 1.0


def test_the_command_line_may_name_any_file(place: Path) -> None:
    config = load_manifest(None, [*SMALL, f"environment.graders=[{{name: '{place}/rewards.py:vowels'}}]"])
    assert task(config, allow_code=True).reward("aa", {"answer": "x"}) == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rewards.py:vowel", r"vowel in .*rewards.py, found dataclass, vowels, Longer"),
        ("rewards.py:number", "function or a class, found 5"),
        ("rewards.py:", "expected path.py:name or module:name"),
        ("rewards.py", "expected path.py:name or module:name"),
        ("rewards.py:a b", "expected path.py:name or module:name"),
        ("nothing.py:x", "cannot be loaded: FileNotFoundError"),
        ("no_such_module:x", "cannot be loaded: ModuleNotFoundError"),
        ("raises.py:x", "RuntimeError: not today"),
        ("leaves.py:x", "cannot be loaded: SystemExit: 0"),
        ("broken.py:x", "cannot be loaded: SyntaxError"),
        ("rewards.py:Longer", r"Longer .* TypeError"),
    ],
)
def test_code_that_cannot_be_used(name: str, words: str, place: Path) -> None:
    (place / "raises.py").write_text("raise RuntimeError('not today')")
    (place / "leaves.py").write_text("import sys\nsys.exit(0)")
    (place / "broken.py").write_text("def x(:\n")
    with pytest.raises(ConfigError, match=words):
        task(load_manifest(manifest(place, graders=[{"name": name}])), allow_code=True)


def test_the_source_counts_and_no_compiled_copy_of_it(place: Path) -> None:
    """A digest of the source would say nothing about a run that used another file's code."""
    path = place / "rewards.py"
    other = place / "other.py"
    other.write_text("def vowels(completion): return 7.0\n" + "#" * (len(REWARDS) - 35))
    py_compile.compile(str(other), importlib.util.cache_from_source(str(path)), invalidation_mode=UNCHECKED)
    found = load_code("here", f"{path}:vowels", allowed=True)
    assert found("a", "b") == 1.0
    path.write_text("def vowels(completion): return 3.0")
    assert load_code("here", f"{path}:vowels", allowed=True)("a") == 3.0


def test_finding_the_file_of_a_module_runs_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = place / "package_that_raises"
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(place))
    assert file_of("package_that_raises.inner:x") == package / "inner.py"
    assert file_of("package_that_raises:x") == package / "__init__.py"
    assert file_of("no_such_package.inner:x") is None
    assert file_of("sys:exit") is None
    assert file_of(f"{place}/rewards.py:vowels") == place / "rewards.py"


@pytest.mark.model
def test_a_run_records_its_code_and_goes_on_with_that_alone(place: Path, tmp_path: Path, agilerl: Agilerl) -> None:
    arguments = [str(manifest(place, graders=GRADERS)), *SMALL, "training.max_steps=96", "--out", "run"]
    assert "--allow-code" in agilerl("train", *arguments).errors
    assert agilerl("train", *arguments, "--allow-code", "--dry-run").code == 0
    ended = agilerl("train", *arguments, "--allow-code")
    assert ended.code == 0, ended.errors
    run, path = tmp_path / "run", place / "rewards.py"
    train = [line for line in lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert all({"rewards/vowels/mean", "rewards/long/mean", "rewards/task/mean"} <= set(line) for line in train)
    recorded = json.loads((run / "run.json").read_text())["files"]
    assert recorded == {"code": {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}, "data": {}}

    (run / "summary.json").unlink()  # as if it had been killed before the end
    assert "--allow-code" in agilerl("resume", "run").errors
    path.write_text(REWARDS.replace("aeiou", "xyz"))
    changed = agilerl("resume", "run", "--allow-code")
    assert changed.code == 2
    assert "has changed since the run began" in changed.errors
    advice = "agilerl resume run --allow-changes --allow-code"
    assert advice in changed.errors
    assert advice in agilerl("train", *arguments, "--allow-code", "--resume", "auto").errors
    assert not (run / "summary.json").exists()
    assert agilerl("resume", "run", "--allow-changes").code == 2
    ended = agilerl("resume", "run", "--allow-code", "--allow-changes")
    assert ended.code == 0, ended.errors


@pytest.mark.model
def test_a_run_directory_cannot_bring_its_own_code(unfinished: Unfinished, tmp_path: Path, agilerl: Agilerl) -> None:
    root = unfinished.copy(tmp_path / "run")
    evil = root / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef reward(completion): return 1.0\n")
    name = f"{evil}:reward"
    change_config(root, lambda c: c["environment"].update(graders=[{"name": name}]))
    digest = hashlib.sha256(evil.read_bytes()).hexdigest()
    change_json(root / "run.json", lambda info: {**info, "files": {"code": {str(evil): digest}}, "allow_code": True})
    open_run(root, report=pytest.fail).run.close()
    ended = agilerl("resume", "run")
    assert ended.code == 2
    assert "--allow-code" in ended.errors
    assert not (tmp_path / "executed").exists()


@pytest.mark.model
def test_rows_are_those_that_the_run_began_with(place: Path, tmp_path: Path, agilerl: Agilerl) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"say {n}", "answer": str(n)}) + "\n" for n in range(60)))
    arguments = [*SMALL, "training.max_steps=48", "environment.dataset=rows.jsonl", "--out", "run"]
    ended = agilerl("train", *arguments)
    assert ended.code == 0, ended.errors
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["files"]["data"]
    assert recorded == {str(rows): hashlib.sha256(rows.read_bytes()).hexdigest()}
    (tmp_path / "run" / "summary.json").unlink()
    with rows.open("a") as file:
        file.write('{"question": "one more", "answer": "1"}\n')
    with pytest.raises(CheckpointError, match=r"rows\.jsonl.* agilerl resume run --allow-changes$"):
        open_run("run", report=pytest.fail)
    open_run("run", report=pytest.fail, allow_changes=True).run.close()
    rows.unlink()
    with pytest.raises(CheckpointError, match=r"rows\.jsonl.*No such file"):
        open_run("run", report=pytest.fail)
