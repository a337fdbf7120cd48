"""``agilerl.train`` and ``agilerl.Run``: a run as an object, from rows and functions of Python; in a notebook too."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import agilerl
from agilerl.errors import CheckpointError, ConfigError, EnvError, RewardError
from agilerl.rewards.grader import exact_match
from agilerl.safety.custom_code import given_name, load_code
from agilerl.training.events import IterationDone
from agilerl.training.given import in_manifest
from tests.training.small_runs import environment

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parent.parent
ROWS = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
SMALL: dict[str, Any] = {
    "population": 2,
    "max_tokens": 9000,
    "environment": {"eval_prompts": 8, "test_prompts": 8, "data_batch_size_per_gpu": 8},
    "algorithm": {"name": "GRPO", "group_size": 4, "batch_size": 32},
    "max_output_tokens": 4,
    "training": {"evo_steps": 2},
    "display": False,
}


def short(completion: str) -> float:
    """Reward short completions, at once learnable."""
    return 1.0 / (1 + len(completion))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> agilerl.Run:
    return agilerl.train(
        dataset=ROWS, reward=short, evolve=["lr"], out=tmp_path_factory.mktemp("runs") / "one", **SMALL
    )


def test_a_run_has_its_results(finished: agilerl.Run) -> None:
    assert finished.is_finished
    assert set(finished.test) == {"base", "median_first_generation", "elite"}
    assert finished.test["elite"].n == 8
    assert finished.summary["test"]["elite"]["mean"] == pytest.approx(finished.test["elite"].mean)
    assert {line["event"] for line in finished.lineage} >= {"birth", "fitness", "elite"}
    assert {line["kind"] for line in finished.metrics} >= {"train", "eval", "test"}
    assert list(finished.schedule()["genes"]) == ["lr"]
    assert finished.config["training"]["pop_size"] == 2
    assert finished.config["algorithm"]["max_output_tokens"] == 4
    assert finished.elite.algo == "GRPO"
    assert finished.generate(["1 + 1", "2 + 3"]) == finished.elite.generate(["1 + 1", "2 + 3"])
    assert finished.generate("1 + 1", max_new_tokens=1) == finished.elite.generate("1 + 1", max_new_tokens=1)
    assert finished.report().name == "report.html"
    again = agilerl.Run(finished.path)
    assert repr(again) == repr(finished)
    assert f"elite {finished.test['elite'].mean:.3f}" in repr(finished)
    assert f"<td>{finished.test['base'].mean:.3f}</td>" in finished._repr_html_()
    assert again.resume() is again


def test_the_scores_of_several_rewards_are_added(tmp_path: Path) -> None:
    def fixed(completion: str) -> float:
        return 0.25

    small = {**SMALL, "max_tokens": 2000}
    run = agilerl.train(dataset=ROWS, reward=[short, fixed], evolve=[], out=tmp_path / "both", **small)
    lines = [line for line in run.metrics if line["kind"] == "train"]
    assert lines
    for line in lines:
        assert line["rewards/fixed/mean"] == 0.25
        assert line["reward"] == pytest.approx(line["rewards/short/mean"] + 0.25)
    with pytest.raises(ConfigError, match="reward="):
        agilerl.train(dataset=ROWS, grader=[short, fixed])


def test_rows_in_memory_are_kept_beside_the_run(finished: agilerl.Run) -> None:
    kept = finished.path.with_name("one.rows.jsonl")
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ROWS
    assert finished.config["environment"]["dataset"][0]["path"] == str(kept.absolute())


@pytest.mark.parametrize("algorithm", ["SFT", "DPO", {"name": "KTO", "batch_size": 8}])
def test_algorithms_of_data_need_no_more_than_their_name(algorithm: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}?", "answer": f"{a}", "chosen": f"{a}", "rejected": "no"} for a in range(60)]
    small = {**SMALL, "algorithm": algorithm, "max_tokens": 2000}
    run = agilerl.train(dataset=rows, evolve=[], out=tmp_path / "data", **small)
    named = algorithm if isinstance(algorithm, str) else algorithm["name"]
    assert (run.elite.algo, run.config["algorithm"]["name"]) == (named, named)
    assert run.config["environment"]["env_type"] == {"SFT": "sft", "DPO": "preference", "KTO": "unpaired"}[named]
    with pytest.raises(ConfigError, match="learns from"):
        agilerl.train(dataset=rows, out=tmp_path / "no", **{**small, "environment": {"env_type": "reasoning"}})


def test_rows_of_a_run_that_never_began_do_not_stay(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="column"):
        agilerl.train(dataset=[{"a": "1"}] * 60, reward=short, out=tmp_path / "no", **SMALL)
    values, rows = in_manifest({"path": "mine.jsonl", "columns": {"question": "Frage"}}, None, None)
    assert (values["dataset"], rows) == ({"path": "mine.jsonl", "columns": {"question": "Frage"}}, None)
    assert list(tmp_path.iterdir()) == []


def test_warnings_of_a_run_are_plain(tmp_path: Path) -> None:
    def line(category: type[Warning]) -> str:
        return warnings.formatwarning("careful", category, "code.py", 7, "")

    seen = []

    def grade(completion: str) -> float:
        seen.append((line(UserWarning), line(DeprecationWarning)))
        raise ValueError("no grade")

    with pytest.raises(RewardError, match="no grade"):
        agilerl.train(dataset=ROWS, reward=grade, out=tmp_path / "no", **SMALL)
    assert [*seen[0]] == ["warning: careful\n", "code.py:7: DeprecationWarning: careful\n"]
    assert line(UserWarning) == "code.py:7: UserWarning: careful\n"


def test_another_run_in_its_place_leaves_its_rows_alone(finished: agilerl.Run) -> None:
    kept = finished.path.with_name("one.rows.jsonl")
    before = kept.read_bytes()
    with pytest.raises(CheckpointError, match="one"):
        agilerl.train(dataset=ROWS[:50], reward=short, out=finished.path, **SMALL)
    assert kept.read_bytes() == before


def test_an_interrupted_run_goes_on_to_the_same_files(
    finished: agilerl.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def interrupting(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 150:
            raise KeyboardInterrupt
        return short(completion)

    out = tmp_path / "two"
    with pytest.raises(KeyboardInterrupt):
        agilerl.train(dataset=ROWS, reward=interrupting, evolve=["lr"], out=out, **SMALL)
    assert f"agilerl.Run({str(out)!r}).resume()" in capsys.readouterr().out
    stopped = agilerl.Run(out)
    assert not stopped.is_finished
    with pytest.raises(CheckpointError, match="not finished"):
        _ = stopped.adapter
    assert stopped.resume(reward=short, display=False).is_finished
    assert (out / "lineage.jsonl").read_bytes() == (finished.path / "lineage.jsonl").read_bytes()
    name = "adapter_model.safetensors"
    assert (stopped.adapter / name).read_bytes() == (finished.adapter / name).read_bytes()


def test_local_trainer_takes_the_same_rows_and_rewards(finished: agilerl.Run, tmp_path: Path) -> None:
    def interrupting(event: Any) -> None:
        if isinstance(event, IterationDone):
            raise KeyboardInterrupt

    out, out_of_none = tmp_path / "same", tmp_path / "none"
    trainer = agilerl.LocalTrainer(
        {**SMALL["algorithm"], "max_output_tokens": 4},
        SMALL["environment"],
        {**SMALL["training"], "pop_size": 2, "max_tokens": 9000, "max_steps": 9000},
        {"rl_hp_selection": {"lr": {}}},
        dataset=ROWS,
        reward=short,
        hpo=True,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train(out=out, verbose=False, consumers=[interrupting])
    kept = out.with_name("same.rows.jsonl")
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ROWS
    agilerl.LocalTrainer("GRPO", resume_from_checkpoint=out).train(verbose=False)
    assert (out / "lineage.jsonl").read_bytes() == (finished.path / "lineage.jsonl").read_bytes()
    with pytest.raises(EnvError, match="column"):
        agilerl.LocalTrainer("GRPO", dataset=[{"a": "1"}] * 60).train(out=out_of_none)
    assert not out_of_none.with_name("none.rows.jsonl").exists()
    with pytest.raises(ConfigError, match="reward: expected a function"):
        agilerl.LocalTrainer("GRPO", dataset=ROWS, reward=5)
    for argument, key in (("dataset", "dataset"), ("reward", "graders")):
        given = {"dataset": ROWS, "reward": "accuracy"}[argument]
        with pytest.raises(ConfigError, match=f"{argument}= and environment\\['{key}'\\] mean the same"):
            agilerl.LocalTrainer("GRPO", environment={key: ["x.jsonl"]}, **{argument: given})
        with pytest.raises(ConfigError, match=f"{argument}= and environment"):
            agilerl.train(environment={key: ["x.jsonl"]}, **{argument: given})


def test_what_is_shown_is_what_the_command_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agilerl.train(task="reasoning_gym:gcd", evolve=[], out=tmp_path / "shown", **{**SMALL, "display": True})
    shown = capsys.readouterr().out
    assert "genes      none" in shown
    assert "Held-out test" in shown


def test_objects_that_a_module_has_keep_their_name_and_others_get_one() -> None:
    name = given_name(exact_match)
    assert name == "agilerl.rewards.grader:exact_match"
    assert load_code("a setting", name, allowed=False) is exact_match
    first, second = (lambda completion: 0.0), (lambda completion: 1.0)
    names = [given_name(first), given_name(second), given_name(first)]
    assert names[0] == names[2] != names[1]
    assert [load_code("a setting", name, allowed=False) for name in names] == [first, second, first]


@pytest.mark.parametrize(
    "section", ["selection_strategy: {name: code.py:mark}", "training: {trackers: [code.py:mark]}"], ids=lambda s: s[:8]
)
def test_a_reward_from_python_allows_no_other_code(section: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef mark(*_): ...\n")
    manifest = tmp_path / "theirs.yaml"
    manifest.write_text(section + "\n")
    with pytest.raises(ConfigError, match="allow_code"):
        agilerl.train(manifest=manifest, reward=short, task="reasoning_gym:gcd", out=tmp_path / "out", display=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.processes
def test_another_process_is_told_what_is_missing(tmp_path: Path) -> None:
    def stops(completion: str) -> float:
        raise KeyboardInterrupt

    out = tmp_path / "three"
    with pytest.raises(KeyboardInterrupt):
        agilerl.train(dataset=ROWS, reward=stops, evolve=["lr"], out=out, **SMALL)
    assert agilerl.Run(out).config["environment"]["graders"][0]["name"] == "python:stops"
    command = [sys.executable, "-m", "agilerl", "resume", str(out), "--allow-code"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "resume(reward=...)" in done.stderr
    assert "Traceback" not in done.stderr


MISTAKES = [
    ({"taks": "x"}, "taks"),
    ({"max_steps": 256}, r"give training=\{'max_steps': 256\}"),
    ({"pop_size": 2}, "give population=2"),
    ({"task": "gcd"}, "did you mean"),
    ({"dataset": [{"question": "a", "answer": object()}]}, "JSON"),
]


@pytest.mark.parametrize(("wrong", "word"), MISTAKES, ids=[next(iter(m[0])) for m in MISTAKES])
def test_a_mistake_is_told_before_anything_is_written(wrong: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, EnvError), match=word):
        agilerl.train(out=tmp_path / "none", display=False, **wrong)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError):
        agilerl.Run(tmp_path / "none")


@pytest.mark.processes
def test_the_notebook_runs_and_shows_a_table(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    text = (ROOT / "tutorials" / "01_first_population.ipynb").read_text(encoding="utf-8")
    assert "max_tokens=80_000" in text  # as in the script beside it, which a test runs whole
    notebook = nbformat.reads(text.replace("max_tokens=80_000", "max_tokens=9_000"), as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert all(name in pages[0] for name in ("agent", "genes", "exam", "100% of budget"))
    assert "median_first_generation" in pages[-1]
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
