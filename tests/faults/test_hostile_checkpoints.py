"""Run directories that mean harm: nothing runs, nothing is written outside, one typed error each, within a second."""

import io
import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agilerl.algorithms import ALGORITHMS
from agilerl.errors import AgileRLError
from agilerl.runs.atomic import MANIFEST
from agilerl.training.records import RunRecords
from agilerl.training.saved import open_run, read_checkpoint
from tests.cli.conftest import agilerl  # noqa: F401
from tests.cli.outcome import Outcome
from tests.faults.unfinished import Unfinished, change_config, change_json, contents, newest, sealed

pytestmark = pytest.mark.model

ACTOR = "agent_*/actor/adapter_model.safetensors"
Damage = Callable[[Path], Any]


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def go_on(root: Path, unfinished: Unfinished) -> None:
    """Do what ``agilerl resume`` does before it samples, with the base model that is loaded already."""
    runtime, made = unfinished.session.population.runtime, []
    saved = open_run(root, report=lambda sentence: None)
    with saved.run:
        assert saved.checkpoint is not None
        state = read_checkpoint(saved.checkpoint, runtime)
        try:
            for agent in [*state.states, *filter(None, [state.progress.elite])]:
                made.append(ALGORITHMS[agent.algorithm].from_state(agent, runtime))
            RunRecords(saved.run, state).close()
        finally:
            for one in made:
                one.clean_up()


def refused(root: Path, unfinished: Unfinished) -> str:
    """Return the sentence; nothing outside the run directory may change, and it may not take long."""
    outside = {p: p.stat().st_mtime_ns for p in root.parent.rglob("*") if root not in p.parents and p != root}
    start = time.process_time()
    with pytest.raises(AgileRLError) as caught:
        go_on(root, unfinished)
    assert time.process_time() - start < 1
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert outside == {p: p.stat().st_mtime_ns for p in root.parent.rglob("*") if root not in p.parents and p != root}
    return str(caught.value)


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


# -- JSON --------------------------------------------------------------------------------------------------------------

TEXTS = {
    "deep": "[" * 100_000,
    "deep but balanced": '{"a":' * 500 + "1" + "}" * 500,
    "a giant number": '{"iteration": ' + "9" * 100_000 + "}",
    "a list": "[]",
    "null": "null",
    "no text": "\xff\xfe",
    "twice": '{"a": 1, "a": 2}',
}


