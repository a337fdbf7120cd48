"""Trackers get what the run's files say, and a resumed run continues; they change no result, and never end a run."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import digests, named_files
from agilerl.config.training import TRACKERS
from agilerl.errors import ConfigError, how_to_install
from agilerl.runs.directory import RunLayout
from agilerl.training.events import Event, IterationDone
from agilerl.training.resolved import resolve
from agilerl.training.run import resume, train
from agilerl.training.saved import open_run, recorded
from agilerl.training.setup import build
from agilerl.training.trackers import Trackers, check_trackers, values_of
from tests import programs
from tests.distributed.together import Job, run_jobs
from tests.faults.evidence import SHORT, evidence
from tests.faults.pieces import leave_after
from tests.training.small_runs import ROOT, lines

Sent = list[tuple[int, dict[str, Any]]]


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: Sent = []
        self.settings: dict[str, Any] = {}

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int) -> None:
        self.sent.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


class Broken(Kept):
    """Fails from an iteration on."""

    def __init__(self, at: int = 0, error: type[BaseException] = ConnectionError) -> None:
        super().__init__()
        self.at, self.error = at, error

    def log(self, values: dict[str, Any], step: int) -> None:
        if step >= self.at:
            raise self.error("no network")
        super().log(values, step)


def begun(out: Path, *overrides: str, trackers: Any = None) -> Iterator[Event]:
    return train(build(load_manifest(None, [*SHORT, *overrides])), out, command=["test"], trackers=trackers)


def resumed(out: Path, trackers: Any = None) -> Iterator[Event]:
    saved = open_run(out, report=lambda text: pytest.fail(text))
    return resume(build(saved.config, saved.checkpoint), saved.run, trackers=trackers)


def less_times(values: dict[str, Any]) -> dict[str, Any]:
    times = ("time/", "step_time", "tokens_per_second", "memory/")
    return {name: value for name, value in values.items() if not any(time in name for time in times)}


def series(sent: Sent) -> dict[str, list[tuple[int, Any]]]:
    """Return the course of each value."""
    found = defaultdict(list)
    for step, values in sent:
        for name, value in less_times(values).items():
            found[name].append((step, value))
    return dict(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Kept]:
    """A run without trackers of its configuration, followed by one of Python."""
    out, kept = tmp_path_factory.mktemp("whole") / "run", Kept()
    for _ in begun(out, trackers=[kept]):
        pass
    return out, kept


# -- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_every_metric_of_the_files_is_sent_under_its_agent(whole: tuple[Path, Kept]) -> None:
    out, kept = whole
    found = series(kept.sent)
    assert set(found["agent/0/hp/lr"][0]) == {0, 1e-5}
    for line in lines(out / "metrics.jsonl"):
        if line["kind"] in ("train", "eval"):
            own = {n: v for n, v in line.items() if n not in ("kind", "step", "generation", "agent", "outcome")}
            for name, value in less_times(own).items():
                if not isinstance(value, str):
                    assert (line["step"], value) in found[f"agent/{line['agent']}/{name}"], name
    train = [line for line in lines(out / "metrics.jsonl") if line["kind"] == "train" and line["step"] == 1]
    assert found["population/reward/mean"][0] == (1, pytest.approx(sum(line["reward"] for line in train) / 3))
    [evolved] = [line for line in lines(out / "metrics.jsonl") if line["kind"] == "evolution"]
    assert found["population/fitness/best"][0] == (2, evolved["evo/fitness/best"])
    assert found["population/fitness/mean"][0] == (2, pytest.approx(evolved["evo/fitness/mean"]))
    assert found["population/fitness/std"][0] == (2, pytest.approx(evolved["evo/fitness/std"]))
    assert found["population/replacements"] == [(2, evolved["evo/replacements"])]
    genes = {n.removeprefix("evo/hp/lr/"): v for n, v in evolved.items() if n.startswith("evo/hp/")}
    assert {i: v for i in genes for s, v in found[f"agent/{i}/hp/lr"] if s == 2} == genes
    assert [step for step, _ in kept.sent] == sorted(step for step, _ in kept.sent)
    summary = json.loads((out / "summary.json").read_text())
    tests = {who: found[f"test/{who}/reward_mean"][0] for who in ("base", "median_first_generation", "elite")}
    assert tests == {who: (at, summary["test"][who]["mean"]) for who, at in zip(tests, (0, 2, 4))}


@pytest.mark.model
def test_births_and_mutations_are_sent_as_numbers_and_in_words(whole: tuple[Path, Kept]) -> None:
    out, kept = whole
    found, records = series(kept.sent), lines(out / "lineage.jsonl")
    births = {r["agent"]: r["parent"] for r in records if r["event"] == "birth" and r["parent"] is not None}
    assert births
    assert {name: value for name, value in found.items() if name.endswith("/parent")} == {
        f"agent/{child}/parent": [(2, parent)] for child, parent in births.items()
    }
    mutations = [r for r in records if r["event"] == "mutation"]
    assert found["population/mutations"] == [(2, len(mutations))]
    [(step, text)] = found["lineage"]
    assert step == 2
    assert all(f"agent {child} born of {parent}" in text for child, parent in births.items())
    assert all(f"agent {m['agent']} mutated: lr " in text for m in mutations)
    assert all(f"agent {r['agent']} left" in text for r in records if r["event"] == "death")


@pytest.mark.model
def test_the_settings_are_sent_by_their_names(whole: tuple[Path, Kept]) -> None:
    out, kept = whole
    assert kept.calls == ["start", "finish"]
    settings = kept.settings
    assert (settings["training.pop_size"], settings["algorithm.name"], settings["run"]) == (3, "GRPO", str(out))
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())


def test_failures_are_words_and_counted_and_what_is_not_finite_is_left_out() -> None:
    nan = float("nan")
    event = IterationDone(1, 5, 0.5, {0: {"reward": 1.0, "loss": nan}, 1: {"reward": nan}}, {0: "ok", 1: "nonfinite"})
    assert values_of(event) == {
        "agent/0/reward": 1.0,
        "agent/1/outcome": "nonfinite",
        "population/generation": 1,
        "population/agents": 2,
        "population/failed": 1,
        "population/reward/mean": 1.0,
    }
    assert values_of(Event()) == {}


@pytest.mark.model
def test_a_run_is_the_same_to_the_bit_with_trackers(whole: tuple[Path, Kept], tmp_path: Path) -> None:
    out, _ = whole
    for _ in begun(tmp_path / "run", "training.trackers=[tensorboard]"):
        pass
    found = {n: d for n, d in evidence(tmp_path / "run").items() if not n.startswith(("tensorboard/", "trackers.json"))}
    expected = evidence(out)
    del expected["trackers.json"]  # of the one in Python
    differing = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    assert differing == {"run.json"}  # the settings name the tracker
    given = json.loads((tmp_path / "run" / "run.json").read_text())
    assert given["config"]["training"].pop("trackers") == {"tensorboard": {}}
    other = json.loads((out / "run.json").read_text())["config"]
    assert other["training"].pop("trackers") == {}
    assert given["config"] == other


# -- TensorBoard and W&B, read from what they wrote -------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def expected_scalars(kept: Kept) -> dict[str, list[tuple[int, Any]]]:
    found = {name: values for name, values in series(kept.sent).items() if not isinstance(values[0][1], str)}
    return {name: [(step, pytest.approx(value)) for step, value in values] for name, values in found.items()}


@pytest.mark.model
@pytest.mark.parametrize("iteration", [1, 3])
def test_tensorboard_shows_each_iteration_once_after_a_crash(
    iteration: int, whole: tuple[Path, Kept], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    leave_after(begun(out, "training.trackers=tensorboard"), iteration)
    (file,) = (out / "tensorboard").glob("events.out.tfevents.*")
    file.rename(file.with_name("events.out.tfevents.1.host"))  # files of one second would be read in any order
    for _ in resumed(out):
        pass
    assert less_times(scalars(out / "tensorboard")) == expected_scalars(whole[1])


@pytest.mark.model
@pytest.mark.processes
def test_of_several_processes_one_sends_the_metrics_of_all_agents(whole: tuple[Path, Kept], tmp_path: Path) -> None:
    run_jobs(2, Job(tmp_path / "run", (*SHORT, "training.trackers=[tensorboard]")))
    assert len(list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert less_times(scalars(tmp_path / "run" / "tensorboard")) == expected_scalars(whole[1])


def rows_of(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
    """Return history, configuration and run id in a file of W&B: records in blocks, as in a log of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, block, records, part = file.read_bytes(), 2**15, [], b""
    place = 7
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    rows, config, ids = [], {}, set()
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif kind == "config":
            config |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.config.update}
        elif kind == "run":
            ids.add(record.run.run_id)
    return rows, config, ids


