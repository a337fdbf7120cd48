"""Commands on real models, and what these compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.programs import Program

ROOT = Path(__file__).parents[2]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def agilerl(place: Path, *arguments: str) -> Program:
    return Program("-m", "agilerl", *arguments, cwd=place)


def done(place: Path, *arguments: str) -> str:
    """Return what a command printed that has to succeed."""
    program = agilerl(place, *arguments)
    output, errors = program.communicate()
    assert program.returncode == 0, output + errors
    return output


def talk(place: Path, text: str) -> dict[str, Any]:
    """Return what is said of one message to the elite of the run."""
    command = [sys.executable, "-m", "agilerl", "chat", "run", "--temperature", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chat = subprocess.run(command, cwd=place, env=environment, input=f"{text}\n", capture_output=True, text=True)
    assert chat.returncode == 0, chat.stderr
    return json.loads(chat.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def same_when_merged(place: Path, folder: Path, exported: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a base and with an adapter by plain PEFT, which are those of the merged run."""
    done(place, "merge", "run", "merged")
    base = AutoModelForCausalLM.from_pretrained(folder)
    before, adapted = logits(base), logits(PeftModel.from_pretrained(base, exported))
    merged = logits(AutoModelForCausalLM.from_pretrained(place / "merged"))
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)
    return before, adapted


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]
