"""A whole run with vLLM, from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    *("network.use_vllm=true", "algorithm.lr=2e-3", "training.pop_size=2", "training.max_steps=12800"),
    *("training.evo_steps=5", "environment.eval_prompts=100", "environment.test_prompts=400"),
)


def train(out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "agilerl"), "train", *SMALL, *overrides, "--out", str(out), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)


@pytest.mark.timeout(600)
def test_training_with_vllm_learns(tmp_path: Path) -> None:
    done = train(tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout)  # vLLM prints nothing between
    assert printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    base, elite = summary["test"]["base"], summary["test"]["elite"]
    assert elite["mean"] > base["mean"] + 5 * (base["stderr"] ** 2 + elite["stderr"] ** 2) ** 0.5
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["config"]["algorithm"]["use_vllm"] is True
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [value for row in metrics for name, value in _flat(row) if name == "sampling/sampling_logp_difference/max"]
    assert len(gaps) >= 10
    assert max(gaps) < 1e-3
    assert (tmp_path / "run" / "elite" / "adapter_model.safetensors").exists()


def _flat(row: Any) -> list[tuple[str, Any]]:
    if not isinstance(row, dict):
        return []
    return [pair for name, value in row.items() for pair in [(name, value), *_flat(value)]]


def test_an_adapter_that_may_outgrow_the_room_stops_before_training(tmp_path: Path) -> None:
    settings = ("network.vllm_config={max_lora_rank: 16}", "mutation.probabilities.arch_mut=0.5")
    done = train(tmp_path / "run", *settings)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: network.vllm_config.max_lora_rank=16 is less than")
    assert not (tmp_path / "run").exists()
