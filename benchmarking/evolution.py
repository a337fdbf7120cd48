"""Does evolution pay? Whole runs of `agilerl train` on the embedded model, at equal tokens, exams included.

    python -m benchmarking.evolution run OUT [--tasks gcd ...] [--strata right ...] [--arms ours ...] [--seeds 8]
                                             [--tokens 180000]
    python -m benchmarking.evolution table OUT

``run`` does what OUT lacks, one run after the other, each in a process of its own, and writes one small JSON file a
run: it can be stopped at any moment and started again, also several times beside each other. ``table`` prints the test
accuracy of the one adapter that a run hands over, paired by seed against one agent with all the tokens.

A stratum says what the user's configuration is like: the right learning rate, four times that (over the cliff), a tenth
of it, or the right one with three more genes. All arms get the same configuration and the same range around it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RIGHT = 1e-3
TASKS = {
    "gcd": "{min_value: 1, max_value: 60}",
    "chain_sum": "{min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}",
    "spell_backward": "{min_word_len: 5, max_word_len: 8}",
}
STRATA = {"right": 1.0, "high": 4.0, "low": 0.1, "four_genes": 1.0}
MORE_GENES = {"batch_size": (43, 384), "temperature": (0.5, 1.5), "max_grad_norm": (0.33, 3.0)}
"""Within a factor of 3 of the values that are right (128, 1 and 1), as far as their own ranges go."""
ALONE = ("formula", "formula_decay", "quarter")
ARMS: dict[str, tuple[str, ...]] = {
    "ours": ("training.pop_size=4",),
    "ours_no_pulses": ("training.pop_size=4", "selection_strategy={name: knockout, pulses: {factors: []}}"),
    "pulses": ("training.pop_size=1", "selection_strategy={name: pulses}"),
    "formula": ("training.pop_size=1", "selection_strategy={name: none}"),
    # It chooses the adapter to hand over as the default search does.
    "formula_decay": (
        *("training.pop_size=1", "selection_strategy={name: none, candidates: 3}"),
        "training.lr_schedule={name: linear, decay: 0.4}",
    ),
    # The price in seconds: one agent that has a quarter of the tokens, as each of four has.
    "quarter": ("training.pop_size=1", "selection_strategy={name: none}"),
    "random": ("training.pop_size=4", "selection_strategy={name: none}"),
    "selection_only": (
        "training.pop_size=4",
        "selection_strategy={name: tournament}",
        "mutation.probabilities={no_mut: 1.0, rl_hp_mut: 0.0}",
    ),
    "halving": ("training.pop_size=4", "selection_strategy={name: halving}"),
    "truncation": ("training.pop_size=4", "selection_strategy={name: truncation}"),
    "tournament": ("training.pop_size=4", "selection_strategy={name: tournament, tournament_size: 2, elitism: true}"),
}
EVERY = 4
"""Iterations between exams of the arms that do not go by the budget."""


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    task: str
    stratum: str
    arm: str
    seed: int
    tokens: int
    setting: str = ""
    """A setting that is changed in the configuration, as ``key=value``."""

    @property
    def name(self) -> str:
        """Name of its file."""
        changed = f"-{self.setting}" if self.setting else ""
        return f"{self.task}-{self.stratum}-{self.arm}{changed}-{self.tokens // 1000}k-{self.seed}.json"

    def settings(self) -> list[str]:
        """Return the manifest's settings, on top of the embedded default's base and adapter."""
        rate = RIGHT * STRATA[self.stratum]
        genes = {"lr": {"min": rate / 10, "max": 3 * rate}}
        if self.stratum == "four_genes":
            genes |= {name: {"min": low, "max": high} for name, (low, high) in MORE_GENES.items()}
        if self.arm.startswith(("ours", "pulses")):
            # The default's own founders; its genes may go further than where they start.
            genes = {name: {} for name in genes}
        own = json.dumps(genes if self.arm not in ALONE else {})
        budget = self.tokens // 4 if self.arm == "quarter" else self.tokens
        steps = [] if self.arm.startswith(("ours", "pulses")) else [f"training.evo_steps={EVERY}"]
        return [
            f"environment.task=reasoning_gym:{self.task}",
            f"environment.params={TASKS[self.task]}",
            f"algorithm.lr={rate}",
            f"mutation.rl_hp_selection={own}",
            f"training.seed={self.seed}",
            f"training.max_tokens={budget}",
            "training.max_steps=100000000",
            "training.log_completions=0",
            "environment.test_prompts=1000",
            *steps,
            *ARMS[self.arm],
            *([self.setting] if self.setting else []),
        ]


def one(run: Run) -> dict[str, Any]:
    """Carry out a run in this process, and return what it came to."""
    import torch

    from agilerl.config.manifest import load_manifest
    from agilerl.training.events import ExamDone, IterationDone, RunFinished
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    torch.set_num_threads(1)
    wall, cpu = perf_counter(), process_time()
    curve: list[tuple[float, float]] = []
    summary: Mapping[str, Any] = {}
    worst = float("nan")
    with tempfile.TemporaryDirectory() as folder:
        session = build(load_manifest(None, run.settings()))
        spent = 0.0
        for event in train(session, Path(folder) / "run"):
            if isinstance(event, IterationDone):
                spent = event.progress
            if isinstance(event, ExamDone):
                means = [fitness.value for fitness in event.fitness.values()]
                curve.append((spent, max(means)))
                worst = min(means)
            if isinstance(event, RunFinished):
                summary = event.summary
    elite = summary["test"]["elite"]
    return {
        **vars(run),
        "test": elite["mean"],
        "stderr": elite["stderr"],
        "exam": summary["elite"]["exam"],
        "base": summary["test"]["base"]["mean"],
        "hyperparameters": summary["elite"]["hyperparameters"],
        "spent": sum(summary["tokens"].values()),
        "generations": summary["generations"],
        "worst": worst,
        "curve": [[round(at, 4), round(best, 4)] for at, best in curve],  # share of the budget, best exam
        "seconds": round(perf_counter() - wall, 1),
        "cpu_seconds": round(process_time() - cpu, 1),
    }


def run_all(out: Path, runs: Sequence[Run]) -> None:
    """Carry out the runs that have no file yet; one that fails says so and does not stop the others."""
    out.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, start=1):
        target, lock = out / run.name, out / f"{run.name}.running"
        if target.exists():
            continue
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            continue  # another process is at it; after a crash, delete the files *.running
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarking.evolution", "one", json.dumps(vars(run))],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if done.returncode == 0:
                result = json.loads(done.stdout.splitlines()[-1])
                partial = target.with_suffix(".part")
                partial.write_text(json.dumps(result) + "\n")
                partial.replace(target)
                note = f"test {result['test']:.3f}, {result['seconds']:.0f} s"
            else:
                note = f"failed: {done.stderr.strip().splitlines()[-1:]}"
        finally:
            lock.unlink(missing_ok=True)
        print(f"{number}/{len(runs)} {run.name}: {note}", flush=True)


def results(out: Path) -> list[dict[str, Any]]:
    """Return the results in a folder."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values (all of them if there are fewer than four)."""
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the interquartile mean."""
    rng = np.random.default_rng(0)
    picks = rng.choice(np.asarray(values, dtype=float), (draws, len(values)))
    low, high = np.quantile([interquartile_mean(pick) for pick in picks], [0.025, 0.975])
    return float(low), float(high)


def table(found: Sequence[Mapping[str, Any]], against: str = "formula_decay") -> str:
    """Return, for each budget, task and stratum, every arm with its differences to one arm on the same seeds."""
    lines = []
    groups = sorted({(r["tokens"], r["task"], r["stratum"]) for r in found})
    for tokens, task, stratum in groups:
        group = [r for r in found if (r["tokens"], r["task"], r["stratum"]) == (tokens, task, stratum)]
        base = {r["seed"]: r["test"] for r in group if r["arm"] == against}
        lines += ["", f"{task}, prior {stratum}, {tokens // 1000}k tokens", ""]
        lines += [f"| arm | seeds | test | - {against}, points | 95 % | worst seed | CPU s |", "|---" * 7 + "|"]
        for arm in ARMS:
            own = {r["seed"]: r for r in group if r["arm"] == arm}
            if not own:
                continue
            tests = [r["test"] for r in own.values()]
            gaps = [100 * (r["test"] - base[seed]) for seed, r in own.items() if seed in base]
            seconds = np.mean([r["cpu_seconds"] for r in own.values()])
            gap = f"{interquartile_mean(gaps):+.1f}" if gaps else ""
            span = "{:+.1f} {:+.1f}".format(*interval(gaps)) if len(gaps) > 1 else ""
            lines.append(
                f"| {arm} | {len(own)} | {interquartile_mean(tests):.3f} | {gap} | {span} | {min(tests):.3f} "
                f"| {seconds:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table", "one"])
    parser.add_argument("out")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--strata", nargs="*", default=list(STRATA), choices=list(STRATA))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[180_000])
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(one(Run(**json.loads(given.out)))))
    elif given.what == "table":
        print(table(results(Path(given.out))))
    else:
        runs = [
            Run(task, stratum, arm, seed, tokens)
            for tokens in given.tokens
            for seed in range(1, given.seeds + 1)
            for stratum in given.strata
            for task in given.tasks
            for arm in given.arms
        ]
        run_all(Path(given.out), runs)


if __name__ == "__main__":
    main()