@pytest.mark.parametrize(
    "name", ["state.json", "clock.json", "agent_*/agent.json", "agent_*/actor/adapter_config.json"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_json_that_is_no_state(text: str, name: str, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    next(newest(root).glob(name)).write_bytes(TEXTS[text].encode("latin-1"))
    sealed(newest(root))
    refused(root, unfinished)


VALUES: dict[str, list[tuple[str, Any]]] = {
    "state.json": [
        ("agents", []),
        ("agents", ["../../outside"]),
        ("agents", [-1]),
        ("agents", [10**30]),
        ("agents", [0.0]),
        ("agents", list(range(100_000))),
        ("next_index", 0),
        ("next_index", "7"),
        ("next_index", None),
        ("lineage_bytes", -1),
        ("lineage_bytes", 10**12),
        ("progress", None),
        ("progress.iteration", "2"),
        ("progress.iteration", True),
        ("progress.samples", 10**400),
        ("progress.samples", -5),
        ("progress.tokens", []),
        ("progress.tokens", {"generated": "1"}),
        ("progress.fitness", {"../x": {"mean": 0.0, "stderr": 0.0, "n": 1, "scores": []}}),
        ("progress.fitness", {"1": {"mean": "x", "stderr": 0.0, "n": 1, "scores": []}}),
        ("progress.base", 5),
        ("progress.best", "Infinity and more"),
        ("progress.median", {"index": 1}),
        ("memory", {"train_tokens": "many", "decode_rows": None}),
        ("unknown", 1),
    ],
    "clock.json": [
        ("seconds", -1.0),
        ("seconds", "Infinity"),
        ("seconds", "soon"),
        ("metrics_bytes", 10**12),
        ("metrics_bytes", -1),
        ("metrics_bytes", None),
        ("journal_records", 10**6),
        ("journal_records", 0.5),
    ],
    "agent_*/agent.json": [
        ("algorithm", "os.system"),
        ("algorithm", "DPO"),
        ("algorithm", None),
        ("base", 5),
        ("config.actor_network", "x"),
        ("config.runtime", "x"),
        ("config.config", {"lr": 1}),
        ("config.hp_config", {"lr": 1}),
        ("config.device", "cuda:7"),
        ("config.loss", "os:system"),
        ("config.index", "../x"),
        ("config.lr", "__import__('os')"),
        ("config.lr", -1.0),
        ("config.group_size", 10**30),
        ("config.seed", "NaN"),
        ("genes.lr", {"name": "lr"}),
        ("genes.nonsense", {"dtype": "float"}),
        ("genes", []),
        ("lora.r", 10**9),
        ("lora.r", 5),
        ("lora.r", "4"),
        ("lora.lora_alpha", "Infinity"),
        ("lora.use_rslora", "yes"),
        ("pad.pad_token_id", -3),
        ("pad", {}),
        ("schedule", {"num_epochs": 0, "warmup_proportion": 0.5}),
        ("schedule", {"num_epochs": 5, "evil": 1}),
        ("counters", []),
        ("counters.index", "0"),
        ("counters.index", 77),
        ("counters.parent", "x"),
        ("counters.fitness", {"a": 1}),
        ("counters.scores", [[1]]),
        ("counters.tokens", {"generated": 1}),
        ("counters.tokens", {"generated": -1, "trained": 0, "evaluated": 0}),
        ("counters.position", 10**40),
        ("counters.mut", 5),
        ("optimizer_steps", "NaN"),
        ("optimizer_steps", -1),
        ("own_loss", "os:system"),
        ("unknown", 1),
    ],
    "agent_*/actor/adapter_config.json": [
        ("r", 10**9),
        ("r", "8"),
        ("r", None),
        ("lora_alpha", {"a": 1}),
        ("peft_type", "PROMPT_TUNING; import os"),
    ],
}


@pytest.mark.parametrize(
    ("name", "key", "value"), [(name, key, value) for name, all_ in VALUES.items() for key, value in all_]
)
def test_values_of_another_kind(name: str, key: str, value: Any, unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")

    def change(document: Any) -> None:
        *way, last = key.split(".")
        for part in way:
            document = document[part]
        document[last] = value

    change_json(next(newest(root).glob(name)), change)
    sealed(newest(root))
    if (name, key) in (
        ("agent_*/actor/adapter_config.json", "lora_alpha"),
        ("agent_*/actor/adapter_config.json", "peft_type"),
    ):
        go_on(root, unfinished)  # what agent.json says counts, and these are never used
    else:
        refused(root, unfinished)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of settings that are odd and allowed
def test_every_value_of_every_file_replaced_by_others(unfinished: Unfinished, tmp_path: Path) -> None:
    """Wherever a value of another kind stands: a typed error, or it makes no difference to what is built."""
    root = unfinished.copy(tmp_path / "run")
    folder = newest(root)
    for path in (folder / "state.json", folder / "clock.json", next(folder.glob("agent_*")) / "agent.json"):
        good = json.loads(path.read_text())
        for way in ways(good):
            for value in (None, "x", -1, 1e400, [], {"a": {}}, 2**70):
                path.write_text(json.dumps(replaced(good, way, value)))
                with suppress(AgileRLError):
                    read_and_build(folder, unfinished)
        path.write_text(json.dumps(good))


def read_and_build(folder: Path, unfinished: Unfinished) -> None:
    runtime = unfinished.session.population.runtime
    for state in read_checkpoint(folder, runtime).states[:1]:
        ALGORITHMS[state.algorithm].from_state(state, runtime).clean_up()


def ways(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value; of long lists the first one's."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [way, *(deeper for key, item in items for deeper in ways(item, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = replaced(value[way[0]], way[1:], new)
    return copy


# -- run.json, which is a manifest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(training=5), "training must be a mapping"),
        (lambda c: c.update(evil={}), "unknown key 'evil'"),
        (lambda c: c["training"].update(pop_siz=1), "did you mean 'pop_size'"),
        (lambda c: c["training"].update(pop_size="x" * 10_000), "training.pop_size"),
        (lambda c: c["environment"].update(allow_code=True), "unknown key 'environment.allow_code'"),
        (lambda c: c["environment"].update(dataset=[{"path": "/etc/hosts.json"}], task=None, params={}), "hosts.json"),
        (lambda c: c["environment"].update(dataset=[{"path": "a\0b.json"}], task=None), "control characters"),
        (lambda c: c["environment"].update(graders=[{"name": "judge", "params": {"api_key": "k"}}]), "a secret"),
    ],
)
def test_a_configuration_that_no_manifest_could_hold(
    change: Damage, words: str, unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    change_config(root, change)
    assert words in refused(root, unfinished)


def test_rows_of_another_file_are_not_read(unfinished: Unfinished, tmp_path: Path) -> None:
    """A run directory says where its rows are, but not what they hold: a stranger's would have them sent back."""
    secret = tmp_path / "credentials.json"
    secret.write_text('[{"question": "private", "answer": "key"}]')
    root = unfinished.copy(tmp_path / "run")
    change_config(root, lambda c: c["environment"].update(dataset=[{"path": str(secret)}], task=None, params={}))
    sentence = refused(root, unfinished)
    assert "is not recorded in run.json" in sentence
    assert "--allow-changes" in sentence
    change_json(root / "run.json", lambda info: {**info, "files": {"data": {str(secret): "0" * 64}}})
    assert "has changed since the run began" in refused(root, unfinished)
    assert "private" not in sentence


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"schema_version": 1e400}', "x"])
def test_a_run_json_that_is_none(
    text: str,
    unfinished: Unfinished,
    tmp_path: Path,
    agilerl: Callable[..., Outcome],  # noqa: F811
) -> None:
    root = unfinished.copy(tmp_path / "run")
    (root / "run.json").write_text(text)
    refused(root, unfinished)
    for command in (["resume", "run"], ["train", "--out", "run", "--resume", "auto"], ["report", "run"]):
        ended = agilerl(*command)
        assert (ended.code, ended.errors.count("\n")) == (2, 1)
        assert "run.json" in ended.errors
