import json
import math
import os

import pytest

from agilerl.errors import CheckpointError
from agilerl.runs import Journal, JsonLines, journal, read_lines

RECORDS = [{"plan": [1, 2], "loss": 0.5}, {"plan": [], "text": "a\nb é  "}, {"fitness": {"3": -1.5}}]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as written:
        assert [written.append(record) for record in RECORDS] == [0, 1, 2]
    return path


def test_records_come_back_and_numbers_go_on(path):
    with Journal(path) as again:
        assert again.records == RECORDS
        assert again.append({"x": 1}) == 3
        assert len(again) == 4
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_record_is_no_alias_of_the_callers_dict(path):
    with Journal(path) as again:
        record = {"x": [1]}
        again.append(record)
        record["x"].append(2)
        assert again.records[-1] == {"x": [1]}


def test_every_torn_tail_is_cut(path):
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with Journal(path) as again:
            intact = sum(end <= size for end in ends)
            assert again.records == RECORDS[:intact]
            again.append({"x": 1})
        assert path.stat().st_size == (ends[intact - 1] if intact else 0) + len(path.read_bytes().splitlines()[-1]) + 1
        with Journal(path) as again:
            assert again.records == [*RECORDS[:intact], {"x": 1}]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0\n\0\n", b'{"crc":"00000000","data":{},"seq":3}\n', b"\r\n\xff"])
def test_garbage_after_a_power_cut_is_cut(path, tail):
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with Journal(path) as again:
        assert again.records == RECORDS
    assert path.read_bytes() == whole


def test_every_flip_before_the_last_record_is_an_error_and_cuts_nothing(path):
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for position in range(0, 8 * last, 3):
        bad = bytearray(whole)
        bad[position // 8] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"line [12] of "):
            Journal(path)
        assert path.read_bytes() == bytes(bad)


@pytest.mark.parametrize("order", [[0, 2], [1, 2], [0, 2, 1], [0, 0, 1, 2]])
def test_lost_and_repeated_records_are_an_error(path, order):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(CheckpointError, match="damaged or lost"):
        Journal(path)


def test_a_full_disk_leaves_no_partial_record(path, monkeypatch):
    again = Journal(path)
    write = os.write

    def half(descriptor, data):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    whole = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "write", half)
        with pytest.raises(CheckpointError, match="No space left"):
            again.append({"x": "y" * 100})
    assert path.read_bytes() == whole
    assert again.append({"x": 1}) == 3
    again.close()


def test_json_lines_are_strict_sorted_and_there_at_once(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"loss": math.nan, "agent": 1})
        assert path.read_text() == '{"agent":1,"loss":"NaN"}\n'
    found = list(read_lines(path))
    assert math.isnan(found[0]["loss"])


def test_json_lines_cut_a_torn_tail_and_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a"')
    assert [r["a"] for r in read_lines(path)] == [1, 2]
    with JsonLines(path) as lines:
        lines.write({"a": 3})
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_long_torn_tail_is_found_backwards(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 300_000)
    JsonLines(path).close()
    assert path.read_bytes() == b'{"a":1}\n'


def test_json_lines_go_back_to_a_position(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"a": 1})
        position = lines.position
        lines.write({"a": 2})
    with JsonLines(path, keep=position) as lines:
        assert lines.position == position
        lines.write({"a": 3})
    assert [r["a"] for r in read_lines(path)] == [1, 3]
    with pytest.raises(CheckpointError, match="lines were lost"):
        JsonLines(path, keep=10_000)


@pytest.mark.parametrize("bad", [b"{x}\n", b"[1]\n", b"NaN\n"])
def test_a_damaged_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + bad + b'{"a":2}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of.*metrics\.jsonl"):
        list(read_lines(path))


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_writing_to_a_closed_file_is_a_clear_error(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.close()
    lines.close()
    with pytest.raises(CheckpointError, match="closed"):
        lines.write({})
