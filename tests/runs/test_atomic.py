import json
import os

import pytest

from agilerl.errors import CheckpointError
from agilerl.runs import atomic
from agilerl.runs.atomic import (
    MANIFEST,
    commit_folder,
    remove_folder,
    verify_folder,
    write_bytes,
    write_json,
    write_text,
)


def fill(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "weights.bin").write_bytes(bytes(range(200)))
    (folder / "state.json").write_text('{"step": 3}')
    (folder / "empty").touch()


@pytest.fixture
def committed(tmp_path):
    commit_folder(tmp_path / "000003", fill)
    return tmp_path / "000003"


def test_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "a long first version")
    write_text(path, "short é")
    assert path.read_text(encoding="utf-8") == "short é"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, failing, fail)
    with pytest.raises(CheckpointError, match=r"a\.json.*No space left"):
        write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_missing_folder_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written"):
        write_bytes(tmp_path / "no" / "file", b"")


def test_commit_writes_files_and_manifest(committed):
    manifest = json.loads((committed / MANIFEST).read_text())
    assert set(manifest) == {"sub/weights.bin", "state.json", "empty"}
    assert manifest["empty"] == {
        "size": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    assert verify_folder(committed) == manifest
    assert os.listdir(committed.parent) == ["000003"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_raising_callback_leaves_nothing_and_its_error_passes(tmp_path, error):
    def write(folder):
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        commit_folder(tmp_path / "000001", write)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_failing_disk_leaves_no_folder(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic.os, failing, fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        commit_folder(tmp_path / "000001", fill)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("manifest", [True, False])
def test_every_file_is_synced_before_the_rename(tmp_path, monkeypatch, manifest):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        atomic.os, "fsync", lambda fd: (events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(atomic.os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    commit_folder(tmp_path / "000001", fill, manifest=manifest)
    moment = events.index("rename")
    before = events[:moment]
    # The folder itself, which holds their names, is synced after them.
    assert {"weights.bin", "state.json", "empty", "sub"} <= set(before[:-1])
    assert before[-1] == f".000001.{os.getpid()}.tmp"
    assert any(name.startswith(f".{MANIFEST}") for name in before) == manifest
    assert events[moment + 1 :] == [tmp_path.name]


def test_a_committed_folder_is_never_overwritten(committed):
    with pytest.raises(CheckpointError, match="never overwritten"):
        commit_folder(committed, lambda folder: (folder / "other").touch())
    verify_folder(committed)


def test_links_are_refused_at_commit(tmp_path):
    with pytest.raises(CheckpointError, match="plain files"):
        commit_folder(tmp_path / "000001", lambda folder: (folder / "passwd").symlink_to("/etc/passwd"))
    assert os.listdir(tmp_path) == []


def test_an_elite_folder_can_do_without_a_manifest(tmp_path):
    commit_folder(tmp_path / "elite", fill, manifest=False)
    assert not (tmp_path / "elite" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["sub/weights.bin", "state.json", MANIFEST])
def test_every_bit_flip_is_found(committed, name):
    path = committed / name
    good = path.read_bytes()
    for position in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"(?s)damaged|missing|belong"):
            verify_folder(committed)
    path.write_bytes(good)
    verify_folder(committed)


@pytest.mark.parametrize("name", ["sub/weights.bin", "state.json", MANIFEST])
def test_every_truncation_is_found(committed, name):
    path = committed / name
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=name):
            verify_folder(committed)


def test_missing_extra_and_linked_files_are_named(committed):
    (committed / "extra").touch()
    with pytest.raises(CheckpointError, match=r"extra .*manifest"):
        verify_folder(committed)
    (committed / "extra").unlink()
    (committed / "empty").unlink()
    with pytest.raises(CheckpointError, match="empty is missing"):
        verify_folder(committed)
    (committed / "empty").symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="link or device"):
        verify_folder(committed)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_may_not_point_outside(committed, name):
    write_json(committed / MANIFEST, {name: {"size": 0, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="is missing"):
        verify_folder(committed)


def test_a_manifest_with_a_huge_nesting_is_an_error(committed):
    (committed / MANIFEST).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="damaged"):
        verify_folder(committed)


def test_removing_leaves_nothing(committed):
    remove_folder(committed)
    assert os.listdir(committed.parent) == []
