"""Which genes matter: one agent with all the tokens, and one setting changed at a time.

    python -m benchmarking.genes run OUT [--tasks gcd chain_sum] [--genes lr ...] [--seeds 2] [--tokens 180000]
    python -m benchmarking.genes table OUT

All runs of a task and a seed answer the same test questions after the same number of tokens (sampled, trained on and in
exams), so a value that makes iterations dearer has fewer of them. The configuration that is changed is the arm
``formula_decay`` of ``benchmarking.evidence``. ``run`` does what OUT lacks, like the benchmark of the search.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.evidence import MODELS, Run, results, run_all

VALUES: dict[str, tuple[str, ...]] = {
    "algorithm.lr": ("3e-4", "5e-4", "2e-3", "3e-3"),
    "algorithm.batch_size": ("32", "64", "256"),
    "algorithm.update_epochs": ("2", "4"),
    "algorithm.temperature": ("0.7", "1.3"),
    "algorithm.group_size": ("4", "16"),
    "algorithm.clip_coef": ("0.05", "0.5"),
    "algorithm.max_grad_norm": ("0.1", "5.0"),
    "algorithm.beta": ("0.01", "0.1"),
    "network.lora_config.r": ("4", "64"),
    "training.lr_schedule.decay": ("0.0", "1.0"),
}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return, for each setting, the difference of its test accuracy to the unchanged run's on the same seeds."""
    base = {(r["tokens"], r["task"], r["seed"]): r["test"] for r in found if not r["setting"]}
    tasks = sorted({r["task"] for r in found})
    lines = ["| setting | " + " | ".join(f"{task}, points (each seed)" for task in tasks) + " |"]
    lines += ["|---" * (len(tasks) + 1) + "|"]
    settings = [f"{gene}={value}" for gene, values in VALUES.items() for value in values]
    for setting in ["", *settings]:
        cells = []
        for task in tasks:
            own = sorted((r for r in found if (r["task"], r["setting"]) == (task, setting)), key=lambda r: r["seed"])
            gaps = [
                100 * (r["test"] - base[key])
                for r in own
                if (key := (r["tokens"], r["task"], r["seed"])) in base and setting
            ]
            if not setting:
                cells.append(f"{np.mean([r['test'] for r in own]):.3f}" if own else "")
            else:
                each = ", ".join(f"{gap:+.1f}" for gap in gaps)
                cells.append(f"{np.mean(gaps):+.1f} ({each})" if gaps else "")
        lines.append(f"| {setting.removeprefix('algorithm.') or 'unchanged, accuracy'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("out")
    parser.add_argument("--tasks", nargs="*", default=["gcd", "chain_sum"], choices=list(MODELS["embedded"].tasks))
    parser.add_argument("--genes", nargs="*", default=list(VALUES), choices=list(VALUES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=180_000)
    given = parser.parse_args()
    if given.what == "table":
        print(table(results(Path(given.out))))
        return
    settings = ["", *(f"{gene}={value}" for gene in given.genes for value in VALUES[gene])]
    runs = [
        Run(task, "right", "formula_decay", seed, given.tokens, setting)
        for seed in range(1, given.seeds + 1)
        for setting in settings
        for task in given.tasks
    ]
    run_all(Path(given.out), runs)


if __name__ == "__main__":
    main()
