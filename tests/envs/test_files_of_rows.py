"""Files of rows: what is read is what was written, and what cannot be read is told in a sentence."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict, config
from hypothesis import given
from hypothesis import strategies as st

from agilerl.config.named_files import ENDINGS
from agilerl.envs import sources
from agilerl.envs.sources import mix, read_dataset
from agilerl.errors import ConfigError, EnvError

ROWS = [
    {"question": "When, exactly?", "answer": "2020-01-02", "tags": ["a", "b"], "meta": {"level": 1}},
    {"question": 'Say "no"\nand go', "answer": "007", "tags": [], "meta": {"level": 2}},
    {"question": "NA\u2028é", "answer": "null", "tags": ["c"], "meta": {"level": 3}},
]
TEXTS = [{key: row[key] for key in ("question", "answer")} for row in ROWS]


def written(path: Path, rows: list[dict]) -> Path:
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = "[" + ",".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines) + "\n"
        path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", [*(f"rows{e}" for e in ENDINGS if e not in (".csv", ".tsv")), "ROWS.JSONL"])
@pytest.mark.processes
def test_every_column_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    rows = read_dataset(written(tmp_path / name, ROWS))
    assert list(rows) == ROWS
    assert rows.columns == ["question", "answer", "tags", "meta"]
    assert (len(rows), rows.name) == (3, name)
    assert list(read_dataset(str(tmp_path / name))) == ROWS


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_the_values_of_a_csv_are_text(name: str, tmp_path: Path) -> None:
    assert list(read_dataset(written(tmp_path / name, TEXTS))) == TEXTS


def test_a_byte_order_mark_and_windows_lines_are_no_content(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\r\na,1\r\nb,2\r\n")
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "1"}\r\n\r\n{"question": "b"}')
    assert list(read_dataset(tmp_path / "rows.csv")) == [
        {"question": "a", "answer": "1"},
        {"question": "b", "answer": "2"},
    ]
    rows = read_dataset(tmp_path / "rows.jsonl")
    assert list(rows) == [{"question": "a", "answer": "1"}, {"question": "b"}]
    assert rows.where(1) == "line 3 of rows.jsonl"


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(st.lists(st.fixed_dictionaries({"question": TEXT, "answer": TEXT}), min_size=1, max_size=5))
def test_any_text_survives_both_text_formats(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name in ("rows.jsonl", "rows.csv"):
        assert list(read_dataset(written(folder / name, rows))) == rows


@pytest.mark.processes
def test_long_values_are_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    row = {"question": "x" * 1_000_000, "answer": "1"}
    for name in ("rows.csv", "rows.jsonl", "rows.parquet"):
        assert read_dataset(written(tmp_path / name, [row]))[0] == row
    assert csv.field_size_limit() == before


def test_datasets_and_lists_are_read_as_they_are() -> None:
    for given_rows in (ROWS, tuple(ROWS), Dataset.from_list(ROWS), DatasetDict({"train": Dataset.from_list(ROWS)})):
        assert list(read_dataset(given_rows)) == ROWS
    rows = read_dataset(DatasetDict({"exam": Dataset.from_list(ROWS)}), split="exam")
    assert rows[-1] == ROWS[2]
    assert rows[0:2] == ROWS[:2]
    assert read_dataset(rows)[1] == ROWS[1]
    rows[0]["question"] = "changed"
    assert rows[0] == ROWS[0]
    assert list(rows.select([2, 0])) == [ROWS[0], ROWS[2]]
    assert rows.select([2, 0]).where(1) == "row 2 of the dataset"
    with pytest.raises(IndexError):
        rows[3]


def test_columns_are_renamed_and_all_others_stay() -> None:
    rows = read_dataset(Dataset.from_list(ROWS), columns={"prompt": "question", "level": "meta"})
    assert rows[0] == {"prompt": "When, exactly?", "answer": "2020-01-02", "tags": ["a", "b"], "level": {"level": 1}}
    assert rows.columns == ["prompt", "answer", "tags", "level"]
    swapped = read_dataset(rows, columns={"prompt": "answer", "answer": "prompt"})
    assert (swapped[0]["prompt"], swapped[0]["answer"]) == ("2020-01-02", "When, exactly?")


# -- what cannot be read -----------------------------------------------------------------------------------------------

BROKEN = {
    "torn.jsonl": (b'{"a": "1"}\n{"a": "2"}\n{"a": "3', "line 3 of torn.jsonl is not .*JSON"),
    "torn.json": (b'[{"a": "1"},\n{"a": "2"', "line 2 of torn.json is not .*JSON"),
    "twice.jsonl": (b'{"a": "1"}\n{"a": "1", "a": "2"}', "line 2 of twice.jsonl has the column 'a' twice"),
    "twice.json": (b'[{"a": "1", "a": "2"}]', "an object of twice.json has the column 'a' twice"),
    "number.jsonl": (b'{"a": "1"}\n5', "line 2 of number.jsonl: expected an object .*, found 5"),
    "numbers.json": (b"[5]", "row 0 of numbers.json: expected an object .*, found 5"),
    "huge.jsonl": (b'{"a": ' + b"1" * 5000 + b"}", "line 1 of huge.jsonl cannot be read as JSON"),
    "deep.jsonl": (b"[" * 200_000, "deep.jsonl"),
    "latin.jsonl": (b'{"a": "1"}\n{"a": "\xe9"}', r"line 2 of latin.jsonl is not UTF-8 text \(byte 0xe9\)"),
    "latin.csv": (b"a,b\n1,2\n1,\xff\n", r"line 3 of latin.csv is not UTF-8 text \(byte 0xff\)"),
    "empty.jsonl": (b"\n", "at least one row in empty.jsonl, found none"),
    "empty.json": (b"[]", "at least one row in empty.json, found none"),
    "empty.csv": (b"", "at least one row in empty.csv, found none"),
    "header.csv": (b"question,answer\n", "at least one row in header.csv, found none"),
    "twice.csv": (b"a,b,a\n1,2,3\n", "twice.csv has the column 'a' twice; rename"),
    "long.csv": (
        b'a,b\n1,"x\ny"\n1,2,3\n',
        "line 4 of long.csv: expected 2 values.*found 3; .*comma",
    ),
    "short.tsv": (b"a\tb\n1\n", "line 2 of short.tsv: expected 2 values.*found 1; .*tab"),
    "open.csv": (b'a,b\n1,"2\n', "line 2 of open.csv cannot be read as CSV"),
    "junk.parquet": (b"PAR1 and then nothing", "junk.parquet cannot be read as Parquet"),
    "rows.txt": (b"hello", "rows.txt: expected a file that ends with .jsonl, .*, found '.txt'"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.processes
def test_a_broken_file_is_told_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EnvError, match=message) as caught:
        read_dataset(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"'.*rows\.jsonl'"):
        read_dataset(tmp_path / "rows.jsonl")
    with pytest.raises(EnvError, match="found a folder"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "qestion"}, r"dataset has no column 'qestion'; .* 'question'?"),
        ({"answer": "question"}, "question and answer of the dataset would both be the column answer"),
        ({"a": "question", "b": "question"}, "columns gives the column question of the dataset two names"),
    ],
)
def test_column_maps_that_do_not_fit(columns: dict[str, str], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        read_dataset(TEXTS, columns=columns)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"row .* dataset, found none"),
        ([{"a": "1"}, 5], r"row 1 of the dataset: .* found 5"),
        (5, "hub name.* found 5"),
        ({"test": ROWS}, r"split train .* dataset, found \['test'\]"),
        ({1, 2}, r"Hugging Face Dataset .* found .* of type set"),
    ],
)
def test_what_is_no_dataset(source: object, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        read_dataset(source)


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_hub_that_does_not_answer() -> None:
    with pytest.raises(EnvError, match=r"'org/name'.* hub "):
        read_dataset("org/name")


def test_what_the_hub_gives_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub's repository: the same client reads both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "numbers").mkdir()
    written(tmp_path / "numbers" / "train.jsonl", TEXTS[1:])
    rows = read_dataset(sources._load_from_hub("numbers", "train", None))
    assert list(rows) == TEXTS[1:]
    assert rows.columns == ["question", "answer"]
    with pytest.raises(EnvError, match=r'"test".* \[.train.\]'):
        sources._load_from_hub("numbers", "test", None)


@pytest.mark.parametrize("place", ["{outside}", "https://example.invalid/rows.txt", "../outside.txt"])
def test_a_dataset_of_the_hub_names_no_file_but_its_own(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its README may: ``data_files: /home/me/diary.txt`` would be read, here, as rows of somebody else's dataset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "outside.txt").write_text("my secret\n" * 40)
    (tmp_path / "numbers").mkdir()
    named = place.format(outside=tmp_path / "outside.txt")
    (tmp_path / "numbers" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n"
    )
    with pytest.raises(EnvError) as caught:
        sources._load_from_hub("numbers", "train", None)
    assert "my secret" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("**/*.arrow"))
    if "://" not in place:
        assert "outside its repository" in str(caught.value)


# -- mixtures ----------------------------------------------------------------------------------------------------------


def test_a_mixture_knows_its_parts() -> None:
    rows = mix([(TEXTS, 3), (Dataset.from_list(TEXTS[:1]), 1.0)])
    assert list(rows) == [*TEXTS, TEXTS[0]]
    assert (rows.sizes, rows.weights) == ([3, 1], [3.0, 1.0])
    assert [rows.part_of(i) for i in range(4)] == [0, 0, 0, 1]
    assert rows.where(3) == "row 0 of dataset 1 of the mixture"
    assert rows.select([1, 3]).sizes == [1, 1]


@pytest.mark.parametrize("weight", [0, "2", True, float("nan"), float("inf")])
def test_weights_that_are_none(weight: object) -> None:
    with pytest.raises(ConfigError, match=rf"expected a (finite )?number.* for sources\[0\]\[1\], found {weight!r}"):
        mix([(TEXTS, weight)])


@pytest.mark.parametrize(
    ("given_sources", "message"),
    [
        ([], "at least one .* to mix"),
        ([(mix([(TEXTS, 1), (TEXTS, 1)]), 1)], "a mixture cannot hold a mixture"),
    ],
)
def test_mixtures_that_are_none(given_sources: list, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        mix(given_sources)
