"""A run on a GGUF file: planned, trained, resumed, examined, merged and exported under the file's name."""

import json
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agilerl.training.events import IterationDone
from tests.cli.outcome import Agilerl
from tests.faults.pieces import begin
from tests.gguf_files import tiny_llama, write_gguf

pytestmark = pytest.mark.model

ROWS = "".join(json.dumps({"question": f"Say {n}.", "answer": str(n)}) + "\n" for n in range(60))
SETTINGS = (
    *("training.pop_size=2", "training.max_steps=32", "training.evo_steps=1", "training.checkpoint_steps=1"),
    *("environment.data_batch_size_per_gpu=2", "environment.eval_prompts=2", "environment.test_prompts=4"),
    *("algorithm.group_size=4", "algorithm.batch_size=2", "algorithm.max_output_tokens=4"),
    *("environment.dataset=rows.jsonl", "environment.reward=exact", "network.lora_config.r=2"),
)
BASE = "network.pretrained_model_name_or_path"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    (tmp_path / "rows.jsonl").write_text(ROWS)
    write_gguf(tmp_path / "model.gguf", tiny_llama())
    return tmp_path


def test_a_run_on_a_file(place: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = agilerl("train", *SETTINGS, f"{BASE}=model.gguf", "--dry-run")
    assert (checked.code, checked.errors) == (0, "")
    done = agilerl("train", *SETTINGS, f"{BASE}=model.gguf", "--out", "run", "--json")
    assert done.code == 0, done.errors
    json.loads(done.output)
    assert json.loads((place / "run/run.json").read_text())["config"]["network"]["pretrained_model_name_or_path"] == (
        "model.gguf"
    )
    named = json.loads((place / "run/elite/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "model.gguf"

    assert agilerl("eval", "run", "--json").code == 0
    monkeypatch.setattr("sys.stdin", StringIO("Say 1.\n"))
    talk = agilerl("chat", "run", "--json")
    assert (talk.code, len(talk.output.splitlines())) == (0, 1), talk.errors
    exported = agilerl("export", "run", "out")
    assert exported.code == 0, exported.errors
    assert "model.gguf" in (place / "out/README.md").read_text()
    merged = agilerl("merge", "run", "merged", "--dtype", "float32")
    assert merged.code == 0, merged.errors
    ids = torch.arange(4, 24)[None]
    (weights,) = place.glob("home/gguf/*-float32")
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(weights), place / "out")(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(place / "merged")(ids).logits
    torch.testing.assert_close(whole, adapted, rtol=1e-4, atol=1e-5)


def test_a_run_on_a_file_resumes_to_the_bit(place: Path, agilerl: Agilerl) -> None:
    for event in begin(place / "whole", *SETTINGS, f"{BASE}=model.gguf", "training.max_steps=48"):
        if isinstance(event, IterationDone) and event.iteration == 2:
            shutil.copytree(place / "whole", place / "half")
    shutil.rmtree(place / "home")  # a cache may be emptied at any time
    resumed = agilerl("resume", "half", "-q")
    assert resumed.code == 0, resumed.errors
    elites = [(place / run / "elite/adapter_model.safetensors").read_bytes() for run in ("whole", "half")]
    assert elites[0] == elites[1]
