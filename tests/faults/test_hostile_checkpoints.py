"""Checkpoints that mean harm: nothing runs, nothing is written outside, one typed error each, within a second."""

import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agilerl.runs.atomic import MANIFEST
from agilerl.training.saved import open_run
from tests.faults.hostile import go_on, refused
from tests.faults.unfinished import Unfinished, change_json, contents, newest, sealed

pytestmark = pytest.mark.model

ACTOR = "agent_*/actor/adapter_model.safetensors"


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_the_run_itself_goes_on(unfinished: Unfinished, tmp_path: Path) -> None:
    go_on(unfinished.copy(tmp_path / "run"), unfinished)


# -- pickles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("adapter_model.bin", "adapter_model.safetensors", "pytorch_model.bin", "optimizer.pt", "training_args.bin"),
        *("optimizer.safetensors", "agent.json", "state.json", "clock.json", "attributes.pkl", "__init__.py", "x.npy"),
    ],
)
@pytest.mark.parametrize("form", ["pickle", "torch", "numpy"])
def test_a_pickle_under_any_name_is_never_read_as_one(
    name: str, form: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    payload = Payload(tmp_path / "executed")
    buffer = io.BytesIO()
    if form == "pickle":
        pickle.dump(payload, buffer)
    elif form == "torch":
        torch.save(payload, buffer)
    else:
        np.save(buffer, np.array([payload], dtype=object), allow_pickle=True)
    folder = newest(root)
    for place in (folder, *folder.glob("agent_*"), *folder.glob("agent_*/actor"), folder / "elite" / "actor"):
        if place == folder or name not in ("state.json", "clock.json"):
            (place / name).write_bytes(buffer.getvalue())
    sealed(folder)
    read = name in ("adapter_model.safetensors", "optimizer.safetensors", "agent.json", "state.json", "clock.json")
    if read:
        refused(root, unfinished)
    else:
        go_on(root, unfinished)
    assert not payload.path.exists()
    pickle.loads(pickle.dumps(payload))  # it would have worked
    assert payload.path.exists()


# -- links and names that lead outside ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "lineage.jsonl", "journal.jsonl", "summary.json", "report.html", ".lock"),
        *("completions", "checkpoints", "checkpoints/000002", "elite"),
    ],
)
def test_a_part_of_a_run_that_is_a_link_is_refused_and_its_target_left_alone(
    name: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    """Lines would be cut off the target, and files be written and deleted in it."""
    root, outside = unfinished.copy(tmp_path / "run"), tmp_path / "outside"
    path = root / name
    if path.is_dir():
        path.rename(outside)
        (outside / ".000001.1.tmp").mkdir()
        (outside / "step_000009.parquet").write_text("mine")
    else:
        outside.write_text('{"precious": true}\n')
        path.unlink(missing_ok=True)
    path.symlink_to(outside)
    before = contents(outside) if outside.is_dir() else outside.read_text()
    if name == "checkpoints/000002":
        go_on(root, unfinished)  # a damaged checkpoint, and there is another one
        assert (root / "checkpoints" / "000002.corrupt").is_symlink()
    else:
        assert "link" in refused(root, unfinished)
    assert (contents(outside) if outside.is_dir() else outside.read_text()) == before
    assert not outside.is_dir() or (outside / ".000001.1.tmp").is_dir()


@pytest.mark.parametrize("inside", ["agent.json", "actor", "optimizer.safetensors"])
def test_links_inside_a_checkpoint_are_damage(inside: str, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    place = next(newest(root).glob("agent_*")) / inside
    place.rename(tmp_path / "target")
    place.symlink_to(tmp_path / "target")
    said: list[str] = []
    saved = open_run(root, report=said.append)
    saved.run.close()
    assert saved.checkpoint == root / "checkpoints" / "000001"
    assert len(said) == 1


@pytest.mark.parametrize("name", ["../../../outside", "/etc/passwd", "agent_0/../../../outside", "", "."])
def test_a_manifest_of_files_that_names_others(name: str, unfinished: Unfinished, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    root = unfinished.copy(tmp_path / "run")
    entry = {"size": 4, "sha256": "0" * 64}
    change_json(newest(root) / MANIFEST, lambda files: {**files, name: entry})
    saved = open_run(root, report=lambda sentence: None)
    saved.run.close()
    assert saved.checkpoint == root / "checkpoints" / "000001"


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "journal.jsonl", "checkpoints/000002/state.json"])
def test_a_pipe_is_not_waited_for(name: str, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    (root / name).unlink()
    os.mkfifo(root / name)
    if name.startswith("checkpoints/"):
        go_on(root, unfinished)
    else:
        refused(root, unfinished)


# -- tensors -----------------------------------------------------------------------------------------------------------


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(name: str = "x", dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


BYTES = {
    "empty": b"",
    "short": b"\x01\0\0",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "header of a gigabyte": struct.pack("<Q", 2**30) + b"{" + b" " * 1000,
    "no json": struct.pack("<Q", 4) + b"\x80\x04\x95.",
    "overlapping": header({**one("a"), **one("b", offsets=(8, 24))}, bytes(24)),
    "a hole": header({**one("a"), **one("b", offsets=(32, 48))}, bytes(48)),
    "beyond the end": header(one(offsets=(0, 2**40), shape=(2**38,)), bytes(16)),
    "negative": header(one(offsets=(16, 0)), bytes(16)),
    "shape and size disagree": header(one(shape=(2**32, 2**32)), bytes(16)),
    "overflowing shape": header(one(shape=(2**63, 2**63)), bytes(16)),
    "unknown type": header(one(dtype="PICKLE"), bytes(16)),
    "deep": struct.pack("<Q", 50_000) + b"[" * 50_000,
    "many": header({f"t{i}": one(offsets=(0, 0), shape=(0,))["x"] for i in range(20_000)}),
    "odd names": header(one("../../outside\0\x1b[31m" + "x" * 5000), bytes(16)),
    "trailing": header(one(), bytes(1000)),
}


@pytest.mark.parametrize("where", [ACTOR, "agent_*/optimizer.safetensors", "elite/actor/adapter_model.safetensors"])
@pytest.mark.parametrize("damage", BYTES)
def test_files_that_are_no_tensors(damage: str, where: str, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    next(newest(root).glob(where)).write_bytes(BYTES[damage])
    sealed(newest(root))
    refused(root, unfinished)


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda t: torch.full_like(t, torch.nan),
    "transposed": lambda t: t.T.contiguous(),
    "flat": lambda t: t.reshape(-1),
    "a scalar": lambda t: torch.tensor(1.0),
    "empty": lambda t: t[:0],
    "larger rank": lambda t: torch.cat([t, t]),
    "three dimensions": lambda t: t[None],
    "integers": lambda t: t.to(torch.int64),
    "booleans": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "8 bits": lambda t: t.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("where", [ACTOR, "agent_*/optimizer.safetensors"])
@pytest.mark.parametrize("change", TENSORS)
def test_tensors_that_do_not_fit(change: str, where: str, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    path = next(newest(root).glob(where))
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    save_file({**tensors, name: TENSORS[change](tensors[name])}, path, {"format": "pt"})
    sealed(newest(root))
    refused(root, unfinished)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_are_not_finite(value: float, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    path = next(newest(root).glob(ACTOR))
    tensors = load_file(path)
    tensors[min(tensors)][0, 0] = value
    save_file(tensors, path, {"format": "pt"})
    sealed(newest(root))
    assert "not finite" in refused(root, unfinished)
