"""Measure what a second process brings: the same run in one process and in two, turns interleaved.

    python benchmarking/processes.py [--rounds 5] [--results benchmarking/results/processes.json] [KEY.PATH=VALUE ...]

Each round trains the embedded default (four agents, a few iterations) once in one process and once in two that gloo
connects, one thread each, and compares wall times: of an iteration (a process's own rollout and update, as
metrics.jsonl has it; of two processes the slower one), of the run (with exams, selection, checkpoints and all that the
processes tell each other), and of the command (with the imports). The adapters of both runs are compared too: a ratio
between different runs would say nothing. Two processes need two cores that nobody else uses; the load of the machine is
written beside the numbers.
"""

import argparse
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    *("training.pop_size=4", "training.evo_steps=4", "training.max_steps=8192"),
    *("selection_strategy.name=tournament", "mutation.rl_hp_selection={lr: {}}"),
    *("environment.data_batch_size_per_gpu=32", "environment.eval_prompts=50", "environment.test_prompts=50"),
    *("algorithm.group_size=8", "algorithm.batch_size=64"),
)
"""8 iterations of 1,024 completions in 2 generations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="settings of the run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarking" / "results" / "processes.json")
    arguments = parser.parse_args()
    settings = [*SETTINGS, *arguments.overrides]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            load = os.getloadavg()[0]
            # Which comes first alternates, so that a machine that warms up or slows down favours neither.
            order = (1, 2) if number % 2 == 0 else (2, 1)
            measured = {size: run(Path(folder) / f"{number}_{size}", size, settings) for size in order}
            assert measured[1]["adapters"] == measured[2]["adapters"], "the two runs are not the same"
            rounds.append({"load": load, "one": measured[1], "two": measured[2]})
            print(row(number, rounds[-1]), flush=True)
    result = report(rounds, settings)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"], indent=1))
    print(f"written to {arguments.results}")


def run(out: Path, size: int, settings: Sequence[str]) -> dict[str, Any]:
    """Train in ``size`` processes; returns seconds of an iteration, of the whole command, and what was learned."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "agilerl", "train", *settings, "--out", str(out), "--quiet"]
    start = perf_counter()
    children = []
    for rank in range(size):
        place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {name: str(value) for name, value in place.items() if size > 1}
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit(f"training in {size} processes ended with {codes}")
    seconds = perf_counter() - start
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, float] = {}
    for line in lines:
        if line["kind"] == "train":
            steps[line["step"]] = max(steps.get(line["step"], 0.0), line["step_time"])
    summary = json.loads((out / "summary.json").read_text())
    adapter = (out / "elite" / "adapter_model.safetensors").read_bytes()
    return {
        "iteration_seconds": round(median(list(steps.values())[1:]), 4),  # the first one warms up
        "run_seconds": round(summary["seconds"], 2),
        "command_seconds": round(seconds, 2),
        "adapters": hashlib.sha256(adapter).hexdigest(),
    }


def row(number: int, found: dict[str, Any]) -> str:
    one, two = found["one"], found["two"]
    parts = [
        f"{name} {one[key]:.2f} / {two[key]:.2f} s ({one[key] / two[key]:.2f}x)"
        for name, key in (("iteration", "iteration_seconds"), ("run", "run_seconds"), ("command", "command_seconds"))
    ]
    return f"round {number + 1}, load {found['load']:.1f}: " + "; ".join(parts)


def report(rounds: Sequence[dict[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    ratios = {
        name: [found["one"][key] / found["two"][key] for found in rounds]
        for name, key in (("iteration", "iteration_seconds"), ("run", "run_seconds"), ("command", "command_seconds"))
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "what": "wall time in one process divided by that in two, same settings, same adapters to the bit",
        "ratio": {
            name: {"median": round(median(r), 3), "lowest": round(min(r), 3), "highest": round(max(r), 3)}
            for name, r in ratios.items()
        },
        "rounds": list(rounds),
        "settings": list(settings),
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "commit": commit.stdout.strip(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()
