"""Does evolution pay? Whole runs of `agilerl train` on the embedded model, at equal tokens, exams included.

    python -m benchmarking.evolution run OUT [--tasks gcd ...] [--strata right ...] [--arms ours ...] [--seeds 8]
                                             [--tokens 180000]
    python -m benchmarking.evolution table OUT [--against formula_decay]
    python -m benchmarking.evolution plot OUT --to docs/evolution
    python -m benchmarking.evolution pack OUT --to benchmarking/results/evolution.json

``run`` does what OUT lacks, one run after the other, each in a process of its own, and writes one small JSON file a
run: it can be stopped at any moment and started again, also several times beside each other. ``table`` prints the test
accuracy of the one adapter that a run hands over, paired by seed against one agent with all the tokens; ``plot`` draws
it, and the best exam against the tokens spent; ``pack`` puts all results into one file, which table and plot read too.

A stratum says what the user's configuration is like: the right learning rate, four times that (over the cliff), a tenth
of it, or the right one with three more genes. All arms get the same configuration and the same range around it.
"""

import argparse
import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
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
FAR = {"gcd": 0.75, "chain_sum": 0.75, "spell_backward": 0.5}
"""Exam accuracy that tokens are counted to."""
STRATA = {"right": 1.0, "high": 4.0, "low": 0.1, "four_genes": 1.0}
MORE_GENES = {"batch_size": (43, 384), "temperature": (0.5, 1.5), "max_grad_norm": (0.33, 3.0)}
"""Within a factor of 3 of the values that are right (128, 1 and 1), as far as their own ranges go."""
ALONE = ("formula", "formula_decay", "quarter", "tpe", "replayed")
DECAY = "training.lr_schedule={name: linear, decay: 0.4}"
ARMS: dict[str, tuple[str, ...]] = {
    "ours": ("training.pop_size=4",),
    "ours_no_pulses": ("training.pop_size=4", "selection_strategy={name: knockout, pulses: {factors: []}}"),
    "pulses": ("training.pop_size=1", "selection_strategy={name: pulses}"),
    "formula": ("training.pop_size=1", "selection_strategy={name: none}"),
    # It chooses the adapter to hand over as the default search does.
    "formula_decay": (
        *("training.pop_size=1", "selection_strategy={name: none, candidates: 3}"),
        DECAY,
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
    # AgileRL's recipe: all start alike, genes move by its factors, exams of 8 questions (there, each agent has others).
    "recipe": (
        *("training.pop_size=4", "training.init=same", "environment.eval_prompts=8"),
        "selection_strategy={name: tournament, tournament_size: 2, elitism: true}",
        "mutation.probabilities={no_mut: 0.1, rl_hp_mut: 0.6}",
    ),
    # The rule of population-based training: the last quarter copies the first, whatever the evidence, and moves.
    "pbt": ("training.pop_size=4", "selection_strategy={name: truncation, fraction: 0.25, confidence: 0.5}"),
    # Half of the tokens are for Optuna's trials, short runs of one agent; the best configuration gets the other half.
    "tpe": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}", DECAY),
    # The schedule that ``ours`` found with another seed, whose tokens are not counted.
    "replayed": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}"),
}
TRIALS = 8
"""Of ``tpe``: each has a sixteenth of the tokens. The first one is the configuration."""
FACTORS = ("recipe", "pbt")
"""Arms whose genes move by x0.8 and x1.2."""
# Operators, one each, against the tournament without it. It selects after every iteration: at 180k tokens there would
# be three selections otherwise, too few to tell. Of noise and rank, half of the mutations are that.
OFTEN = (*ARMS["tournament"], "training.evo_steps=1")
ARMS |= {
    "often": OFTEN,
    "often_noise": (*OFTEN, "mutation.probabilities={rl_hp_mut: 0.5, params_mut: 0.5}"),
    "often_rank": (*OFTEN, "mutation.probabilities={rl_hp_mut: 0.5, arch_mut: 0.5}", "mutation.rank_range=[4, 32]"),
    "often_crossover": (*OFTEN, "mutation.crossover=0.5"),
    "often_shared": (*OFTEN, "sharing.experience=8"),
    "often_shared_all": (*OFTEN, "sharing={experience: 4, experience_for: all}"),
    "often_distilled": (*OFTEN, "sharing.distillation=0.3"),
    # Up to its end the run of ``ours``; a soup that is more probably better than not is handed over.
    "ours_soup": ("training.pop_size=4", "selection_strategy={name: knockout, soup: 0.5}"),
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

    def genes(self) -> dict[str, dict[str, float]]:
        """Return the range of each hyperparameter that may change."""
        rate = RIGHT * STRATA[self.stratum]
        more = MORE_GENES if self.stratum == "four_genes" else {}
        return {name: {"min": low, "max": high} for name, (low, high) in {"lr": (rate / 10, 3 * rate), **more}.items()}

    def settings(self) -> list[str]:
        """Return the manifest's settings, on top of the embedded default's base and adapter."""
        genes: Mapping[str, Mapping[str, float]] = {} if self.arm in ALONE else self.genes()
        if self.arm.startswith(("ours", "pulses")):
            # The default's own founders; its genes may go further than where they start.
            genes = {name: {} for name in genes}
        if self.arm in FACTORS:
            genes = {name: {**span, "shrink_factor": 0.8, "grow_factor": 1.2} for name, span in genes.items()}
        budget = self.tokens // 4 if self.arm == "quarter" else self.tokens
        steps = [] if self.arm.startswith(("ours", "pulses")) else [f"training.evo_steps={EVERY}"]
        return [
            f"environment.task=reasoning_gym:{self.task}",
            f"environment.params={TASKS[self.task]}",
            f"algorithm.lr={RIGHT * STRATA[self.stratum]}",
            f"mutation.rl_hp_selection={json.dumps(genes)}",
            f"training.seed={self.seed}",
            f"training.max_tokens={budget}",
            "training.max_steps=100000000",
            "training.log_completions=0",
            *steps,
            *ARMS[self.arm],
            *([self.setting] if self.setting else []),
        ]


def one(run: Run) -> dict[str, Any]:
    """Carry out a run in this process, and return what it came to."""
    import torch

    torch.set_num_threads(1)
    wall, cpu = perf_counter(), process_time()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if run.arm == "tpe":
            found, spent = best_of_trials(run, home)
            outcome = carried_out([*run.settings(), *found, f"training.max_tokens={run.tokens // 2}"], home / "run")
            outcome["spent"] += spent
            outcome["hyperparameters"] = dict(setting.split(".")[1].split("=") for setting in found)
            outcome["curve"] = [[0.5 + at / 2, best] for at, best in outcome["curve"]]
        elif run.arm == "replayed":
            carried_out(replace(run, arm="ours", seed=run.seed + 1000).settings(), home / "first")
            outcome = carried_out(run.settings(), home / "run", replay=schedule_of(home / "first"))
        else:
            outcome = carried_out(run.settings(), home / "run")
        shipped = outcome.pop("shipped")
        drift = {task: off_task(shipped, task) for task in TASKS if task != run.task}
    return {
        **vars(run),
        **outcome,
        "elsewhere": drift,
        "seconds": round(perf_counter() - wall, 1),
        "cpu_seconds": round(process_time() - cpu, 1),
    }


def carried_out(settings: Sequence[str], out: Path, replay: Path | None = None) -> dict[str, Any]:
    """Train with these settings; returns what the run came to, and under ``shipped`` the agent that it hands over."""
    from agilerl import GRPO
    from agilerl.config.manifest import load_manifest
    from agilerl.training.events import ExamDone, IterationDone, RunFinished
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    curve: list[list[float]] = []  # share of the budget, best exam
    summary: Mapping[str, Any] = {}
    spent, worst = 0.0, float("nan")
    session = build(load_manifest(None, settings, replay))
    for event in train(session, out):
        if isinstance(event, IterationDone):
            spent = event.progress
        if isinstance(event, ExamDone):
            means = [fitness.value for fitness in event.fitness.values()]
            curve.append([round(spent, 4), round(max(means), 4)])
            worst = min(means)
        if isinstance(event, RunFinished):
            summary = event.summary
    elite = summary["test"]["elite"]
    return {
        "shipped": GRPO.load(out / "elite", runtime=session.population.runtime),
        "commit": _commit(),
        "test": elite["mean"],
        "stderr": elite["stderr"],
        "exam": summary["elite"]["exam"],
        "base": summary["test"]["base"]["mean"],
        "hyperparameters": summary["elite"]["hyperparameters"],
        "soup": summary["elite"].get("soup"),
        "spent": sum(summary["tokens"].values()),
        "generations": summary["generations"],
        "worst": worst,
        "curve": curve,
    }


def best_of_trials(run: Run, home: Path) -> tuple[list[str], int]:
    """Let Optuna's TPE choose configurations for short runs; returns the best one's settings and the tokens spent."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spent = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal spent
        values = [f"algorithm.{name}={chosen(trial, name, span)}" for name, span in run.genes().items()]
        trial.set_user_attr("settings", values)
        short = f"training.max_tokens={run.tokens // 2 // TRIALS}"
        alone = "selection_strategy={name: none}"
        outcome = carried_out([*run.settings(), alone, *values, short], home / f"trial_{trial.number}")
        spent += outcome["spent"]
        return float(outcome["curve"][-1][1])

    def chosen(trial: optuna.Trial, name: str, span: Mapping[str, float]) -> float:
        if name == "batch_size":
            return 8 * trial.suggest_int(name, round(span["min"] / 8), round(span["max"] / 8), log=True)
        return trial.suggest_float(name, span["min"], span["max"], log=True)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=run.seed))
    first = {"lr": RIGHT * STRATA[run.stratum], "batch_size": 16, "temperature": 1.0, "max_grad_norm": 1.0}
    study.enqueue_trial({name: first[name] for name in run.genes()})
    study.optimize(objective, n_trials=TRIALS)
    return study.best_trial.user_attrs["settings"], spent


def schedule_of(run: Path) -> Path:
    """Export the schedule of a finished run as ``agilerl schedule`` does; returns the file."""
    from agilerl.cli.commands import run_schedule

    out = run.with_suffix(".yaml")
    with contextlib.redirect_stdout(io.StringIO()):
        run_schedule(run, out=out, extrapolate=None, as_json=False)
    return out


def off_task(agent: Any, task: str) -> float:
    """Return the accuracy of an agent on 200 questions of a task that it was not trained on."""
    from agilerl import Population, ReasoningGymTask
    from agilerl.config.manifest import parse_yaml

    other = ReasoningGymTask(task, parse_yaml(TASKS[task], "TASKS"), exam_prompts=200, test_prompts=1)
    return round(Population([agent], other, eval_max_new_tokens=10).evaluate()[agent.index].mean, 4)


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
    """Return the results in a folder, or in a file that ``pack`` wrote."""
    if out.is_file():
        return list(json.loads(out.read_text())["runs"])
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def _commit() -> str:
    """Return the commit of this checkout, short."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip()


def pack(out: Path, to: Path) -> None:
    """Write all results into one file, a line each."""
    lines = ",\n".join(json.dumps(result) for result in results(out))
    to.write_text(f'{{"commit": "{_commit()}", "date": "{date.today()}", "runs": [\n{lines}\n]}}\n')


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


def reached(result: Mapping[str, Any]) -> float:
    """Return the tokens after which an exam reached ``FAR``; infinite if none did."""
    return next((at * result["tokens"] for at, best in result["curve"] if best >= FAR[result["task"]]), math.inf)


def table(found: Sequence[Mapping[str, Any]], against: str = "formula_decay") -> str:
    """Return, for each budget, task and stratum, every arm with its differences to one arm on the same seeds."""
    lines = []
    groups = sorted({(r["tokens"], r["task"], r["stratum"]) for r in found})
    for tokens, task, stratum in groups:
        group = [r for r in found if (r["tokens"], r["task"], r["stratum"]) == (tokens, task, stratum)]
        base = {r["seed"]: r["test"] for r in group if r["arm"] == against}
        lines += ["", f"{task}, prior {stratum}, {tokens // 1000}k tokens", ""]
        lines += [
            f"| arm | seeds | test | - {against}, points | 95 % | worst seed | tokens to {FAR[task]:.0%} | elsewhere "
            "| CPU s |"
        ]
        lines += ["|---" * 9 + "|"]
        for arm in ARMS:
            own = {r["seed"]: r for r in group if r["arm"] == arm}
            if not own:
                continue
            tests = [r["test"] for r in own.values()]
            gaps = [100 * (r["test"] - base[seed]) for seed, r in own.items() if seed in base]
            seconds = np.median([r["cpu_seconds"] for r in own.values()])
            gap = f"{interquartile_mean(gaps):+.1f}" if gaps else ""
            span = "{:+.1f} {:+.1f}".format(*interval(gaps)) if len(gaps) > 1 else ""
            middle = float(np.median([reached(r) for r in own.values()]))
            far = "never" if math.isinf(middle) else f"{middle / 1000:.0f}k"
            others = np.mean([list(r["elsewhere"].values()) for r in own.values()])
            lines.append(
                f"| {arm} | {len(own)} | {interquartile_mean(tests):.3f} | {gap} | {span} | {min(tests):.3f} "
                f"| {far} | {others:.3f} | {seconds:.0f} |"
            )
    return "\n".join(lines)


def plot(found: Sequence[Mapping[str, Any]], to: Path) -> list[Path]:
    """Draw, for each budget, the curves of all seeds and the tests of all seeds; returns the files."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agilerl", "font.size": 9})
    written = []
    for tokens in sorted({r["tokens"] for r in found}):
        runs = [r for r in found if r["tokens"] == tokens]
        tasks, strata = (
            [x for x in every if x in {r[key] for r in runs}] for key, every in (("task", TASKS), ("stratum", STRATA))
        )
        arms = [arm for arm in ARMS if arm in {r["arm"] for r in runs}]
        colours = dict(zip(arms, plt.get_cmap("tab20").colors))
        shape = {"nrows": len(tasks), "ncols": len(strata), "squeeze": False, "layout": "constrained", "sharey": "row"}
        size = {"figsize": (3.2 * len(strata), 2.6 * len(tasks))}
        curves, curve_axes = plt.subplots(**shape, **size, sharex=True)
        seeds, seed_axes = plt.subplots(**shape, **size, sharex=True)
        for row, task in enumerate(tasks):
            for column, stratum in enumerate(strata):
                for place, arm in enumerate(arms):
                    own = [r for r in runs if (r["task"], r["stratum"], r["arm"]) == (task, stratum, arm)]
                    if not own:
                        continue
                    grid = np.linspace(0, 1, 41)
                    each = np.array([_anytime(r, grid) for r in own])
                    axes = curve_axes[row][column]
                    axes.plot(grid * tokens / 1000, each.T, color=colours[arm], linewidth=0.4, alpha=0.5)
                    axes.plot(grid * tokens / 1000, each.mean(axis=0), color=colours[arm], linewidth=1.6, label=arm)
                    axes = seed_axes[row][column]
                    tests = [r["test"] for r in own]
                    axes.plot([place] * len(tests), tests, "o", color=colours[arm], markersize=3.5, alpha=0.6)
                    axes.plot([place - 0.25, place + 0.25], [interquartile_mean(tests)] * 2, color=colours[arm])
                for axes in (curve_axes[row][column], seed_axes[row][column]):
                    axes.set_title(f"{task}, prior {stratum}", fontsize=9)
                    axes.grid(True, linewidth=0.3)
                seed_axes[row][column].set_xticks(range(len(arms)), arms, rotation=60, ha="right")
        curves.supxlabel("tokens, thousands")
        curves.supylabel("best exam so far")
        seeds.supylabel("test accuracy of the adapter that is handed over")
        entries = {}
        for axes in curve_axes.flat:
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles))
        curves.legend(
            [entries[arm] for arm in arms], arms, loc="outside upper center", ncols=min(len(arms), 6), frameon=False
        )
        for figure, name in ((curves, "curves"), (seeds, "seeds")):
            path = to.with_name(f"{to.name}_{name}_{tokens // 1000}k.svg")
            figure.savefig(path, metadata={"Date": None})
            plt.close(figure)
            written.append(path)
    return written


def _anytime(result: Mapping[str, Any], grid: np.ndarray) -> np.ndarray:
    """Return the best exam so far at shares of the budget; before the first exam the base's test."""
    at, best = np.array([[0.0, result["base"]], *result["curve"]]).T
    return np.maximum.accumulate(best)[np.searchsorted(at, grid, side="right") - 1]


def main() -> None:
    """Run the benchmark, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table", "plot", "pack", "one"])
    parser.add_argument("out")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--strata", nargs="*", default=list(STRATA), choices=list(STRATA))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[180_000])
    parser.add_argument("--against", default="formula_decay", choices=list(ARMS), help="table: the arm to compare with")
    parser.add_argument("--to", type=Path, help="plot: beginning of the files' names; pack: the file")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(one(Run(**json.loads(given.out)))))
    elif given.what == "pack":
        if given.to is None:
            parser.error("pack needs --to")
        pack(Path(given.out), given.to)
    elif given.what in ("table", "plot"):
        wanted = {"task": given.tasks, "stratum": given.strata, "arm": given.arms}
        found = [r for r in results(Path(given.out)) if all(r[key] in names for key, names in wanted.items())]
        if given.what == "plot" and given.to is None:
            parser.error("plot needs --to")
        print(table(found, given.against) if given.what == "table" else "\n".join(map(str, plot(found, given.to))))
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
