"""Rows that are malformed, in files that manifests name: exact counts, and the run goes on with the rest."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agilerl.config.manifest import load_manifest
from agilerl.errors import EnvError, RewardError
from agilerl.models.base import load_tokenizer
from agilerl.rewards import call_grader
from agilerl.training.tasks import task
from tests.training.small_runs import lines, run_here

MEGABYTE = "x" * 1_000_000

FAULTS: dict[str, list[Any]] = {
    "missing": [..., None],
    "not_text": [5, 1.5, True, {"a": 1}, ["a"], "half \ud83d"],
    "empty": ["", "  ", "\n\t"],
    "too_long": [MEGABYTE],
    "special_tokens": ["a<eos>b", "<pad>", "<bos>x"],
}
"""By what they are counted as, values of a column; ... stands for a row without it."""

COLUMNS = {"reasoning": ("question", "answer"), "sft": ("prompt", "completion"), "preference": ("prompt", "chosen")}


def good(env_type: str, number: int) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(COLUMNS[env_type], (f"say {number}", f"{number}a")))
    return {**row, "rejected": f"{number}b"} if env_type == "preference" else row


def bad(env_type: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return a malformed row for each value in each column, and how many there are of each kind."""
    rows, counts = [], dict.fromkeys(FAULTS, 0)
    for column in (*COLUMNS[env_type], *(["rejected"] if env_type == "preference" else [])):
        for kind, values in FAULTS.items():
            if kind == "too_long" and column != COLUMNS[env_type][0]:
                continue  # the prompt is measured; long answers are cut off, or skipped, in training
            for value in values:
                row = good(env_type, 1000 + len(rows))
                row.pop(column)
                rows.append(row if value is ... else {**row, column: value})
                counts[kind] += 1
    return rows, counts


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    texts = [json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) if path.suffix == ".jsonl" else f"[{', '.join(texts)}]")


def manifest(place: Path, name: str, env_type: str, **more: Any) -> Path:
    path = place / "it.yaml"
    environment = {"env_type": env_type, "dataset": name, "eval_prompts": 8, "test_prompts": 10, **more}
    path.write_text(json.dumps({"environment": environment}))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("env_type", COLUMNS)
def test_every_malformed_row_is_counted_as_what_it_is(env_type: str, suffix: str, tmp_path: Path) -> None:
    rows, counts = bad(env_type)
    assert all(counts.values())
    mixed = [row for number in range(60) for row in (*rows[number : number + 1], good(env_type, number))]
    write(tmp_path / f"rows.{suffix}", mixed)
    assert len(rows) <= 60
    start = time.process_time()
    made = task(load_manifest(manifest(tmp_path, f"rows.{suffix}", env_type, bad_rows="drop")))
    made.fit(load_tokenizer("embedded"), 100)
    assert time.process_time() - start < 5
    found = made.counts  # type: ignore[union-attr]
    assert {name: found[name] for name in counts} == counts
    assert (found["read"], found["exam"], found["test"]) == (60 + len(rows), 8, 10)
    assert found["train"] + 18 + found["leaking"] + sum(counts.values()) == found["read"]
    assert found["alike"] == 0


@pytest.mark.parametrize("env_type", COLUMNS)
@pytest.mark.parametrize("kind", ["missing", "not_text", "empty"])
def test_by_default_the_first_one_stops_the_run_and_is_named(kind: str, env_type: str, tmp_path: Path) -> None:
    for value in FAULTS[kind]:
        row = good(env_type, 100)
        column = COLUMNS[env_type][0]
        row.pop(column)
        write(
            tmp_path / "rows.jsonl",
            [*(good(env_type, n) for n in range(40)), row | ({} if value is ... else {column: value})],
        )
        with pytest.raises(EnvError, match=r"^line 41 of rows\.jsonl: .*bad_rows: drop") as caught:
            task(load_manifest(manifest(tmp_path, "rows.jsonl", env_type)))
        assert len(str(caught.value)) < 500


@pytest.mark.processes
def test_columns_of_parquet_and_csv(tmp_path: Path) -> None:
    """Parquet has None in place of what is missing, CSV empty text; neither has values of several types."""
    questions = [*(f"say {n}" for n in range(40)), None, "", "a<eos>b", MEGABYTE]
    answers = ["1"] * 44
    parquet.write_table(pa.table({"question": questions, "answer": answers}), tmp_path / "rows.parquet")
    text = "".join(f'"{question or ""}",{answer}\n' for question, answer in zip(questions, answers))
    (tmp_path / "rows.csv").write_text(f"question,answer\n{text}")
    parquet.write_table(pa.table({"question": list(range(40)), "answer": answers[:40]}), tmp_path / "numbers.parquet")
    for name, missing, empty in (("rows.parquet", 1, 1), ("rows.csv", 0, 2)):
        made = task(load_manifest(manifest(tmp_path, name, "reasoning", bad_rows="drop")))
        made.fit(load_tokenizer("embedded"), 100)
        found = made.counts  # type: ignore[union-attr]
        kinds = [found[kind] for kind in ("read", "missing", "empty", "special_tokens", "too_long")]
        assert kinds == [44, missing, empty, 1, 1]
    with pytest.raises(EnvError, match=r"column question, found 0"):
        task(load_manifest(manifest(tmp_path, "numbers.parquet", "reasoning")))


@pytest.mark.model
def test_a_run_on_what_is_left_gets_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows, _ = bad("reasoning")
    write(tmp_path / "rows.jsonl", [*rows, *(good("reasoning", number) for number in range(60))])
    dataset = ("environment.dataset=rows.jsonl", "environment.bad_rows=drop", "training.max_steps=48")
    root = run_here(tmp_path / "run", *dataset)
    assert json.loads((root / "summary.json").read_text())["status"] == "finished"
    assert all(line["kind"] != "train" or line["outcome"] == "ok" for line in lines(root / "metrics.jsonl"))


def test_rows_of_thousands_of_columns_take_no_longer_than_their_size(tmp_path: Path) -> None:
    """Looking each column up among all of them would take a minute."""
    wide = dict.fromkeys((f"column {number}" for number in range(30_000)), 1)
    write(tmp_path / "rows.jsonl", [{**good("reasoning", number), **wide} for number in range(40)])
    config = load_manifest(manifest(tmp_path, "rows.jsonl", "reasoning"))
    start = time.thread_time()
    made = task(config)
    assert time.thread_time() - start < 15
    assert made.row("train", 0)["column 29999"] == 1


def test_a_grader_is_given_the_columns_that_it_names() -> None:
    class Row(dict[str, Any]):
        """A row that notices when a column is read without need."""

        def get(self, key: str, default: Any = None) -> Any:
            assert not key.startswith("column"), key
            return super().get(key, default)

    rows = [Row(good("reasoning", 1), **{f"column{number}": 1 for number in range(30_000)})] * 2
    asked: list[Any] = []

    def batch(completions: list[str], answer: list[str]) -> list[float]:
        asked.append(answer)
        return [1.0] * len(completions)

    assert call_grader(batch, ["a", "b"], rows) == [1.0, 1.0]
    assert asked == [["1a", "1a"]]
    with pytest.raises(RewardError, match=r"asks for solution, found only .* more$") as caught:
        call_grader(lambda completions, solution: 0.0, ["a", "b"], rows)
    assert len(str(caught.value)) < 1000
