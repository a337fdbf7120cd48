"""A run in an Optuna storage, read back with Optuna."""

import json
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

from agilerl.cli.app import app
from agilerl.errors import ConfigError
from agilerl.hpo.lineage import family_tree
from agilerl.report.study import export_study
from agilerl.runs import read_lines
from tests.training.small_runs import run_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("study") / "found", "training.max_steps=288")


def test_each_agent_is_a_trial_with_its_exams(run: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'runs.db'}"
    done = CliRunner().invoke(app, ["export", str(run), "--optuna", storage])
    assert done.exit_code == 0, done.output
    study = optuna.load_study(study_name="found", storage=storage)
    lives, summary = family_tree(read_lines(run / "lineage.jsonl")), json.loads((run / "summary.json").read_text())
    assert f"{len(lives)} trials" in done.output
    assert [trial.user_attrs["agent"] for trial in study.trials] == list(lives)
    for trial, life in zip(study.trials, lives.values(), strict=True):
        assert trial.params == life.values()
        assert trial.user_attrs["parent"] == life.parent
        assert list(trial.intermediate_values.values()) == [exam.mean for exam in life.exams]
        pruned = trial.state == optuna.trial.TrialState.PRUNED
        assert pruned == (life.died is not None and bool(life.exams))
    (elite,) = (trial for trial in study.trials if trial.user_attrs.get("elite"))
    assert elite.user_attrs["test"] == summary["test"]["elite"]["mean"]
    assert study.best_value == max(t.value for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE)


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'runs.db'}"
    assert export_study(run, storage, "one") > 0
    with pytest.raises(ConfigError, match="--name"):
        export_study(run, storage, "one")
    with pytest.raises(ConfigError, match="sqlite:///"):
        export_study(run, "nowhere")
    assert CliRunner().invoke(app, ["export", str(tmp_path), "--optuna", storage]).exit_code != 0
