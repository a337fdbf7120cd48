"""Datasets of one's own in manifests: runs from files, where files may be, what contradicts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from typer.testing import CliRunner

from agilerl.cli.app import app
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import SFTTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.errors import ConfigError, EnvError
from agilerl.population import Population
from agilerl.training.resolved import resolve
from agilerl.training.setup import build
from agilerl.training.tasks import task
from tests.training.small_runs import SMALL, less_times, lines, run_here

SIZES = ("environment.eval_prompts=8", "environment.test_prompts=10")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    problems = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 5}, exam_prompts=4)
    return [{key: row[key] for key in ("question", "answer")} for row in (problems.row("train", i) for i in range(60))]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the same rows in three formats."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", rows)
    write_lines(tmp_path / "few.jsonl", rows[:3])
    (tmp_path / "rows.csv").write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return tmp_path


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.processes
def test_a_run_from_a_file_is_the_same_in_every_format(place: Path) -> None:
    found = []
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        root = run_here(place / name.replace(".", "-"), f"environment.dataset={name}", "training.max_steps=48")
        assert json.loads((root / "summary.json").read_text())["status"] == "finished"
        written = json.loads((root / "run.json").read_text())["config"]["environment"]
        assert (written["task"], written["dataset"][0]["path"]) == (None, str(place / name))
        found.append(less_times(lines(root / "metrics.jsonl")))
    assert found[0] == found[1] == found[2]
    assert all("rewards/exact_match/mean" in line for line in found[0] if line["kind"] == "train")


@pytest.mark.model
@pytest.mark.parametrize(("name", "env_type", "per_prompt"), [("SFT", "sft", 1), ("DPO", "preference", 2)])
def test_demonstrations_and_pairs_from_a_file(
    name: str, env_type: str, per_prompt: int, rows: list[dict[str, Any]], place: Path
) -> None:
    talks = [[{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in rows]
    worse = [[talk[0], {"role": "assistant", "content": talk[1]["content"][:-1]}] for talk in talks]
    data = {
        "sft": [{"messages": talk, "source": "mine"} for talk in talks],
        "preference": [{"chosen": talk, "rejected": other} for talk, other in zip(talks, worse)],
    }[env_type]
    write_lines(place / "data.jsonl", data)
    session = build(
        RunConfig.from_dict(
            {
                "algorithm": {"name": name, "lr": 1e-3, "batch_size": 8},
                "environment": {
                    "env_type": env_type,
                    "dataset": "data.jsonl",
                    "data_batch_size_per_gpu": 4,
                    "eval_prompts": 8,
                    "test_prompts": 10,
                },
                "training": {"pop_size": 2},
                "network": {"lora_config": {"r": 4}},
            }
        )
    )
    rollout = session.population.draw()
    assert {len(batch) for batch in rollout.trajectories.values()} == {4 * per_prompt}
    first = rollout.trajectories[0][0]
    assert first.text == first.row["answer"]
    assert all(values["loss"] > 0 for values in session.population.learn(rollout).values())
    assert 0 < session.population.evaluate("exam")[0].mean < 1
    assert session.task.counts["train"] == session.task.train_size == 60 - 18 - session.task.counts["leaking"]


@pytest.mark.model
def test_the_plan_tells_what_became_of_the_rows(rows: list[dict[str, Any]], place: Path) -> None:
    bad = [{"question": "x" * 9000, "answer": "1"}, {"question": "a<eos>b", "answer": "1"}, {"question": "c"}]
    write_lines(place / "bad.jsonl", [*rows, *bad])
    arguments = ["train", "environment.dataset=bad.jsonl", *SMALL, *SIZES, "--dry-run"]
    refused = CliRunner().invoke(app, arguments)
    assert "line 63 of bad.jsonl: expected text in the column answer, found no such column" in str(refused.exception)
    shown = CliRunner().invoke(app, [*arguments, "environment.bad_rows=drop", "--json"], catch_exceptions=False)
    counts = json.loads(shown.output)["rows"]
    assert {key: counts[key] for key in ("read", "missing", "too_long", "special_tokens", "exam", "test")} == {
        "read": 63,
        "missing": 1,
        "too_long": 1,
        "special_tokens": 1,
        "exam": 8,
        "test": 10,
    }
    table = CliRunner().invoke(app, [*arguments, "environment.bad_rows=drop"], catch_exceptions=False)
    assert "rows read 63, train 42, exam 8, test 10, missing 1, special tokens 1, too long 1" in " ".join(
        table.output.split()
    )
    assert "for training, besides" not in " ".join(table.output.split())
    assert "exams ask" not in table.output
    more = [{**row, "question": f"{number}: {row['question']}"} for number in range(3) for row in rows]
    write_lines(place / "more.jsonl", more)
    unset = ["environment.dataset=more.jsonl", "environment.eval_prompts=null", "training.evo_steps=1"]
    kept = " ".join(CliRunner().invoke(app, [*arguments, *unset], catch_exceptions=False).output.split())
    assert "train 42, exam 128, test 10 exams ask 32 of the 128, as more would take too much of the budget" in kept
    few = ["environment.bad_rows=drop", "environment.eval_prompts=30", "environment.test_prompts=20"]
    warned = CliRunner().invoke(app, [*arguments, *few], catch_exceptions=False)
    assert "train 10, exam 30, test 20" in " ".join(warned.output.split())
    assert "leave only 10 distinct prompts for training, besides" in " ".join(warned.output.split())


# -- what a manifest says ----------------------------------------------------------------------------------------------


def test_the_settings_of_datasets_arrive(rows: list[dict[str, Any]], place: Path) -> None:
    renamed = [{"problem": row["question"], "solution": row["answer"]} for row in rows]
    write_lines(place / "renamed.jsonl", renamed[:40])
    write_lines(place / "exam.jsonl", renamed[40:50])
    write_lines(place / "test.jsonl", [{"problem": r["problem"], "result": r["solution"]} for r in renamed[50:]])
    (place / "run.yaml").write_text(
        """
