"""`agilerl train` as a user runs it: a small real run, twice, and mistakes that cost one sentence and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.models.tiny import tiny_model_path
from agilerl.runs.atomic import verify_folder

pytestmark = pytest.mark.model

SMALL = (
    "training.max_steps=384",
    "training.evo_steps=2",
    "training.pop_size=3",
    "environment.data_batch_size_per_gpu=8",
    "environment.eval_prompts=16",
    "environment.test_prompts=20",
    "algorithm.group_size=4",
    "algorithm.batch_size=16",
)
TIMES = ("time/", "step_time", "tokens_per_second", "memory/")


def agilerl(*arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "agilerl", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("main_job")
    result = agilerl("train", *SMALL, "--out", "run", "--seed", "7", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "run", result.stdout


def lines(run: Path, name: str) -> list[dict]:
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in found]


def test_the_run_says_what_it_will_do_and_what_came_of_it(finished: tuple[Path, str]) -> None:
    _, output = finished
    for expected in (
        "Plan",
        "embedded",
        "lr in [1e-06, 0.01]",
        "MiB",
        "Held-out test",
        "base model",
        "elite",
        "report.html",
    ):
        assert expected in output


def test_the_run_directory_is_complete(finished: tuple[Path, str]) -> None:
    run, _ = finished
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["generations"], summary["agents"]) == (2, 3)
    assert set(summary["tokens"]) == {"generated", "trained", "evaluated"}
    assert all(count > 0 for count in summary["tokens"].values())
    assert summary["seconds"] > 0
    for who in ("base", "elite"):
        assert summary["test"][who]["n"] == 20
        assert 0 <= summary["test"][who]["mean"] <= 1
        assert summary["test"][who]["stderr"] >= 0
    assert set(summary["elite"]) >= {"index", "adapter", "hyperparameters"}
    assert str(summary["elite"]["index"]) in summary["fitness"]
    document = json.loads((run / "run.json").read_text())
    assert document["config"]["training"]["pop_size"] == 3
    assert document["seed"] == 7
    kinds = {line["kind"] for line in lines(run, "metrics.jsonl")}
    assert kinds == {"train", "eval", "evolution", "test"}
    events = {line["event"] for line in lines(run, "lineage.jsonl")}
    assert {"birth", "fitness", "elite"} <= events
    assert len(pq.read_table(run / "completions").to_pylist()) == 3 * 4 * 32
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert checkpoints
    for folder in checkpoints:
        verify_folder(folder)
    assert (run / "report.html").stat().st_size > 100_000


def test_the_elite_is_a_plain_peft_adapter_with_its_tokenizer(finished: tuple[Path, str]) -> None:
    run, _ = finished
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    model = PeftModel.from_pretrained(base, run / "elite")
    tokenizer = AutoTokenizer.from_pretrained(run / "elite")
    ids = tokenizer("sun", return_tensors="pt").input_ids
    adapted = model(ids).logits
    with model.disable_adapter():
        assert not adapted.equal(model(ids).logits)


def test_the_same_seed_gives_the_same_run_and_another_does_not(finished: tuple[Path, str]) -> None:
    run, _ = finished
    again = agilerl("train", *SMALL, "--out", "again", "--seed", "7", cwd=run.parent)
    other = agilerl("train", *SMALL, "--out", "other", "--seed", "8", cwd=run.parent)
    assert (again.returncode, other.returncode) == (0, 0)
    for name in ("metrics.jsonl", "lineage.jsonl"):
        assert lines(run, name) == lines(run.parent / "again", name)
        assert lines(run, name) != lines(run.parent / "other", name)
    adapter = "elite/adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (run.parent / "again" / adapter).read_bytes()


def test_a_finished_run_is_not_overwritten(finished: tuple[Path, str]) -> None:
    run, _ = finished
    before = (run / "summary.json").read_bytes()
    result = agilerl("train", "--out", str(run), cwd=run.parent)
    assert result.returncode == 2
    assert "holds a finished run" in result.stderr
    assert (run / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.pop_siz=3"], "unknown key 'training.pop_siz'; did you mean 'pop_size'"),
        (["algorithm.lr=-1"], "algorithm.lr: input should be greater than 0, found -1"),
        (["environment.task=reasoning_gym:spell_backwards"], "close names: spell_backward"),
        (["network.pretrained_model_name_or_path=./nowhere"], "no model folder at './nowhere'"),
        (["network.max_context_length=8"], "expected a prompt of at most 7 tokens"),
        (["training.pop_size=0"], "training.pop_size: input should be greater than or equal to 1"),
        (["mutation.rl_hp_selection.lr.min=1e-3"], "excludes the start"),
        (["selection_strategy.tournament_size=9"], "tournament_size=9 is larger than training.pop_size=4"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_costs_one_sentence_and_leaves_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = agilerl("train", *arguments, "--out", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_pad_token_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model_path()).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    result = agilerl("train", "network.pretrained_model_name_or_path=./model", "--out", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert "has no pad token" in result.stderr
    assert not (tmp_path / "run").exists()


def test_another_dataset_and_a_dry_run(tmp_path: Path) -> None:
    task = ("environment.task=reasoning_gym:gcd", "environment.params.max_value=60")
    dry = agilerl("train", *SMALL, *task, "--dry-run", "--out", "run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "run").exists()
    real = agilerl("train", *SMALL, *task, "training.max_steps=96", "--out", "run", cwd=tmp_path)
    assert real.returncode == 0, real.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["environment"]["params"] == {
        "max_value": 60
    }
