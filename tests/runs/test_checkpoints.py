import json
import logging
import os
import struct

import pytest
import torch

from agilerl.errors import CheckpointError
from agilerl.models.adapters import read_tensors, write_tensors
from agilerl.runs import CheckpointStore, agent_folder
from agilerl.runs.atomic import MANIFEST, verify_folder
from agilerl.runs.checkpoints import STATE


def population(step):
    def write(folder):
        for index in range(2):
            agent = agent_folder(folder, index)
            (agent / "actor").mkdir(parents=True)
            write_tensors(agent / "actor" / "adapter_model.safetensors", {"lora_A": torch.full((4, 3), float(step))})
            (agent / "actor" / "adapter_config.json").write_text('{"r": 4}')
            write_tensors(agent / "optimizer.safetensors", {"m": torch.zeros(5), "v": torch.ones(5)})
            (agent / "agent.json").write_text(json.dumps({"step": step}))
        (folder / STATE).write_text(json.dumps({"step": step}))

    return write


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


FILES = [
    "agent_1/actor/adapter_model.safetensors",
    "agent_1/actor/adapter_config.json",
    "agent_1/optimizer.safetensors",
    "agent_1/agent.json",
    STATE,
    MANIFEST,
]


def test_the_layout_is_the_specified_one(store):
    path = store.commit(123, population(123))
    assert path.name == "000123"
    found = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert found == {*FILES, *(name.replace("agent_1", "agent_0") for name in FILES)}


def test_nothing_yet(store):
    assert store.latest() is None
    assert store.numbers() == []


def test_the_newest_two_and_the_best_are_kept(store):
    for step in (1, 2, 3, 4, 5):
        store.commit(step, population(step), keep=[1])
    assert store.numbers() == [1, 4, 5]
    assert store.latest() == store.path(5)
    store.commit(6, population(6))
    assert store.numbers() == [5, 6]
    assert sorted(os.listdir(store.root)) == ["000005", "000006"]


def test_a_raising_callback_changes_nothing(store):
    store.commit(1, population(1))
    store.commit(2, population(2))

    def fail(folder):
        population(3)(folder)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        store.commit(3, fail)
    assert sorted(os.listdir(store.root)) == ["000001", "000002"]
    assert store.latest() == store.path(2)


def test_a_number_is_committed_once(store):
    store.commit(1, population(1))
    with pytest.raises(CheckpointError, match="never overwritten"):
        store.commit(1, population(1))
    with pytest.raises(CheckpointError, match="at least 0"):
        store.commit(-1, population(1))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(store, caplog, name, damage):
    store.commit(1, population(1))
    path = store.commit(2, population(2)) / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    fresh = CheckpointStore(store.root)
    with caplog.at_level(logging.WARNING):
        assert fresh.latest() == store.path(1)
        assert fresh.latest() == store.path(1)
    assert len(caplog.records) == 1
    # A flipped digest in the manifest and a flipped file look alike: one of the two is named.
    assert path.name in caplog.text or name == MANIFEST
    assert "000002.corrupt" in caplog.text
    assert sorted(os.listdir(store.root)) == ["000001", "000002.corrupt"]
    verify_folder(fresh.commit(2, population(2)))
    assert fresh.numbers() == [1, 2]


def test_the_last_good_one_survives_when_the_newer_one_rots(store):
    """Deleting is only safe for what two intact newer ones replace, as read by a process that wrote neither."""
    store.commit(1, population(1))
    store.commit(2, population(2))
    (store.path(2) / STATE).write_text("x")
    said = []
    fresh = CheckpointStore(store.root, report=said.append)
    fresh.commit(3, population(3))
    assert fresh.numbers() == [1, 3]
    assert len(said) == 1


def test_nothing_intact_is_none_and_said(store):
    store.commit(1, population(1))
    (store.path(1) / STATE).unlink()
    said = []
    assert CheckpointStore(store.root, report=said.append).latest() is None
    assert len(said) == 1
    store.commit(1, population(1))
    (store.path(1) / STATE).unlink()
    CheckpointStore(store.root, report=said.append).latest()
    assert sorted(os.listdir(store.root)) == ["000001.1.corrupt", "000001.corrupt"]


def test_leftovers_of_a_killed_process_are_no_checkpoint_and_are_cleaned(store):
    leftover = store.root / ".000001.4242.tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").touch()
    assert store.latest() is None
    store.commit(2, population(2))
    assert os.listdir(store.root) == ["000002"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95pickle",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 5) + b"{nope",
        struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}        ' + b"\0" * 4,
    ],
)
def test_what_is_no_safetensors_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors .*safetensors"):
        read_tensors(tmp_path / "x.safetensors")
