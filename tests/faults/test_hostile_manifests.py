"""Manifests that mean harm: nothing runs, nothing is written, one typed sentence each, within a second."""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.envs.upstream import known_tasks
from agilerl.errors import AgileRLError, ConfigError
from agilerl.training.setup import check
from agilerl.training.tasks import task
from tests.cli.outcome import Agilerl

TOUCH = "import os\nos.mkdir(os.environ['EXECUTED'])\n"


JUDGE = "name: judge, params: {model: m, api_key_env: null, cache"


@pytest.fixture(scope="module", autouse=True)
def reasoning_gym() -> None:
    """Import it: no manifest is slow because of that."""
    known_tasks()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module in it that leaves a trace when it runs."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("EXECUTED", str(tmp_path / "executed"))
    monkeypatch.syspath_prepend(str(here))
    (here / "evil.py").write_text(f"{TOUCH}\nclass Env:\n    max_turns = 1\n\ndef reward(completion): return 1.0\n")
    return here


def read_and_checked(path: Path) -> None:
    """Do all that comes before the base model is loaded."""
    config = load_manifest(path)
    check(config)
    task(config)


def refused(text: str, place: Path) -> str:
    path = place / "hostile.yaml"
    path.write_text(text)
    before = sorted(place.parent.rglob("*"))
    start = time.thread_time()
    with pytest.raises(AgileRLError) as caught:
        read_and_checked(path)
    assert time.thread_time() - start < 3  # on a busy machine a CPU second does half of what it does on a quiet one
    assert sorted(place.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


YAML = {
    "a tag that calls": "training: !!python/object/apply:os.mkdir [executed]",
    "a tag of a module": "training: !!python/module:evil",
    "a tag of a name": "training: {seed: !!python/name:os.system }",
    "a tag of a class": "training: !!python/object:evil.Env {}",
    "an own tag": "training: !evil {}",
    "a verbatim tag": "training: !<tag:yaml.org,2002:python/object/apply:os.system> [ls]",
    "a tag handle": "%TAG !e! tag:yaml.org,2002:python/\n---\ntraining: !e!object/apply:os.system [ls]",
    "an alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
    "a merge bomb": "a: &a {x: 1}\n" + "".join(f"b{i}:\n  <<: *a\n" for i in range(1000)),
    "an alias of itself": "&a [*a]",
    "deep flow": "training: " + "[" * 20_000,
    "deep mappings": "training: " + "{a: " * 10_000,
    "deep block": "\n".join("  " * level + "a:" for level in range(200)),
    "many keys": "".join(f"key{number}: 1\n" for number in range(3500)),
    "many keys of a section": "training:\n" + "".join(f"  pop_siz{number}: 1\n" for number in range(2500)),
    "many mistakes": "environment: {dataset: [" + "{path: 5}, " * 2500 + "]}",
    "a giant number": "training: {pop_size: " + "9" * 40_000 + "}",
    "a giant exponent": "algorithm: {lr: 1e999999999}",
    "too many digits of a number that fits": f"training: {{pop_size: {2**70}}}",
    "a number where a mapping is": "environment: 5",
    "a list where a name is": "algorithm: {name: [GRPO]}",
    "a mapping where a text is": "environment: {env_type: multiturn, env_id: {a: 1}}",
    "a list as a loss": "algorithm: {loss_norm: [token-mean]}",
    "null characters": 'environment: {dataset: "a\\0b.jsonl"}',
    "half a character": 'environment: {dataset: "\\ud800.jsonl"}',
    "terminal codes": 'environment: {task: "\\e[2J\\e[31mreasoning_gym:x"}',
    "an unknown key": "allow_code: true",
    "an unknown key of a section": "environment: {allow_code: true}",
    "several documents": "training: {}\n---\ntraining: {}",
    "a task of another family": "environment: {task: 'evil:reward'}",
    "a hub name that is none": "environment: {dataset: 'https://evil/x'}",
    "a hub name with a way up": "environment: {dataset: '../../etc/passwd'}",
    "a hub name with spaces": "environment: {dataset: 'a b/c;d'}",
    "a hub name with a revision": "environment: {dataset: 'org/name@refs/pr/1'}",
    "a home directory": "environment: {dataset: '~/.netrc.json'}",
    "a device": "environment: {dataset: /dev/stdin}",
    "a process": "environment: {dataset: /proc/self/environ}",
    "an absolute path": "environment: {dataset: /etc/passwd.json}",
    "a file outside for the exam": "environment: {dataset: evil.jsonl, dataset_exam: ../evil.jsonl}",
    "a pickle in Parquet's place": "environment: {dataset: evil.pkl}",
    "a cache outside": f"environment: {{graders: [{{{JUDGE}: ../c.jsonl}}}}]}}",
    "a cache that is a program": f"environment: {{graders: [{{{JUDGE}: evil.py}}}}]}}",
    "an environment of gymnasium that imports": "environment: {env_type: multiturn, env_id: GymV26Environment-v0, "
    "params: {env_id: 'evil:Env-v0'}}",
    "an environment of gymnasium that reads a file": "environment: {env_type: multiturn, env_id: Humanoid-v5, "
    "params: {xml_file: /etc/passwd}}",
}


@pytest.mark.parametrize("name", YAML)
def test_hostile_yaml(name: str, place: Path) -> None:
    refused(YAML[name], place)
    assert not (place.parent / "executed").exists()


def test_a_manifest_of_a_hundred_megabytes_is_not_read(place: Path) -> None:
    path = place / "large.yaml"
    with open(path, "wb") as file:
        file.truncate(100_000_000)
    start = time.thread_time()
    with pytest.raises(ConfigError, match=r"100,000,000.*50,000"):
        load_manifest(path)
    assert time.thread_time() - start < 0.1


@pytest.mark.parametrize("kind", ["named pipe", "device", "link to a device", "socket", "folder"])
def test_a_manifest_that_never_ends_is_not_read(kind: str, place: Path) -> None:
    """And is called what it is."""
    path = place / "it.yaml"
    if kind == "named pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = Path("/dev/zero")
    found = "a folder" if kind == "folder" else "a pipe, socket or device"
    with pytest.raises(ConfigError, match=re.escape(f"expected a plain file at {path}, found {found}")):
        load_manifest(path)


@pytest.mark.parametrize("text", ["", "\n\n", "# algorithm: {lr: 1e-4}\n", "---\n", "null"])
def test_an_empty_manifest_is_no_way_to_ask_for_the_defaults(text: str, place: Path) -> None:
    (place / "empty.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is empty") as refusal:
        load_manifest(place / "empty.yaml", ["training.pop_size=2"])
    assert "\n" not in str(refusal.value)
    (place / "empty.yaml").write_text("{}")
    assert load_manifest(place / "empty.yaml", ["training.pop_size=2"]).training.pop_size == 2


CODE = {
    "grader in a file": "{graders: [{name: 'evil.py:reward'}]}",
    "grader in a module": "{graders: [{name: 'evil:reward'}]}",
    "grader of Python": "{graders: [{name: 'os:system'}]}",
    "grader without a name": "{graders: [{name: 'evil.py'}]}",
    "environment in a file": "{env_type: multiturn, env_id: 'evil.py:Env'}",
    "environment in a module": "{env_type: multiturn, env_id: 'evil:Env'}",
    "environment of Python": "{env_type: multiturn, env_id: 'os:mkdir', params: {path: executed}}",
    "environment by gymnasium's own syntax": "{env_type: multiturn, env_id: 'evil:Env-v0'}",
}


@pytest.mark.parametrize("name", CODE)
def test_code_is_named_with_the_flag_that_allows_it_and_not_run(name: str, place: Path) -> None:
    sentence = refused(f"environment: {CODE[name]}", place)
    assert "names code, and a manifest does not run code" in sentence
    assert "--allow-code" in sentence
    assert not (place.parent / "executed").exists()


@pytest.mark.model
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_the_command_line_refuses_it_too(options: tuple[str, ...], place: Path, agilerl: Agilerl) -> None:
    (place / "it.yaml").write_text(f"environment: {CODE['grader in a file']}")
    ended = agilerl("train", str(place / "it.yaml"), *options)
    assert (ended.code, ended.errors.count("\n")) == (2, 1)
    assert "--allow-code" in ended.errors
    assert not (place.parent / "executed").exists()


@pytest.mark.model
@pytest.mark.parametrize("part", ["model", "tokenizer", "adapter", "reward model"])
def test_code_beside_a_model_is_not_run(part: str, place: Path) -> None:
    """``auto_map`` names code that transformers would run where it trusts it; weights may be pickles."""
    from agilerl.models.adapters import read_adapter
    from agilerl.models.base import load_base, load_tokenizer
    from agilerl.models.tiny import tiny_model_path
    from agilerl.rewards.library import library_grader

    folder = place / "model"
    folder.mkdir()
    for path in tiny_model_path().glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "modeling_evil.py").write_text(TOUCH + "class Evil: ...\n")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nmkdir\n(X\x08\x00\x00\x00executedtR.")
    (folder / "adapter_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes())
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer")
    names = dict.fromkeys(classes, "modeling_evil.Evil")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "auto_map": names, "model_type": "evil"}))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "auto_mapping": names, "r": 4}))
    (folder / "tokenizer.json").unlink()
    load: dict[str, Callable[[], object]] = {
        "model": lambda: load_base(str(folder)),
        "tokenizer": lambda: load_tokenizer(str(folder)),
        "adapter": lambda: read_adapter(folder, []),
        "reward model": library_grader("reward_model", {"model": str(folder)}).setup,  # type: ignore[attr-defined]
    }
    with pytest.raises(AgileRLError):
        load[part]()
    assert not (place.parent / "executed").exists()
    assert not (place / "executed").exists()


def test_a_hidden_link_does_not_lead_out(place: Path) -> None:
    """Folders, files and code: links are followed before it is decided whether something is in the folder."""
    outside = place.parent / "outside"
    outside.mkdir()
    (outside / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (outside / "code.py").write_text(TOUCH)
    (place / "data").symlink_to(outside)
    (place / "code.py").symlink_to(outside / "code.py")
    assert "leads out of the folder" in refused("environment: {dataset: data/rows.jsonl}", place)
    for name in ("data/code.py", "code.py", "../outside/code.py", str(outside / "code.py")):
        text = yaml.safe_dump({"environment": {"graders": [{"name": f"{name}:reward"}]}})
        assert "is not in the folder of the manifest" in refused(text, place)
