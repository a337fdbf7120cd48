"""Graders in manifests: a run that logs each of them, and what a manifest may not ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs.graded import GradedTask
from agilerl.errors import ConfigError, EnvError
from agilerl.training.tasks import task
from tests.training.small_runs import SMALL, lines, run_here

PARTS = [
    {"name": "task"},
    {"name": "length", "weight": 0.1, "params": {"target": 6}},
    {"name": "regex", "weight": 0, "params": {"pattern": "^[a-z]+$"}, "label": "letters"},
]


def manifest(place: Path, graders: list[dict[str, Any]] | None, **environment: Any) -> RunConfig:
    settings = {"environment": {**environment, **({} if graders is None else {"graders": graders})}}
    path = place / "manifest.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load_manifest(path, [*SMALL])


@pytest.mark.model
def test_a_run_logs_every_grader_and_examines_by_the_fitness_grader(tmp_path: Path) -> None:
    parts = yaml.safe_dump(PARTS, default_flow_style=True, width=1000).strip()
    root = run_here(
        tmp_path / "run", f"environment.graders={parts}", "environment.fitness_grader=task", "training.max_steps=96"
    )
    records = lines(root / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    assert len(train) == 6
    for record in train:
        assert {f"rewards/{name}/{what}" for name in ("task", "length", "letters") for what in ("mean", "std")} <= set(
            record
        )
        assert [record[f"reward_errors/{name}"] for name in ("task", "length", "letters")] == [0.0] * 3
        expected = record["rewards/task/mean"] + 0.1 * record["rewards/length/mean"]
        assert record["reward"] == pytest.approx(expected, abs=1e-6)
        assert "rewards/combined/mean" not in record
    exams = [record["eval/reward_mean"] for record in records if record["kind"] == "eval"]
    assert all((8 * mean) % 1 == 0 for mean in exams), "the share of 8 words that are right"
    written = json.loads((root / "run.json").read_text())["config"]["environment"]
    assert [part["name"] for part in written["graders"]] == ["task", "length", "regex"]


def test_exams_are_graded_as_training_is_unless_told(tmp_path: Path) -> None:
    made = task(manifest(tmp_path, [*PARTS[:1], {"name": "json_valid", "weight": 0.5}]))
    assert isinstance(made, GradedTask)
    row = made.row("exam", 0)
    assert made.grade_exam([row["answer"], "7"], [row, row]).rewards == [1.0, 0.5]
    other = task(manifest(tmp_path, PARTS, fitness_grader="letters"))
    assert isinstance(other, GradedTask)
    assert other.grade_exam(["abc", "7"], [row, row]).rewards == [1.0, 0.0]


def test_rows_need_no_answer_where_no_grader_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(60)))
    made = task(manifest(tmp_path, [{"name": "json_valid"}], dataset="rows.jsonl"))
    assert made.reward("{}", made.row("train", 0)) == 1.0
    with pytest.raises(EnvError, match="answer"):
        task(manifest(tmp_path, [{"name": "json_valid"}, {"name": "task"}], dataset="rows.jsonl"))


@pytest.mark.parametrize(
    ("graders", "environment", "sentence"),
    [
        ([{"name": "acuracy"}], {}, r"graders\.0\.name='acuracy' .* 'accuracy'\?"),
        ([{"name": "mine.py:reward"}], {}, "names code, and a manifest does not run code"),
        ([{"name": "package.module:reward"}], {}, "names code, and a manifest does not run code"),
        ([{"name": "length"}], {}, r"graders\.0: the grader .* \[\]"),
        ([{"name": "task"}, {"name": "task"}], {}, r"graders\.1: two graders .* 'task'"),
        ([{"name": "task", "params": {"x": 1}}], {}, r"graders\.0: .* no parameters"),
        ([{"name": "task", "wieght": 1}], {}, r"wieght'.* 'weight'"),
        ([{"name": "task", "weight": float("nan")}], {}, "weight"),
        ([], {}, "graders"),
        ([{"name": "task"}], {"fitness_grader": "exact"}, r"fitness_grader='exact' .* known: task"),
        (None, {"fitness_grader": "task"}, "environment.graders, found none"),
        ([{"name": "task"}], {"env_type": "sft"}, r"environment.graders.* env_type: reasoning, found sft"),
        ([{"name": "judge", "params": {"model": "m", "base_url": "http://x/v1"}}], {}, "API key"),
        ([{"name": "pairwise_judge", "params": {"model": "m", "base_url": "http://x/v1"}}], {}, "API key"),
        (
            [{"name": "judge", "params": {"model": "m", "api_key_env": "AWS_KEY", "base_url": "http://x/v1"}}],
            {},
            "API key",
        ),
        (
            [{"name": "judge", "params": {"model": "m", "api_key_env": None, "cache": "../x"}}],
            {},
            "a cache below the working directory",
        ),
        ([{"name": "judge", "params": {"model": "m", "api_key_env": "NO_SUCH_KEY"}}], {}, "NO_SUCH_KEY"),
    ],
)
def test_what_a_manifest_may_not_ask_for(
    graders: list[dict[str, Any]] | None, environment: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        task(manifest(tmp_path, graders, **environment))