def history(rows: list[dict[str, Any]]) -> Sent:
    own = ("iteration", "_step", "_runtime", "_timestamp")
    return [(row["iteration"], {n: v for n, v in row.items() if n not in own}) for row in rows]


@pytest.mark.model
@pytest.mark.processes
def test_wandb_offline_has_the_parts_of_a_run_under_one_id(
    whole: tuple[Path, Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    out, settings = tmp_path / "run", "training.trackers={wandb: {mode: offline, project: gcd, tags: [a]}}"
    leave_after(begun(out, settings), 3)
    identity = json.loads((out / "trackers.json").read_text())["trackers"]["wandb"]["id"]
    for _ in resumed(out):
        pass
    first, last = (rows_of(file) for file in sorted((out / "wandb").glob("offline-run-*/*.wandb")))
    sent = whole[1].sent
    assert series(history(first[0])) == series(sent[: len(first[0])])
    assert series(history(last[0])) == series(sent[-len(last[0]) :])
    assert (first[0][-1]["iteration"], last[0][0]["iteration"]) == (3, 3)  # after the checkpoint of iteration 2
    assert first[1]["training.pop_size"] == 3
    assert first[2] == last[2] == {identity}


@pytest.mark.model
def test_a_folder_does_not_choose_the_server_that_the_key_of_wandb_is_sent_to(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://localhost:1\n")
    with pytest.raises(ConfigError, match="wandb/settings"):
        Trackers({"wandb": {"mode": "offline"}}, RunLayout(tmp_path), {})


# -- trackers of the user's own ---------------------------------------------------------------------------------------


OWN = """
import json

class Mine:
    def __init__(self, path, prefix=""):
        self.file, self.prefix = open(path, "a"), prefix

    def log(self, values, step):
        print(json.dumps([self.prefix, step, values]), file=self.file)

    def finish(self):
        self.file.close()
"""


@pytest.mark.model
def test_a_class_in_a_file_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    manifest, file = tmp_path / "run.yaml", tmp_path / "sent.jsonl"
    manifest.write_text(f"training: {{trackers: {{'mine.py:Mine': {{path: '{file}', prefix: x}}}}}}\n")
    config = load_manifest(manifest, [*SHORT, "environment.task=reasoning_gym:gcd", "algorithm.max_output_tokens=10"])
    name = f"{tmp_path / 'mine.py'}:Mine"
    assert list(config.training.trackers) == [name]
    assert list(digests(named_files(config))["code"]) == [str(tmp_path / "mine.py")]
    with pytest.raises(ConfigError, match="--allow-code"):
        build(config)
    for _ in train(build(config, allow_code=True), tmp_path / "run", command=["test"]):
        pass
    sent = [json.loads(line) for line in file.read_text().splitlines()]
    assert {prefix for prefix, _, _ in sent} == {"x"}
    rewards = {
        (line["step"], line["agent"]): line["reward"]
        for line in lines(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "train"
    }
    assert rewards == {
        (step, int(name.split("/")[1])): value
        for _, step, values in sent
        for name, value in values.items()
        if name.startswith("agent/") and name.split("/")[2:] == ["reward"]
    }


@pytest.mark.parametrize("named", ["'../mine.py:Mine'", "['../mine.py:Mine']", "{'../mine.py:Mine': {}}"])
def test_code_is_beside_the_manifest(tmp_path: Path, named: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "run.yaml").write_text(f"training: {{trackers: {named}}}\n")
    with pytest.raises(ConfigError, match="folder of the manifest"):
        load_manifest(tmp_path / "of" / "run.yaml")


@pytest.mark.model
@pytest.mark.parametrize("earlier", [True, False])
def test_a_resumed_run_continues_in_the_run_of_its_tracker(
    earlier: bool, whole: tuple[Path, Kept], tmp_path: Path
) -> None:
    out, first, second = tmp_path / "run", Kept(), Kept()
    leave_after(begun(out, trackers=[first]), 3)
    assert first.calls == ["start", "finish"]
    if earlier:  # what earlier versions wrote
        (out / "trackers.json").write_text('{"trackers": {"Kept": {"id": "", "step": 3, "place": 4}}}')
    for _ in resumed(out, [second]):
        pass
    assert second.settings == {}  # it has them
    before = [(step, values) for step, values in first.sent if step < 3]
    assert series(before + second.sent) == series(whole[1].sent)


@pytest.mark.model
@pytest.mark.parametrize("text", ['{"trackers": {"Kept": {"id": 3}}}', "[]", '{"trackers": {"Kept": {"id": "'])
def test_damaged_identities_begin_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(text)
    with pytest.warns(UserWarning, match="damaged"):
        trackers = Trackers([kept := Kept()], RunLayout(tmp_path), {"lr": 1e-5}, resumed_at=3)
    trackers.finish()
    assert kept.settings == {"lr": 1e-5, "run": str(tmp_path)}
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"trackers": {"Kept": {"id": ""}}}


@pytest.mark.model
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_whatever_a_tracker_raises_the_run_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="switched off") as warned:
        events = list(begun(tmp_path / "run", "training.max_steps=48", trackers=[Broken(error=error), other := Twin()]))
    assert type(events[-1]).__name__ == "RunFinished"
    assert len(warned) == 1
    assert other.sent[-1][0] == 1


class Twin(Kept):
    """Another tracker of the same run."""


class Unwilling(Kept):
    """Does not start."""

    def start(self) -> None:
        raise PermissionError("no key")


@pytest.mark.model
def test_one_that_does_not_start_stops_a_new_run_and_no_resumed_one(tmp_path: Path) -> None:
    out, beside = tmp_path / "run", Kept()
    with pytest.raises(ConfigError, match=r"cannot be started.*no key"):
        next(begun(out, trackers=[beside, Unwilling()]))
    assert beside.calls == ["start", "finish"]
    leave_after(resumed(out, []), 2)
    with pytest.warns(UserWarning, match="no key"):
        assert type(list(resumed(out, [Unwilling()]))[-1]).__name__ == "RunFinished"


def test_a_loop_without_a_manifest(tmp_path: Path) -> None:
    kept = Kept()
    trackers = Trackers([kept], RunLayout(tmp_path), {"lr": 1e-5, "more": {"a": [1, 2], "b": None}})
    trackers(IterationDone(0, 7, 0.5, {0: {"reward": 1.0}}, {0: "ok"}))
    trackers.finish()
    assert [(step, values["agent/0/reward"]) for step, values in kept.sent] == [(7, 1.0)]
    assert kept.settings == {"lr": 1e-5, "more.a": "[1, 2]", "run": str(tmp_path)}
    assert kept.calls == ["start", "finish"]


# -- names and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[wandbb]", "did you mean 'wandb'"),
        ("[wandb, wandb]", "twice"),
        ("3", "names of trackers"),
        ("[3]", "names of trackers"),
        ("{wandb: {base_url: 'http://localhost:1'}}", "no setting"),
        ("{tensorboard: {log_dir: /tmp}}", "no setting"),
        ("{wandb: {settings: {base_url: x}}}", "no setting"),
        ("{'mine.py:Mine': {api_key: abc}}", "secret"),
    ],
)
def test_wrong_names_and_settings_are_refused(written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_manifest(None, [f"training.trackers={written}"])


@pytest.mark.parametrize("written", ["wandb", "[wandb]", "{wandb: }", "{wandb: {}}"])
def test_the_ways_to_write_it_are_one_and_survive_run_json(written: str) -> None:
    config = load_manifest(None, [f"training.trackers={written}"])
    assert config.training.trackers == {"wandb": {}}
    resolved = resolve(config)
    again = recorded({"config": resolved.document(), "given": resolved.given(), "date": "2026-01-01T00:00:00"})
    assert again.training.trackers == {"wandb": {}}


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_not_installed_is_refused_before_anything_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import imports

    monkeypatch.setattr(imports, "_is_package_available", lambda *_: False)
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr("agilerl.training.setup.load_runtime", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError) as refused:
        build(load_manifest(None, [f"training.trackers=[{name}]"]))
    assert how_to_install(name) in str(refused.value)
    with pytest.raises(ConfigError, match="not installed"):
        check_trackers([name])


def test_in_python_names_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="twice"):
        check_trackers([Kept(), Kept()])
    check_trackers([Kept()])


@pytest.mark.model
def test_an_object_without_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Tracker, which has log"):
        Trackers([object()], RunLayout(tmp_path), {})  # type: ignore[list-item]


@pytest.mark.processes
def test_nothing_is_imported_for_runs_without_trackers(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from agilerl.config.manifest import load_manifest\nfrom agilerl.training.run import train\n"
        "from agilerl.training.setup import build\n"
        f"for _ in train(build(load_manifest(None, {[*SHORT, 'training.max_steps=48']!r})), Path('run')): pass\n"
        "print(sorted({'wandb', 'tensorboard', 'mlflow', 'trackio'} & set(sys.modules)))\n"
    )
    done = programs.run("-c", script, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
