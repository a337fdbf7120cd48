"""Which score should one expect on a real model? Tasks and games on SmolLM2-135M-Instruct, base against elite.

    python -m benchmarking.real --out benchmarking/results/real_smollm2.json [--model build/smollm2] [--seeds 42 1 2]
                                [--only NAME ...] [--runs FOLDER] [--set KEY.PATH=VALUE ...]

Each row is a run of ``agilerl train`` with tutorials/manifests/real/smollm2.yaml and the settings below, which were
chosen before the runs: 2,048 completions of four agents and 200 test questions; of the games, whose episodes cost ten
times as much, 1,024 episodes and 100 test games, with products in bfloat16. The file gets a row as soon as
its run has ended. What it has is not run again; a run that was interrupted goes on, with its clock at 0. ``constant``
is what the commonest expected answer would earn on the same test questions. The clock is the CPU time of the command,
in one thread.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from agilerl.config.manifest import load_manifest
from agilerl.envs.core import Task
from agilerl.training.tasks import task

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "tutorials" / "manifests" / "real" / "smollm2.yaml"
GAMES = MANIFEST.parent.relative_to(ROOT)
BUDGET = ("training.threads=1", "training.max_steps=2048", "environment.test_prompts=200")
GAME_BUDGET = ("training.threads=1", "training.max_steps=1024", "training.dtype=bfloat16")
WORDS = ("environment.answer_format=after", "environment.reward=score", "algorithm.max_output_tokens=8")


def _task(name: str, *settings: str) -> tuple[str, ...]:
    return (*BUDGET, f"environment.task=reasoning_gym:{name}", "environment.params={}", *settings)


def _game(name: str | Path, params: str, *settings: str) -> tuple[str, ...]:
    environment = (
        f"environment={{env_type: multiturn, env_id: '{name}', params: {params}, data_batch_size_per_gpu: 4, "
        "test_prompts: 100}"
    )
    return (*GAME_BUDGET, environment, *settings)


RUNS: dict[str, tuple[str, ...]] = {
    "aiw": BUDGET,
    "gcd": _task("gcd"),
    "letter_counting": _task("letter_counting"),
    "products": _task("products"),
    "syllogism": _task("syllogism", *WORDS),
    "isomorphic_strings": _task("isomorphic_strings", *WORDS),
    "guess the number": _game(GAMES / "games.py:Guess", "{max_number: 9}", "algorithm.max_output_tokens=4"),
    "sums with a calculator": _game(
        "tutorials/tools/calculator.py:calculated",
        "{min_terms: 2, max_terms: 3, min_digits: 2, max_digits: 3}",
        "algorithm.max_output_tokens=24",
    ),
}
"""Of each row, its settings beside those of the manifest."""


def arguments(name: str, seed: int, model: str) -> list[str]:
    """Return the arguments of ``agilerl`` that begin a run, but for its folder."""
    settings = RUNS[name]
    code = ["--allow-code"] if ".py:" in str(settings) else []
    base = f"network.pretrained_model_name_or_path={model}"
    return ["train", str(MANIFEST.relative_to(ROOT)), base, *settings, "--seed", str(seed), *code]


def constant(given: list[str]) -> float | None:
    """Return what the commonest expected answer would earn on the test questions; None for games."""
    config = load_manifest(MANIFEST, [value for value in given if "=" in value])
    if config.environment.env_type == "multiturn":
        return None
    made = task(config)
    assert isinstance(made, Task)
    answers = Counter(str(made.row("test", i)["answer"]) for i in range(config.environment.test_prompts))
    return max(answers.values()) / answers.total()


def run(name: str, seed: int, model: str, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the row of a run, which begins, goes on, or has ended already."""
    given = [*arguments(name, seed, model), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "agilerl", *given, "--out", str(folder), "--resume", "auto", "--quiet"]
    _, status, used = os.wait4(subprocess.Popen(command, cwd=ROOT, env=environment).pid, 0)
    if status:
        raise SystemExit(f"{name} with seed {seed} ended with {os.waitstatus_to_exitcode(status)}")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "name": name,
        "seed": seed,
        "test": {who: summary["test"][who] for who in ("base", "elite")},
        "constant": constant([*given, f"training.seed={seed}"]),
        "hyperparameters": summary["elite"]["hyperparameters"],
        "tokens": summary["tokens"],
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "command": "agilerl " + shlex.join(given),
    }


def table(document: dict[str, Any]) -> str:
    """Return a line for each task: the mean of its seeds, with the standard error of the mean of all questions."""
    lines = ["| task | seeds | constant answer | base | elite | completions' tokens | CPU min |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in RUNS:
        rows = [row for row in document["rows"] if row["name"] == name]
        if not rows:
            continue
        known = [row["constant"] for row in rows if row["constant"] is not None]
        scores = []
        for who in ("base", "elite"):
            tests = [row["test"][who] for row in rows]
            error = sqrt(sum(test["stderr"] ** 2 for test in tests)) / len(tests)
            scores.append(f"{fmean(test['mean'] for test in tests):.3f} ± {error:.3f}")
        scores[1] += " (" + ", ".join(f"{row['test']['elite']['mean']:.2f}" for row in rows) + ")"
        tokens = fmean(row["tokens"]["generated"] for row in rows)
        minutes = fmean(row["cpu_seconds"] for row in rows) / 60
        told = f"{fmean(known):.3f}" if known else ""
        lines.append(f"| {name} | {len(rows)} | {told} | {' | '.join(scores)} | {tokens:,.0f} | {minutes:.0f} |")
    return "\n".join(lines) + "\n"


MARK = "<!-- real_smollm2 -->\n"


def main() -> None:
    """Make the rows that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="build/smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "real", help="where the runs lie")
    parser.add_argument("--set", nargs="+", default=[], help="further settings, for another file of results")
    given = parser.parse_args()
    document = (
        json.loads(given.out.read_text()) if given.out.exists() else {"model": Path(given.model).name, "rows": []}
    )
    for seed in given.seeds:
        for name in given.only:
            if any((row["name"], row["seed"]) == (name, seed) for row in document["rows"]):
                continue
            folder = given.runs / f"{name.replace(' ', '_')}-{seed}"
            document["rows"].append(run(name, seed, given.model, folder, given.set))
            given.out.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(document["rows"][-1]), flush=True)
    print(table(document))


if __name__ == "__main__":
    main()