environment:
  dataset: renamed.jsonl
  dataset_exam: {path: exam.jsonl}
  dataset_test: [{path: test.jsonl, columns: {question: problem, answer: result}}]
  columns: {question: problem, answer: solution}
  conversation_template: [{role: user, content: "Please: {question}"}]
  eval_prompts: 4
  test_prompts: 6
"""
    )
    config = load_manifest(Path("run.yaml"))
    made = task(config)
    own = {row["problem"] for row in renamed[:40]}
    assert {made.row("train", i)["question"] for i in range(made.train_size)} <= own
    assert {made.row("exam", i)["question"] for i in range(4)} <= {row["problem"] for row in renamed[40:50]}
    assert {made.row("test", i)["question"] for i in range(6)} <= {row["problem"] for row in renamed[50:]}
    assert made.messages(made.row("exam", 0))[0]["content"].startswith("Please: Spell")
    assert RunConfig.from_dict(resolve(config).document()).environment == config.environment
    mixed = load_manifest(None, ["environment.dataset=[{path: rows.jsonl, weight: 3}, rows.csv]", *SIZES])
    assert [entry.weight for entry in mixed.environment.dataset] == [3.0, 1.0]
    assert task(mixed).counts["read"] == 120


def test_a_dataset_on_the_command_line_takes_the_place_of_the_task(place: Path) -> None:
    config = load_manifest(None, ["environment.dataset=rows.jsonl", *SIZES])
    assert (config.environment.task, config.environment.params) == (None, {})
    assert config.environment.dataset[0].path == str(place / "rows.jsonl")
    (place / "run.yaml").write_text("environment: {dataset: rows.jsonl, columns: {question: answer}}")
    back = load_manifest(Path("run.yaml"), ["environment.task=reasoning_gym:gcd"])
    assert (back.environment.dataset, back.environment.columns) == (None, {})
    other = load_manifest(Path("run.yaml"), ["environment.dataset=rows.csv", "environment.columns.prompt=question"])
    assert other.environment.columns == {"prompt": "question"}


CONTRADICTIONS = {
    "{task: 'reasoning_gym:gcd', dataset: rows.jsonl}": "environment.task='reasoning_gym:gcd' and environment.dataset",
    "{task: null}": "expected environment.task or environment.dataset, found neither",
    "{dataset: rows.jsonl, params: {a: 1}}": "environment.params={'a': 1} is for environment.task",
    "{dataset: rows.jsonl, reward: score}": "environment.reward='score' is for environment.task",
    "{dataset: rows.jsonl, holdout: any}": "environment.holdout='any' is for environment.task",
    "{columns: {a: b}}": "environment.columns={'a': 'b'} is for environment.dataset, found none",
    "{dataset_test: rows.jsonl}": "environment.dataset_test=[DatasetConfig(",
    "{bad_rows: drop}": "environment.bad_rows='drop' is for environment.dataset",
    "{dataset: rows.jsonl, bad_rows: skip}": "environment.bad_rows: input should be 'raise' or 'drop', found 'skip'",
    "{dataset: rows.jsonl, env_type: multiturn, env_id: agilerl/GuessTheNumber-v0}": "dataset is for single-turn rows",
    "{dataset: []}": "environment.dataset: list should have at least 1 item",
    "{dataset: 5}": "environment.dataset: input should be a valid list, found 5",
    "{dataset: [5]}": "environment.dataset.0: expected a mapping",
    "{dataset: {path: ''}}": "environment.dataset.0.path: string should have at least 1 character",
    "{dataset: [{path: rows.jsonl, weight: 0}]}": "environment.dataset.0.weight: input should be greater than 0",
    "{dataset: [{path: rows.jsonl, wieght: 1}]}": "unknown key 'environment.dataset.0.wieght'; did you mean 'weight'?",
}


@pytest.mark.parametrize("section", CONTRADICTIONS)
def test_settings_that_contradict(section: str, place: Path) -> None:
    (place / "run.yaml").write_text(f"environment: {section}")
    with pytest.raises(ConfigError) as caught:
        load_manifest(Path("run.yaml"))
    assert CONTRADICTIONS[section] in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.dataset=nowhere.jsonl"], r"found .* '.*nowhere.jsonl'"),
        (["environment.dataset=org/nothing"], "org/nothing.*hub"),
        (
            ["environment.dataset=few.jsonl", "environment.eval_prompts=500"],
            "test in few.jsonl, found 3",
        ),
        (["environment.dataset=rows.jsonl", "environment.columns.question=qestion"], "did you mean 'question'?"),
        (["environment.dataset=rows.jsonl", "environment.columns.answer=question"], "would both be the column answer"),
        (
            ["environment.dataset=rows.jsonl", "environment.env_type=sft", "environment.columns.text=answer"],
            "completion",
        ),
        (["environment.dataset=rows.jsonl", "environment.env_type=preference"], "column chosen in rows.jsonl"),
    ],
)
def test_data_that_does_not_fit_the_settings(overrides: list[str], message: str, place: Path) -> None:
    with pytest.raises(EnvError, match=message):
        task(load_manifest(None, [*SIZES, *overrides]))


# -- where files may be ------------------------------------------------------------------------------------------------


def given_in_a_manifest(folder: Path, path: str) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump({"environment": {"dataset": [{"path": path}]}}))
    return load_manifest(folder / "run.yaml").environment.dataset[0].path


def test_files_are_beside_the_manifest_or_in_the_working_directory(place: Path) -> None:
    folder = place / "manifests"
    (folder / "data").mkdir(parents=True)
    write_lines(folder / "data" / "own.jsonl", [])
    assert given_in_a_manifest(folder, "data/own.jsonl") == str(folder / "data" / "own.jsonl")
    assert given_in_a_manifest(folder, "rows.jsonl") == str(place / "rows.jsonl")
    write_lines(folder / "rows.jsonl", [])
    assert given_in_a_manifest(folder, "rows.jsonl") == str(folder / "rows.jsonl")
    assert given_in_a_manifest(folder, str(place / "rows.csv")) == str(place / "rows.csv")
    assert given_in_a_manifest(folder, "../rows.csv").endswith("rows.csv")
    assert given_in_a_manifest(folder, "org/name") == "org/name"


def absolute(place: Path, outside: Path) -> str:
    return str(outside)


def by_dots(place: Path, outside: Path) -> str:
    return f"../{outside.parent.name}/{outside.name}"


def by_a_link(place: Path, outside: Path) -> str:
    (place / "link.jsonl").symlink_to(outside)
    return "link.jsonl"


def by_home(place: Path, outside: Path) -> str:
    return "~/secret.jsonl"


@pytest.mark.parametrize("way", [absolute, by_dots, by_a_link, by_home])
def test_a_manifest_names_no_other_file_of_the_machine_but_the_command_line_may(
    way: Callable[[Path, Path], str],
    place: Path,
    rows: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("HOME", str(outside))
    path = way(place, write_lines(outside / "secret.jsonl", rows))
    with pytest.raises(ConfigError, match="out of the folder"):
        given_in_a_manifest(place, path)
    assert task(load_manifest(None, [f"environment.dataset={path}", *SIZES])).counts["read"] == 60


# -- rows that turn out too long ---------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_training_row_that_does_not_fit_is_skipped_and_counted(rows: list[dict[str, Any]]) -> None:
    session = build(load_manifest(None, [*SMALL, "training.pop_size=2"]))
    agents, long = session.population.agents, {"question": "word " * 2000, "answer": "x"}
    mixed = [long if i % 3 == 0 else row for i, row in enumerate(rows)]
    made = DatasetTask(mixed, rows[:4], reward_fn=lambda completion, answer: float(completion == answer))
    population = Population(agents, made, prompts_per_step=12, eval_max_new_tokens=4)
    expected = sum(made.row("train", position)["question"] == long["question"] for position in range(12))
    assert expected > 1
    rollout = population.rollout()
    assert all(t.row["question"] != long["question"] for batch in rollout.trajectories.values() for t in batch)
    assert all(len({t.group for t in batch}) == 12 for batch in rollout.trajectories.values())
    metrics = population.learn(rollout)
    assert all(values["prompts_skipped"] >= expected for values in metrics.values())
    assert [agent.position for agent in population.agents] == [12, 12]

    def seen(positions: range) -> list[str]:
        tokenizer = Population(agents, made).tokenizer
        return [made.place_at("train", p, tokenizer, 1024).row["question"] for p in positions]

    assert seen(range(12)) == [
        t.row["question"] for t in rollout.trajectories[0][:: len(rollout.trajectories[0]) // 12]
    ]
    assert seen(range(11, -1, -1)) == seen(range(12))[::-1]
    none_fits = Population(agents, DatasetTask([long], rows[:4], reward_fn=len), prompts_per_step=1)
    with pytest.raises(EnvError, match=r"none of 256 .*; the first: "):
        none_fits.rollout()


@pytest.mark.model
def test_an_example_that_does_not_fit_is_skipped_and_counted(rows: list[dict[str, Any]]) -> None:
    config = load_manifest(Path("tutorials/manifests/sft.yaml"), [*SIZES, "training.pop_size=2", "network.adapter="])
    agents = build(config).population.agents
    long = {"question": "say it", "answer": "word " * 2000}
    inner = DatasetTask([*rows[:10], long], rows[:4], reward_fn=lambda completion: 0.0)
    population = Population(agents, SFTTask(inner), prompts_per_step=11)
    rollout = population.draw()
    assert all(t.row["answer"] != long["answer"] for t in rollout.trajectories[0])
    assert population.learn(rollout)[0]["prompts_skipped"] == 1.0
    all_fit = Population(agents, SFTTask(DatasetTask(rows[:11], rows[:4], reward_fn=len)), prompts_per_step=11)
    assert "prompts_skipped" not in all_fit.learn(all_fit.draw())[0]
