"""Runs of `agilerl train` that end in seconds."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.config.manifest import load_manifest
from agilerl.training.run import train
from agilerl.training.setup import build
from tests import programs

ROOT = Path(__file__).resolve().parent.parent.parent
TOURNAMENT = (
    *("selection_strategy.name=tournament", "algorithm.lr=1e-5"),
    "mutation={probabilities: {no_mut: 0.2, rl_hp_mut: 0.8}, rl_hp_selection: {lr: {min: 1e-6, max: 1e-2}}}",
)
"""A population that keeps its size, from a learning rate that is too low: what is not about the search runs with it."""
SIZES = (
    "training.pop_size=3",
    "training.max_steps=192",
    "training.evo_steps=2",
    "environment.data_batch_size_per_gpu=4",
    "environment.eval_prompts=8",
    "environment.test_prompts=10",
    "algorithm.group_size=4",
    "algorithm.batch_size=8",
)
SMALL = (*SIZES, *TOURNAMENT)
"""4 iterations of 48 completions, in 2 generations."""
TIMES = ("time/", "step_time", "tokens_per_second", "memory/")


@dataclass(frozen=True)
class FinishedRun:
    root: Path
    output: str
    errors: str


def agilerl(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own."""
    return programs.run("-m", "agilerl", *arguments, cwd=cwd, env=environment(), **options)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def run_here(out: Path, *overrides: str) -> Path:
    """Run in this process; returns the run directory."""
    for _ in train(build(load_manifest(None, [*SMALL, *overrides])), out, command=["test"]):
        pass
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def less_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if not key.startswith(TIMES)} for record in records]
