"""Rows from where users of other trainers have them: streams, pandas, torch, tuples."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset, config, load_dataset

from agilerl import Runtime
from agilerl.envs import CuratedTask, DatasetTask, read_dataset, sources
from agilerl.envs.examples import PreferenceTask
from agilerl.errors import EnvError
from agilerl.rewards import exact_match

ROWS = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(12)]


def written(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


class OfTorch(torch.utils.data.IterableDataset[dict[str, str]]):
    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


def test_what_only_yields_rows_is_read_once(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl")
    streamed = load_dataset("json", data_files=str(file), streaming=True, cache_dir=str(tmp_path / "cache"))
    assert isinstance(streamed["train"], IterableDataset)
    for source in (
        streamed,
        streamed["train"],
        Dataset.from_list(ROWS).to_iterable_dataset(),
        OfTorch(),
        (row for row in ROWS),
    ):
        rows = read_dataset(source)
        assert list(rows) == ROWS
        assert rows.columns == ["question", "answer"]
    task = CuratedTask(Dataset.from_list(ROWS).to_iterable_dataset(), exam_prompts=3, test_prompts=3)
    same = CuratedTask(ROWS, exam_prompts=3, test_prompts=3)
    assert [task.row(split, n) for split in ("train", "exam") for n in range(3)] == [
        same.row(split, n) for split in ("train", "exam") for n in range(3)
    ]


def test_an_endless_stream_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_STREAMED", 5)
    with pytest.warns(UserWarning, match="first 5 rows"):
        assert len(read_dataset(itertools.cycle(ROWS))) == 5
    assert list(read_dataset(itertools.cycle(ROWS), limit=7)) == ROWS[:7]
    assert list(read_dataset(iter(ROWS[:5]))) == ROWS[:5]  # exactly as many: nothing is cut


def test_a_limit_takes_the_first_rows_of_anything(tmp_path: Path) -> None:
    for source in (ROWS, Dataset.from_list(ROWS), written(tmp_path / "rows.jsonl"), read_dataset(ROWS)):
        assert list(read_dataset(source, limit=3)) == ROWS[:3], type(source)
    assert list(read_dataset(ROWS, limit=99)) == ROWS


def test_a_limited_dataset_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub's repository: the same client reads both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "numbers").mkdir()
    written(tmp_path / "numbers" / "train.jsonl")
    found = sources._load_from_hub("numbers", "train", None, stream=True)
    assert isinstance(found, IterableDataset)
    assert list(sources._streamed(found, "numbers", 4)) == ROWS[:4]
    assert not list((tmp_path / "cache").glob("**/*.arrow"))
    image = datasets.Dataset.from_dict({"picture": [{"path": "/etc/hostname", "bytes": None}]})
    decoding = image.cast_column("picture", datasets.Image()).to_iterable_dataset()
    assert next(iter(sources.without_decoding(decoding)))["picture"]["bytes"] is None


def test_a_stream_that_breaks_or_holds_no_rows() -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield ROWS[0]
        raise OSError("the line is dead")

    with pytest.raises(EnvError, match=r"row 1 .*OSError"):
        read_dataset(broken())
    with pytest.raises(EnvError, match=r"row 0 of the dataset: expected an object"):
        read_dataset(iter([1, 2]))
    with pytest.raises(EnvError, match="at least one row"):
        read_dataset(iter([]))


def test_a_frame_of_pandas() -> None:
    frame = pandas.DataFrame(
        {
            "question": ["a", "b", None],
            "answer": [1, 2, 3],
            "share": [0.5, float("nan"), 1.0],
            "list": [np.array([1, 2]), [3], []],
            7: [True, False, True],
        },
        index=[5, 5, 9],
    )
    rows = read_dataset(frame, columns={"hint": "share"})
    assert list(rows) == [
        {"question": "a", "answer": 1, "hint": 0.5, "list": [1, 2], "7": True},
        {"question": "b", "answer": 2, "hint": None, "list": [3], "7": False},
        {"question": None, "answer": 3, "hint": 1.0, "list": [], "7": True},
    ]
    assert {type(value) for value in rows[0].values()} == {str, int, float, list, bool}


USER = {"role": "user", "content": "Add 1 and 2."}
PAIRS: dict[str, tuple[list[Any], list[Any]]] = {
    "texts": ([("Say: yes", "Say: no")], ["Say:", " yes", " no"]),
    "with a prompt": ([("Say:", "yes", "no")], ["Say:", "yes", "no"]),
    "conversations": (
        [([USER, {"role": "assistant", "content": "3"}], [USER, {"role": "assistant", "content": "4"}])],
        ["Add 1 and 2.", "3", "4"],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tuples_are_pairs(name: str) -> None:
    given, expected = PAIRS[name]
    for source in (given, iter(given)):
        (row,) = read_dataset(source)
        assert row == dict(zip(("prompt", "chosen", "rejected")[-len(given[0]) :], given[0]))
    made = DatasetTask(given, given, reward_fn=exact_match, purpose="preference")
    row = made.row("train", 0)
    assert [row["question"], made.demonstration(row), made.counterexample(row)] == expected


def test_tuples_train_pairs() -> None:
    pairs = [(f"{n}? right", f"{n}? wrong") for n in range(8)]
    task = PreferenceTask(CuratedTask(pairs, exam_prompts=2, test_prompts=2, purpose="preference"))
    examples = task.examples(Runtime.from_pretrained("embedded").tokenizer, task.row("train", 0))
    assert [example.text for example in examples] == [" right", " wrong"]
