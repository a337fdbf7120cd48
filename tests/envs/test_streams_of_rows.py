"""Rows from what is no file and no list: streams, and datasets of torch."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset, config, load_dataset

from agilerl.envs import read_dataset, sources
from agilerl.errors import EnvError

ROWS = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(12)]


def written(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


class OfTorch(torch.utils.data.Dataset[dict[str, str]]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


class StreamOfTorch(torch.utils.data.IterableDataset[dict[str, str]]):
    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


def test_what_only_yields_rows_is_read_once_up_to_a_limit(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl")
    streamed = load_dataset("json", data_files=str(file), streaming=True, cache_dir=str(tmp_path / "cache"))
    assert isinstance(streamed["train"], IterableDataset)
    for source in (
        streamed,
        streamed["train"],
        Dataset.from_list(ROWS).to_iterable_dataset(),
        StreamOfTorch(),
        (row for row in ROWS),
    ):
        with pytest.raises(EnvError, match="with a limit"):
            read_dataset(source)
        rows = read_dataset(source, limit=99)
        assert list(rows) == ROWS
        assert rows.columns == ["question", "answer"]
    assert list(read_dataset(itertools.cycle(ROWS), limit=14)) == [*ROWS, *ROWS[:2]]


def test_a_dataset_of_torch_is_read_by_its_items() -> None:
    assert list(read_dataset(OfTorch())) == ROWS
    with pytest.raises(EnvError, match=r"row 0 of the dataset cannot be read: KeyError"):
        read_dataset(pandas.DataFrame(ROWS))
    assert list(read_dataset(Dataset.from_pandas(pandas.DataFrame(ROWS)))) == ROWS


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
    assert list(sources._first(found, "numbers", 4)) == ROWS[:4]
    assert not list((tmp_path / "cache").glob("**/*.arrow"))
    image = datasets.Dataset.from_dict({"picture": [{"path": "/etc/hostname", "bytes": None}]})
    decoding = image.cast_column("picture", datasets.Image()).to_iterable_dataset()
    assert next(iter(sources.stop_decoding(decoding)))["picture"]["bytes"] is None


def test_a_stream_that_breaks_or_holds_no_rows() -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield ROWS[0]
        raise OSError("the line is dead")

    with pytest.raises(EnvError, match=r"row 1 .*OSError"):
        read_dataset(broken(), limit=2)
    with pytest.raises(EnvError, match=r"row 0 of the dataset: expected an object"):
        read_dataset(iter([1, 2]), limit=2)
    with pytest.raises(EnvError, match="at least one row"):
        read_dataset(iter([]), limit=2)
