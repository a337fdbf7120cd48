"""JSON of a run directory that means harm, ``run.json`` among it: one typed error each, within a second."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agilerl.algorithms import GRPO
from agilerl.algorithms.codec import read_state
from agilerl.errors import AgileRLError, CheckpointError
from agilerl.training.checkpoint import read_checkpoint
from tests.cli.outcome import Agilerl
from tests.faults.hostile import go_on, refused
from tests.faults.unfinished import Unfinished, change_config, change_json, newest, sealed

pytestmark = pytest.mark.model

Damage = Callable[[Path], Any]


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
        ("agents", [10**30]),
        ("agents", list(range(100_000))),
        ("next_index", 0),
        ("next_index", None),
        ("lineage_bytes", -1),
        ("lineage_bytes", 10**12),
        ("progress", None),
        ("progress.iteration", True),
        ("progress.samples", 10**400),
        ("progress.tokens", {"generated": "1"}),
        ("progress.fitness", {"../x": {"mean": 0.0, "stderr": 0.0, "n": 1, "scores": []}}),
        ("progress.fitness", {"1": {"mean": 0.0}}),
        ("progress.kept", [{"agent": 1, "iteration": 1, "fitness": {"mean": 0.0}}]),
        ("progress.elite", {}),
        ("progress.base", 5),
        ("progress.best", "Infinity and more"),
        ("progress.median", {"index": 1}),
        ("memory", {"train_tokens": "many", "decode_rows": None}),
        ("unknown", 1),
    ],
    "clock.json": [
        ("seconds", -1.0),
        ("seconds", "Infinity"),
        ("metrics_bytes", 10**12),
        ("metrics_bytes", -1),
        ("journal_records", 10**6),
        ("journal_records", 0.5),
    ],
    "agent_*/agent.json": [
        ("algorithm", "os.system"),
        ("algorithm", "DPO"),
        ("base", 5),
        ("config.actor_network", "x"),
        ("config.runtime", "x"),
        ("config.config", {"lr": 1}),
        ("config.hp_config", {"lr": 1}),
        ("config.device", "cuda:7"),
        ("config.loss", "os:system"),
        ("config.index", "../x"),
        ("config.lr", "__import__('os')"),
        ("config.group_size", 10**30),
        ("config.seed", "NaN"),
        ("genes.lr", {"name": "lr"}),
        ("genes.nonsense", {"dtype": "float"}),
        ("lora.r", 10**9),
        ("lora.r", 5),
        ("lora.lora_alpha", "Infinity"),
        ("lora.use_rslora", "yes"),
        ("pad.pad_token_id", -3),
        ("schedule", {"num_epochs": 0, "warmup_proportion": 0.5}),
        ("schedule", {"num_epochs": 5, "evil": 1}),
        ("counters.index", 77),
        ("counters.parent", "x"),
        ("counters.fitness", {"a": 1}),
        ("counters.scores", [[1]]),
        ("counters.tokens", {"generated": -1, "trained": 0, "evaluated": 0}),
        ("counters.position", 10**40),
        ("counters.mut", 5),
        ("optimizer_steps", -1),
        ("own_loss", "os:system"),
        ("unknown", 1),
    ],
    "agent_*/actor/adapter_config.json": [
        ("r", 10**9),
        ("r", "8"),
        ("lora_alpha", {"a": 1}),
        ("lora_alpha", 1000),
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
    if key in ("lineage_bytes", "metrics_bytes", "journal_records") and type(value) is int and value > 0:
        go_on(root, unfinished)  # lines that there are not: the checkpoint before can do without them
        assert newest(root).name == "000001"
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
                    read_and_build(path, unfinished)
        path.write_text(json.dumps(good))


def test_a_progress_without_one_of_its_values_is_refused(unfinished: Unfinished, tmp_path: Path) -> None:
    """What was left out would begin at 0 again."""
    path = newest(unfinished.copy(tmp_path / "run")) / "state.json"
    good = json.loads(path.read_text())
    for name in good["progress"]:
        if name in ("kept", "pace", "teacher"):  # newer than the first checkpoints
            continue
        rest = {key: value for key, value in good["progress"].items() if key != name}
        path.write_text(json.dumps({**good, "progress": rest}))
        with pytest.raises(CheckpointError, match=f"progress: {name} is missing"):
            read_and_build(path, unfinished)


def read_and_build(path: Path, unfinished: Unfinished) -> None:
    runtime = unfinished.session.population.runtime
    if path.name != "agent.json":
        read_checkpoint(path.parent, runtime)
        return
    state = read_state(path.parent, runtime.store.layers)
    GRPO.from_state(state, runtime).clean_up()


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
def test_a_run_json_that_is_none(text: str, unfinished: Unfinished, tmp_path: Path, agilerl: Agilerl) -> None:
    root = unfinished.copy(tmp_path / "run")
    (root / "run.json").write_text(text)
    refused(root, unfinished)
    for command in (["resume", "run"], ["train", "--out", "run", "--resume", "auto"], ["report", "run"]):
        ended = agilerl(*command)
        assert (ended.code, ended.errors.count("\n")) == (2, 1)
        assert "run.json" in ended.errors
