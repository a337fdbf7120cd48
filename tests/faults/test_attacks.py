"""Attacks: what a model folder, a manifest, a run directory or a file of rows can do to who uses it.

Each is made and executed, in a process with limits. It must end in a sentence (or do no harm), soon, with little
memory; the canary stays where it is; and no request with a key reaches the listener.
"""

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import httpx2
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import safetensors.torch
import torch
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.errors import ConfigError
from agilerl.models.model_config import check_tokenizer_parts
from agilerl.models.tiny import tiny_model_path
from agilerl.runs.directory import _sha256
from agilerl.safety.addresses import check_cluster, may_have_key
from agilerl.safety.bounds import full_matches
from agilerl.safety.servers import request
from tests.cli.outcome import ANNOUNCED
from tests.envs.tools.family_tokenizers import without_tools
from tests.faults.evidence import SHORT
from tests.faults.unfinished import Unfinished, change_config, change_json, newest
from tests.loopback import Handler, answering
from tests.training.small_runs import ROOT, environment

pytestmark = [pytest.mark.model, pytest.mark.skipif(sys.platform != "linux", reason="limits of processes")]

KEY = "sk-SeCrEt-0123456789"
KEYS = dict.fromkeys(("VLLM_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), KEY)
SECONDS, MEBIBYTES = 30, 1500
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys."""


# -- what is attacked --------------------------------------------------------------------------------------------------


@dataclass
class Listener:
    """A server that writes down what it is sent, and answers with a redirection or a nuisance."""

    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)
    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")


@pytest.fixture
def listener() -> Iterator[Listener]:
    state = Listener()

    class Notes(Handler):
        def do_GET(self) -> None:
            state.headers.append(dict(self.headers))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = state.answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

    with answering(Notes) as state.url:
        yield state


@pytest.fixture(scope="module")
def attacked() -> Iterator[Callable[..., dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.faults.attacked"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def ask(arguments: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
        request = {"arguments": arguments, "folder": str(folder), "environment": variables, "seconds": SECONDS}
        process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        found: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        return found

    yield ask
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=30) == 0


# -- what attacks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """Where an attack is made."""

    folder: Path
    url: str
    run: Unfinished

    def model(self) -> Path:
        """Return a copy of the tiny model."""
        return Path(shutil.copytree(tiny_model_path(), self.folder / "model"))

    def manifest(self, **sections: Any) -> list[str]:
        """Write a manifest; return the command that checks it with all that is there."""
        (self.folder / "it.yaml").write_text(yaml.safe_dump(sections))
        return ["train", "it.yaml", *SHORT, "--dry-run"]

    def copied_run(self) -> Path:
        return self.run.copy(self.folder / "run")


Attack = Callable[[Scene], list[str]]
MODEL = {"network": {"pretrained_model_name_or_path": "model"}}


def template(source: str) -> Attack:
    def make(scene: Scene) -> list[str]:
        (scene.model() / "chat_template.jinja").write_text(source)
        return scene.manifest(**MODEL)

    return make


def model_json(name: str, **values: Any) -> Attack:
    def make(scene: Scene) -> list[str]:
        path = scene.model() / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        return scene.manifest(**MODEL)

    return make


def model_file(name: str, make_file: Callable[[Path], None]) -> Attack:
    def make(scene: Scene) -> list[str]:
        path = scene.model() / name
        path.unlink(missing_ok=True)
        make_file(path)
        return scene.manifest(**MODEL)

    return make


def rows(name: str, make_file: Callable[[Path], None]) -> Attack:
    def make(scene: Scene) -> list[str]:
        make_file(scene.folder / name)
        return scene.manifest(environment={"dataset": name})

    return make


def sparse(size: int, start: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(start)
            file.truncate(size)

    return make


def in_run(change: Callable[[Path], None], command: str = "resume") -> Attack:
    def make(scene: Scene) -> list[str]:
        change(scene.copied_run())
        return [command, "run"]

    return make


def replaced(name: str, make_file: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).unlink()
        make_file(root / name)

    return change


def lora(**values: Any) -> Attack:
    return lambda scene: scene.manifest(network={"lora_config": values})


def overrides(**values: Any) -> Attack:
    return lambda scene: scene.manifest(network={"config_overrides": values})


def ended(change: Callable[[Path], None], *command: str) -> Attack:
    return lambda scene: finished(scene, change, *command)


def grader(name: str, **params: Any) -> Attack:
    return lambda scene: scene.manifest(environment={"graders": [{"name": name, "params": params}]})


def judge(scene: Scene, **params: Any) -> list[str]:
    return scene.manifest(environment={"graders": [{"name": "judge", "params": {"model": "m", **params}}]})


def vllm(scene: Scene, **settings: Any) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_config": {"base_url": scene.url, "server_timeout": 2, **settings}}


def resumed_with_vllm(scene: Scene) -> list[str]:
    change_config(scene.copied_run(), lambda config: config["network"].update(vllm(scene)))
    return ["resume", "run"]


def tokenizer(**parts: Any) -> Attack:
    return model_json("tokenizer.json", **parts)


def huge_checkpoint(root: Path) -> None:
    """A file of a checkpoint that is a terabyte of nothing, with a manifest that says so."""
    folder = newest(root)
    name = "clock.json"
    sparse(2**40)(folder / name)
    change_json(folder / "MANIFEST.json", lambda files: {**files, name: {**files[name], "size": 2**40}})
    text = json.dumps(json.loads((folder / "MANIFEST.json").read_text()), indent=2, sort_keys=True)
    (folder / "MANIFEST.json").write_text(text + "\n")


def image(path: Path) -> None:
    """Rows whose question is an image at a path, which would be opened."""
    os.mkfifo(path.parent / "pipe.png")
    made = datasets.Dataset.from_list([{"question": {"path": str(path.parent / "pipe.png"), "bytes": None}}] * 40)
    made.cast_column("question", datasets.Image()).add_column("answer", ["1"] * 40).to_parquet(path)


def replacing(count: int) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    return {"type": "Sequence", "normalizers": [one] * count}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def deep(key: str) -> Callable[[Path], None]:
    return lambda path: path.write_text('{"' + key + '": ' + "[" * 100_000)  # type: ignore[return-value]


def index_of(name: str, make_file: Callable[[Path], None] = lambda path: None) -> Attack:
    """Weights in several files, of which an index names one."""

    def make(scene: Scene) -> list[str]:
        folder = scene.model()
        (folder / "model.safetensors").unlink()
        (folder / "parts").mkdir()
        make_file(folder / name)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})
        )
        return scene.manifest(**MODEL)

    return make


def whole_weights(path: Path) -> None:
    shutil.copy(tiny_model_path() / "model.safetensors", path)


def pickled_weights(path: Path) -> None:
    torch.save(safetensors.torch.load_file(tiny_model_path() / "model.safetensors"), path)


def index_in_another_folder(scene: Scene) -> list[str]:
    """A configuration that names an index below the folder, which names a file above it."""
    command = index_of("../1.safetensors", whole_weights)(scene)
    place = scene.folder / "model" / "model.safetensors.index.json"
    place.rename(place.parent / "parts" / place.name)
    path = scene.folder / "model" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "transformers_weights": f"parts/{place.name}"}))
    return command


def many_labels(path: Path) -> None:
    config = json.loads((tiny_model_path() / "config.json").read_text())
    path.write_text(json.dumps({**config, "id2label": {str(n): "x" for n in range(400_000)}}))


def cached_in_rows(scene: Scene) -> list[str]:
    (scene.folder / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    return judge(scene, base_url=scene.url, api_key_env=None, cache="rows.jsonl")


def wide_reward_model(scene: Scene) -> list[str]:
    path = scene.model() / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 3 * 2**14, "num_hidden_layers": 4000}))
    # None of the model's own: whatever is missing would be made, at the size that the configuration states.
    safetensors.torch.save_file({"x": torch.zeros(1)}, path.parent / "model.safetensors", metadata={"format": "pt"})
    return grader("reward_model", model="model")(scene)


def finished(scene: Scene, change: Callable[[Path], None], *command: str) -> list[str]:
    """A command about a run that has ended, whose elite is an agent of a checkpoint."""
    root = scene.copied_run()
    agent = min(newest(root).glob("agent_*"))  # which founders are left depends on the processor
    shutil.copytree(agent / "actor", root / "elite")
    (root / "journal.jsonl").unlink()
    elite = {"index": int(agent.name.removeprefix("agent_")), "step": 1, "hyperparameters": {}}
    (root / "summary.json").write_text(json.dumps({"status": "finished", "generations": 1, "elite": elite}))
    change(root)
    return [*command]


def in_summary(**values: Any) -> Callable[[Path], None]:
    return lambda root: change_json(root / "summary.json", lambda summary: {**summary, **values})


def on_a_base(**settings: str) -> Callable[[Path], None]:
    """A run that says this of its base."""

    def change(info: dict[str, Any]) -> dict[str, Any]:
        for name in ("config", "given"):
            info[name]["network"].update(settings)
            info[f"{name}_sha256"] = _sha256(info[name])
        return info

    return lambda root: change_json(root / "run.json", change)


def template_outside(scene: Scene) -> Callable[[Path], None]:
    """A run that says that its chat template is a file of the user."""
    secret = scene.folder / "secret.txt"
    secret.write_text("xyzzycanary {{ messages[0].content }}")
    return on_a_base(chat_template_path=str(secret))


def born(count: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with open(root / "lineage.jsonl", "a") as file:
            for index in range(100, 100 + count):
                file.write(
                    json.dumps({"agent": index, "event": "birth", "generation": 0, "hyperparameters": {}}) + "\n"
                )

    return change


def linked(name: str, of_run: bool = False) -> Attack:
    """A file of a model, or of a run, that is a link to one of the user's with the same content."""

    def make(scene: Scene) -> list[str]:
        path = (scene.copied_run() if of_run else scene.model()) / name
        target = scene.folder / "private"
        path.rename(target)
        path.symlink_to(target)
        return ["report", "run"] if of_run else scene.manifest(**MODEL)

    return make


def cached(target: str) -> Attack:
    """A model as the hub's client stores it, with a link from its blobs to ``target``."""

    def make(scene: Scene) -> list[str]:
        repository = scene.folder / "models--me--model"
        blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123"
        shutil.copytree(tiny_model_path(), scene.folder / "private")
        snapshot.mkdir(parents=True)
        if target == "folder":
            blobs.symlink_to(scene.folder / "private")
        else:
            shutil.copytree(tiny_model_path(), blobs)
        if target == "file":
            (blobs / "tokenizer.json").unlink()
            (blobs / "tokenizer.json").symlink_to(scene.folder / "private" / "tokenizer.json")
        for file in (file for file in blobs.iterdir() if file.is_file()):
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        return scene.manifest(network={"pretrained_model_name_or_path": str(snapshot.relative_to(scene.folder))})

    return make


def linked_completions(root: Path) -> None:
    first = min((root / "completions").glob("*.parquet"))
    (root / "completions").rename(root.parent / "private")
    (root / "completions").mkdir()
    (root / "completions" / first.name).symlink_to(f"../../private/{first.name}")


def has_hardware(value: Any) -> Callable[[Path], None]:
    return lambda root: change_json(root / "run.json", lambda info: {**info, "hardware": value})


on_an_option = on_a_base(pretrained_model_name_or_path="--trust-remote-code")
"""A run whose base is an option of vLLM's, which would run code."""


def half_a_character(path: Path) -> None:
    data = pa.array([b"1+1=\xed\xa0\xbd"] * 40, pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(data), data.buffers())
    parquet.write_table(pa.table({"question": texts, "answer": ["2"] * 40}), path)


HALF = "\ud83d"
HALVES: dict[str, dict[str, Any]] = {
    "in the name of a parameter": {"environment": {"params": {HALF: 1}}},
    "in a name": {"network": {"pretrained_model_name_or_path": HALF}},
    **{
        f"in a judge's {name}": {"environment": {"graders": [{"name": "judge", "params": {"model": "m", name: value}}]}}
        for name, value in (("system", HALF), ("template", f"{{{{ completion }}}} {HALF}"), ("request", {"x": HALF}))
    },
}
HUNDRED = "range(100000)"
BACKTRACKING = r"(\w+\.?)+\d\d\d"

REFUSED: dict[str, Attack] = {
    # Chat templates; tests/test_templates.py has more.
    "template: a division by zero": template("{{ 1 / 0 }}"),
    "template: recursion": template("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    "template: a range of a million million": template("{% for a in range(10 ** 12) %}{% endfor %}"),
    "template: python": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    # Models.
    "config: a billion layers": model_json("config.json", num_hidden_layers=10**9),
    "config: thousands of wide layers": model_json("config.json", num_hidden_layers=1000, hidden_size=3 * 2**16),
    "config: a wide model": model_json("config.json", hidden_size=3 * 2**18, intermediate_size=2**22),
    "config: heads of a million dimensions": model_json("config.json", head_dim=10**6),
    "config: a vocabulary of a billion": model_json("config.json", vocab_size=10**9),
    "config: a vocabulary that would be made anew": model_json("config.json", vocab_size=40_000_000, hidden_size=3072),
    "config: an end token that is text": model_json("generation_config.json", eos_token_id="abc"),
    "config: an end token that is text there": model_json("config.json", eos_token_id="abc"),
    "config: a billion labels": model_json("config.json", num_labels=10**9),
    "config: a million end tokens": model_json("config.json", eos_token_id=list(range(10**6))),
    "config: less than no layers": model_json("config.json", num_hidden_layers=-1),
    "config: attention out of a repository": model_json(
        "config.json", _attn_implementation="kernels-community/flash-attn"
    ),
    "config: a type by an odd name": model_json("config.json", dtype="__import__('os')"),
    "overrides: attention out of a repository": overrides(_attn_implementation="kernels-community/flash-attn"),
    "overrides: attention by its other name": overrides(attn_implementation="kernels-community/flash-attn"),
    "overrides: a method": overrides(to_dict=5),
    "overrides: a class": overrides(__class__=5),
    "config: deep": model_file("config.json", deep("a")),
    "config: code": model_json("config.json", auto_map={"AutoConfig": "evil.Evil"}, model_type="evil"),
    "model: a pipe as config.json": model_file("config.json", os.mkfifo),
    "model: a pipe as tokenizer.json": model_file("tokenizer.json", os.mkfifo),
    "model: a pipe as the template": model_file("chat_template.jinja", os.mkfifo),
    "model: a pipe as the weights": model_file("model.safetensors", os.mkfifo),
    "model: a device as the weights": model_file("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    **{
        f"model: a link as {name}": linked(name)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    },
    "model: a link as the weights": linked("model.safetensors"),
    "model: blobs that are a link": cached("folder"),
    "model: a blob that is a link": cached("file"),
    "weights: an index that names a link": index_of(
        "parts/1.safetensors",
        lambda path: (whole_weights(path.parents[2] / "private"), path.symlink_to("../../private"))[1],
    ),
    "model: a sparse tokenizer": model_file("tokenizer.json", sparse(20 * 2**30)),
    "model: sparse weights": model_file("model.safetensors", sparse(2**40)),
    "tokenizer: backtracking": tokenizer(pre_tokenizer=split("(a+)+c")),
    "tokenizer: a million million": tokenizer(normalizer=replacing(6)),
    "config: as many labels as a file holds": model_file("config.json", many_labels),
    "config: an index in another folder": index_in_another_folder,
    "config: weights of another kind": model_json(
        "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "overrides: a billion layers": overrides(num_hidden_layers=10**9),
    "weights: an index that names a device": index_of("/dev/zero"),
    "weights: an index that names a file outside": index_of("../1.safetensors", whole_weights),
    "weights: an index that names a pipe": index_of("parts/1.safetensors", os.mkfifo),
    "weights: an index that names a pickle": index_of("part.bin", pickled_weights),
    "reward model: a wide one": wide_reward_model,
    # Patterns.
    "pattern: layers that backtrack": lora(target_modules=BACKTRACKING),
    "pattern: layers that backtrack in any engine": lora(target_modules=r"((?:(?:\w\w)+|\w|\.)+)\W"),
    "pattern: layers of a million parts": lora(target_modules="((((a{100}){100}){100}){100}){100}"),
    "pattern: layers without end": lora(target_modules="(" * 9000),
    "pattern: a grader of a million parts": grader("regex", pattern="((((a{100}){100}){100}){100}){100}"),
    "pattern: a grader with a day of time": grader("regex", pattern="(a+)+b", timeout=86400),
    "pattern: a judge of a million parts": lambda scene: judge(
        scene, base_url=scene.url, api_key_env=None, pattern="(((((a{100}){100}){100}){100}){100})"
    ),
    "reward model: a number": grader("reward_model", model=5),
    "reward model: a name of nothing": grader("reward_model", model="no/such-model"),
    # Rows.
    "rows: a pipe": rows("rows.jsonl", os.mkfifo),
    "rows: a device": rows("rows.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "rows: thirty sparse gigabytes": rows("rows.jsonl", sparse(30 * 2**30)),
    "rows: thirty sparse gigabytes of CSV": rows("rows.csv", sparse(30 * 2**30, b"question,answer\n")),
    "rows: deep": rows("rows.jsonl", lambda path: path.write_text("[" * 1_000_000) and None),
    "rows: many digits": rows("rows.jsonl", lambda path: path.write_text('{"a": ' + "9" * 1_000_000 + "}") and None),
    "rows: packed": rows("rows.jsonl", lambda path: path.write_bytes(gzip.compress(bytes(10**7))) and None),
    "rows: half of a character": rows("rows.parquet", half_a_character),
    "rows: a pipe as an image": rows("rows.parquet", image),
    "rows: torn Parquet": rows("rows.parquet", lambda path: path.write_bytes(b"PAR1" + bytes(1000) + b"PAR1") and None),
    "exam: a hundred million prompts": lambda scene: [*scene.manifest(), "environment.eval_prompts=100000000"],
    "init: thirty sparse gigabytes": lambda scene: (
        sparse(30 * 2**30)(scene.folder / "rows.jsonl"),
        ["init", "my.yaml", "--data", "rows.jsonl"],
    )[1],
    # What a manifest reaches.
    **{
        f"text: half of a character, {name}": lambda scene, sections=sections: scene.manifest(**sections)
        for name, sections in HALVES.items()
    },
    "judge: replies among the rows": cached_in_rows,
    "ray: the cluster of a manifest": lambda scene: scene.manifest(
        distributed={"backend": "ray", "address": scene.url.replace("http", "ray")}
    ),
    "openenv: messages without end": lambda scene: scene.manifest(
        environment={
            "env_type": "multiturn",
            "env_id": f"openenv:{scene.url}",
            "params": {"max_turns": 1, "max_message_size_mb": 1e9},
        }
    ),
    # Run directories.
    "run: five thousand agents at once": ended(born(5000), "report", "run"),
    "run: a template of the user, in chat": lambda scene: finished(scene, template_outside(scene), "chat", "run"),
    "run: a template of the user, in a merged model": lambda scene: finished(
        scene, template_outside(scene), "merge", "run", "out"
    ),
    "run: seconds that are text": ended(in_summary(seconds="\x1b"), "compare", "run", "run"),
    "run: tokens that are a list": ended(in_summary(tokens=[1]), "compare", "run", "run"),
    "run: an elite that is a list": ended(in_summary(elite={"index": [], "step": 0}), "schedule", "run"),
    "run: genes that are a list": lambda scene: (
        scene.run.copy(scene.folder / "mine"),
        finished(scene, in_summary(elite={"index": 0, "step": 0, "hyperparameters": ["x"]}), "compare", "mine", "run"),
    )[1],
    "run: an elite that is text": ended(in_summary(elite="x"), "schedule", "run"),
    "run: a sparse journal": in_run(replaced("journal.jsonl", sparse(20 * 2**30))),
    "run: sparse metrics": in_run(replaced("metrics.jsonl", sparse(20 * 2**30)), "report"),
    "run: a sparse lineage": in_run(replaced("lineage.jsonl", sparse(2**40)), "report"),
    "run: a pipe as lineage": in_run(replaced("lineage.jsonl", os.mkfifo), "report"),
    "run: a line of 100 MB": in_run(replaced("metrics.jsonl", sparse(100 * 2**20)), "report"),
    **{f"run: a link as {name}": linked(name, of_run=True) for name in ("run.json", "metrics.jsonl", "lineage.jsonl")},
    **{
        f"run: links as completions, in {command}": in_run(linked_completions, command)
        for command in ("report", "lineage", "resume", "schedule", "chat")
    },
    "run: links as completions, in compare": lambda scene: (
        scene.run.copy(scene.folder / "mine"),
        in_run(linked_completions)(scene),
        ["compare", "mine", "run"],
    )[2],
    **{
        f"run: hardware of {value!r}": in_run(has_hardware(value), "report")
        for value in ("x", {"cuda": "x"}, {"cuda": 5})
    },
    "text: half of a character, in a gene": lambda scene: [
        *scene.manifest(),
        'mutation={rl_hp_selection: {"reward_weights.\\ud83d": {min: 1, max: 2}}}',
    ],
    "run: a base that is an option, in chat": ended(on_an_option, "chat", "run"),
    "run: a base that is an option, merged": ended(on_an_option, "merge", "run", "out"),
    "run: a base that is an option, served": ended(on_an_option, "serve", "run", "--dry-run"),
    "run: a link in its elite": lambda scene: finished(
        scene,
        lambda root: (
            (root / "elite" / "adapter_config.json").rename(scene.folder / "private"),
            (root / "elite" / "adapter_config.json").symlink_to(scene.folder / "private"),
        )[1],
        "chat",
        "run",
    ),
    # Keys.
    "key: to the server of a manifest": lambda scene: scene.manifest(network=vllm(scene)),
    "key: to the server of a run": resumed_with_vllm,
    "key: to the judge of a manifest": lambda scene: judge(scene, base_url=scene.url),
    "key: another one, to OpenAI": lambda scene: judge(scene, api_key_env="AWS_SECRET_ACCESS_KEY"),
    "key: by a name that looks like OpenAI's": lambda scene: judge(
        scene, base_url="https://api.openai.com@127.0.0.1:1/v1"
    ),
}


SAYS = {
    **dict.fromkeys((name for name in REFUSED if "link" in name), "is a link that leads out of"),
    "reward model: a wide one": "parameters according to its config.json",
    "config: weights of another kind": "quantised by gptq",
    "config: heads of a million dimensions": "its *.safetensors hold",
    **dict.fromkeys((name for name in REFUSED if name.startswith("text: ")), "half of a character"),
    "overrides: a method": "has no setting 'to_dict'",
}
"""Of attacks that would otherwise end in another sentence, with more memory or another package used by then."""


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.processes
def test_an_attack_ends_in_a_sentence(
    name: str, attacked: Callable[..., dict[str, Any]], listener: Listener, unfinished: Unfinished, tmp_path: Path
) -> None:
    found = executed(REFUSED[name], attacked, listener, unfinished, tmp_path)
    assert found["code"] == 2, found["output"]
    output = ANNOUNCED.sub("", found["output"], count=1)
    said = [line for line in output.splitlines() if not line.startswith("warning: ")]
    assert len(said) == 1, found["output"]
    assert said[0].startswith("error: ")
    assert SAYS.get(name, "") in said[0]
    assert listener.headers == []


HARMLESS: dict[str, Attack] = {
    "model: the links of the hub's cache": cached("nothing"),
    "tokenizer: padding to a billion": tokenizer(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    ),
    "run: a name that commands the terminal": lambda scene: (
        scene.copied_run().rename(scene.folder / "run\x1b[2J"),
        ["report", "run\x1b[2J"],
    )[1],
    "run: genes that command the terminal": lambda scene: finished(
        scene,
        lambda root: (
            (root / "lineage.jsonl").write_text((root / "lineage.jsonl").read_text().replace('"lr"', '"lr\\u001b[2J"'))
            and None
        ),
        "schedule",
        "run",
    ),
    "manifest: a name that commands the terminal": lambda scene: (
        (scene.folder / "it\x1b[2J.yaml").write_text("{}"),
        ["train", "it\x1b[2J.yaml", *SHORT, "--dry-run"],
    )[1],
    "run: a checkpoint of a terabyte": lambda scene: (huge_checkpoint(scene.copied_run()), ["resume", "run"])[1],
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.processes
def test_an_attack_does_no_harm(
    name: str, attacked: Callable[..., dict[str, Any]], listener: Listener, unfinished: Unfinished, tmp_path: Path
) -> None:
    found = executed(HARMLESS[name], attacked, listener, unfinished, tmp_path)
    assert found["code"] == 0, found["output"]


def executed(
    attack: Attack,
    attacked: Callable[..., dict[str, Any]],
    listener: Listener,
    unfinished: Unfinished,
    tmp_path: Path,
    **variables: str,
) -> dict[str, Any]:
    """Execute an attack and check what holds for all of them."""
    folder, canary = tmp_path / "here", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("alive")
    arguments = attack(Scene(folder, listener.url, unfinished))
    found = attacked(arguments, folder, {**KEYS, "CANARY": str(canary), **variables})
    assert found["code"] is not None, "it had to be killed"
    assert found["seconds"] < SECONDS
    assert found["mebibytes"] < MEBIBYTES
    assert "Traceback" not in found["output"]
    assert COMMANDS.search(found["output"]) is None
    assert KEY not in found["output"]
    assert canary.read_text() == "alive"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary", "here"]
    return found


# -- a key goes where the user allows it -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["environment", "command line", "above", "manifest", "beside", "another port"])
@pytest.mark.processes
def test_a_key_goes_to_an_address_that_the_user_allows(
    way: str, attacked: Callable[..., dict[str, Any]], listener: Listener, unfinished: Unfinished, tmp_path: Path
) -> None:
    allowed = {
        "environment": f"http://other:1, {listener.url}/v1",
        "above": listener.url,
        "beside": f"{listener.url}/other",
        "another port": "http://127.0.0.1:1",
    }
    expected = way in ("environment", "command line", "above")

    def attack(scene: Scene) -> list[str]:
        command = scene.manifest(network=vllm(scene))
        return [*command, *([f"network.vllm_config.base_url={scene.url}"] if way == "command line" else [])]

    listener.answer = 404, {}, b""
    found = executed(attack, attacked, listener, unfinished, tmp_path, AGILERL_ALLOWED_ADDRESSES=allowed.get(way, ""))
    assert found["code"] == 2
    sent = [headers.get("Authorization") for headers in listener.headers]
    assert sent == ([f"Bearer {KEY}"] if expected else [])


@pytest.mark.parametrize(
    ("allowed", "covered", "others"),
    [
        ("https://h/v1", ("/v1", "/v1/", "/v1/chat"), ("", "/", "/other", "/v1other", "/v1/../other")),
        ("https://h/team", ("/team", "/team/v1"), ("", "/v1", "/teams", "/other")),
        ("https://h", ("", "/v1", "/other"), (":1/v1", ".test/v1")),
    ],
)
def test_an_allowed_address_covers_itself_and_what_is_below(
    allowed: str, covered: tuple[str, ...], others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGILERL_ALLOWED_ADDRESSES", allowed)
    assert [end for end in (*covered, *others) if may_have_key("A_KEY", f"https://h{end}")] == list(covered)


def test_the_key_of_openai_goes_to_its_api_only() -> None:
    host = "https://api.openai.com"
    ends = ("/v1", "/v1/chat/completions", "", "/other", "/v2", ".test/v1")
    assert [end for end in ends if may_have_key("OPENAI_API_KEY", f"{host}{end}")] == ["/v1", "/v1/chat/completions"]
    assert not may_have_key("ANOTHER_KEY", f"{host}/v1")


def test_all_names_together_have_one_allowance_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the names takes less than the allowance."""
    monkeypatch.setattr("agilerl.safety.bounds.PATTERN_SECONDS", 0.5)
    names, start = [f"{'a' * 16}!{number}x" for number in range(500)], time.process_time()
    with pytest.raises(ConfigError, match="nested repeats"):
        full_matches(r"(?:a|a)+[xy]", names, "lora_config.target_modules")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("key", ["open_pattern", "close_pattern"])
def test_a_response_template_takes_no_time(key: str) -> None:
    tokenizer: Any = without_tools()
    tokenizer.response_template = {"start_anchor": "a", "fields": {"tool_calls": {key: r"<\|call\|>(\w+)"}}}
    check_tokenizer_parts(tokenizer, "it")
    tokenizer.response_template["fields"]["tool_calls"][key] = r"<\|call\|>(\w+)+>"
    with pytest.raises(ConfigError, match=r"'it': .* of its response template has nested repeats"):
        check_tokenizer_parts(tokenizer, "it")


@pytest.mark.processes
def test_a_key_does_not_follow_a_redirection(
    attacked: Callable[..., dict[str, Any]], listener: Listener, unfinished: Unfinished, tmp_path: Path
) -> None:
    stolen: list[dict[str, str]] = []

    class Thief(Handler):
        def do_GET(self) -> None:
            stolen.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()

    with answering(Thief) as thief:
        listener.answer = 307, {"Location": f"{thief}/health"}, b""
        found = executed(
            lambda scene: scene.manifest(network=vllm(scene)),
            attacked,
            listener,
            unfinished,
            tmp_path,
            AGILERL_ALLOWED_ADDRESSES=listener.url,
        )
    assert found["code"] == 2
    assert stolen == []
    assert len(listener.headers) == 1


ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "too long": (200, {}, b" " * (80 * 2**20)),
    "packed": (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(80 * 2**20), 1)),
    "packed in another way": (200, {"Content-Encoding": "zstd"}, b"x" * 1000),
    "deep": (200, {}, b"[" * 200_000),
    "too large a number": (200, {}, b'{"choices": [{"message": {"content": "{\\"score\\": 1' + b"0" * 400 + b'}"}}]}'),
    "no header at all": (200, {}, b"\0" * 1000),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_address_cannot_answer_without_end(name: str, listener: Listener) -> None:
    """A judge is whoever the manifest says."""
    from agilerl.errors import RewardError
    from agilerl.rewards.judge import JudgeGrader

    listener.answer = ANSWERS[name]
    with JudgeGrader("m", base_url=listener.url, api_key_env=None, attempts=1, timeout=5) as grader:
        (found,) = grader(["q"], ["a"])
    assert isinstance(found, RewardError)
    assert len(str(found)) < 1000
    assert ("more than 4,194,304 bytes" in str(found)) == (name in ("too long", "packed"))


HEAD = b"HTTP/1.1 200 OK\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "a byte of a header at a time": (HEAD + b"X: ", b"y"),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "many interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "the name of a packed file": (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\x03", b"a" * 100),
    "packed blocks of nothing": (HEAD + b"Content-Encoding: deflate\r\n\r\n\x78\x01", b"\0\0\0\xff\xff" * 20),
    "the extension of a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;", b"a"),
    "headers at the end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
    "a byte of the body at a time": (HEAD + b"\r\n", b"a"),
}
"""What a server begins with, and what it says again and again."""


@pytest.mark.parametrize("name", ENDLESS)
def test_the_time_for_an_answer_is_for_all_of_it(name: str) -> None:
    """Each wait of the client is short, and none of them is the last."""
    begins, goes_on = ENDLESS[name]
    asked = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = asked.accept()
        with connection, suppress(OSError):
            connection.recv(2**16)
            connection.sendall(begins)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                connection.sendall(goes_on)
                time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    began = time.monotonic()
    with asked, httpx2.Client(timeout=2) as client:
        with pytest.raises(httpx2.TimeoutException):
            request(client, "GET", f"http://127.0.0.1:{asked.getsockname()[1]}", seconds=0.3)
        assert time.monotonic() - began < 3
    thread.join()


def test_a_connection_is_bounded_by_the_request_that_uses_it(listener: Listener) -> None:
    """It outlives the first one's time, and serves the next."""
    with httpx2.Client(timeout=2) as client:
        for _ in range(3):
            assert request(client, "GET", listener.url, seconds=0.5).content == b"{}"
            time.sleep(0.3)


@pytest.mark.parametrize("way", ["typed", "RAY_ADDRESS", "AGILERL_ALLOWED_ADDRESSES"])
def test_a_cluster_that_the_user_names_is_joined(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = "ray://head:10001"
    (tmp_path / "it.yaml").write_text(yaml.safe_dump({"distributed": {"backend": "ray", "address": address}}))
    if way != "typed":
        monkeypatch.setenv(way, address)
    config = load_manifest(tmp_path / "it.yaml", [f"distributed.address={address}"] if way == "typed" else [])
    check_cluster(config.distributed.address, config.typed_addresses)
    with pytest.raises(ConfigError):
        check_cluster("ray://other:10001", config.typed_addresses)


def test_the_pattern_of_a_judge_is_given_up(listener: Listener) -> None:
    from agilerl.errors import RewardTimeoutError
    from agilerl.rewards.judge import JudgeGrader

    reply = {"choices": [{"message": {"content": "ab" * 40 + "!"}}]}
    listener.answer = 200, {}, json.dumps(reply).encode()
    pattern = r"((?:(?:ab)+|a|b)+)$"
    with JudgeGrader("m", base_url=listener.url, api_key_env=None, attempts=1, pattern=pattern) as grader:
        (found,) = grader(["q"], ["a"])
    assert isinstance(found, RewardTimeoutError)
