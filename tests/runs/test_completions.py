import math
import os
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agilerl.errors import CheckpointError
from agilerl.runs.completions import (
    CompletionRecord,
    completion_steps,
    discard_completions,
    read_completions,
    write_completions,
)

ROW = CompletionRecord(1, 10, 3, 0, 2, "spell cat", "tac", "tac", 1.0, 4, "stop")


def test_rows_come_back(tmp_path):
    rows = [ROW, replace(ROW, sample=3, reward=None, completion="é\n\0"), replace(ROW, reward=float("nan"))]
    path = write_completions(tmp_path / "completions", 10, rows)
    assert path.name == "step_000010.parquet"
    found = read_completions(path.parent, 10)
    written = [asdict(row) for row in rows[:2]]
    assert [row.pop("failure") for row in written] == ["", ""]  # not in the file
    assert found[:2] == written
    assert math.isnan(found[2]["reward"])
    assert os.listdir(path.parent) == [path.name]


def test_half_a_character_does_not_stop_the_run(tmp_path):
    write_completions(tmp_path, 1, [replace(ROW, completion="a\ud800b")])
    assert read_completions(tmp_path, 1)[0]["completion"] == "a?b"


def test_no_rows_is_a_file_too(tmp_path):
    write_completions(tmp_path, 1, [])
    assert read_completions(tmp_path, 1) == []


def test_a_file_is_never_overwritten_with_other_rows(tmp_path):
    write_completions(tmp_path, 10, [ROW])
    write_completions(tmp_path, 10, [ROW])
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_completions(tmp_path, 10, [replace(ROW, reward=0.0)])
    assert read_completions(tmp_path, 10)[0]["reward"] == 1.0


def test_steps_are_listed_in_order_and_discarded(tmp_path):
    for step in (2, 1_000_000, 10):
        write_completions(tmp_path, step, [ROW])
    (tmp_path / "step_x.parquet").touch()
    assert completion_steps(tmp_path) == [2, 10, 1_000_000]
    discard_completions(tmp_path, after=9)
    assert completion_steps(tmp_path) == [2]
    assert completion_steps(tmp_path / "none") == []


def test_damaged_files_are_named(tmp_path):
    path = write_completions(tmp_path, 10, [ROW])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"step_000010\.parquet"):
        read_completions(tmp_path, 10)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_completions(tmp_path, 11)
    pq.write_table(pa.table({"step": [1]}), path)
    with pytest.raises(CheckpointError, match=r"step_000010\.parquet"):
        read_completions(tmp_path, 10)


def test_a_damaged_column_name_is_named(tmp_path):
    path = write_completions(tmp_path, 10, [ROW])
    path.write_bytes(path.read_bytes().replace(b"\x06prompt", b"\x06\x80rompt"))
    with pytest.raises(CheckpointError, match="found none"):
        read_completions(tmp_path, 10)
