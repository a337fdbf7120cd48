"""Does evolution pay, and does any run collapse? Whole runs of `agilerl train` at equal tokens, exams included.

    python -m benchmarking.evidence run OUT [--model embedded] [--tasks gcd ...] [--strata right ...] [--arms ours ...]
                                            [--seeds 8] [--tokens 180000] [--setting KEY=VALUE]
    python -m benchmarking.evidence table OUT [--against formula_decay]
    python -m benchmarking.evidence seeds OUT
    python -m benchmarking.evidence plot OUT --to docs/evidence
    python -m benchmarking.evidence pack OUT --to benchmarking/results/evolution.json

``run`` does what OUT lacks, one run after the other, each in a process of its own, and writes one small JSON file a
run: it can be stopped at any moment and started again, also several times beside each other. It goes seed by seed, so
that what is there when it stops are whole seeds. ``table`` prints the test accuracy of the one adapter that a run hands
over, paired by seed against one agent with all the tokens; ``seeds`` prints the test of each seed; ``plot`` draws the
tests against the error of the rate; ``pack`` puts all results into one file, which the others read too.

A stratum says what the user's configuration is like. On the embedded model: the right learning rate, four times that
(over the cliff), a tenth of it, or the right one with three more genes. On SmolLM2: the formula's rate, or 3, 10 or 30
times as much, or as little. All arms get the same configuration and the same range around it.
"""

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import math
import os
import platform
import signal
import string
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarking.measuring import ROOT, commit


@dataclass(frozen=True)
class Model:
    """A base with its tasks, its configurations, and what ``run`` does if nothing else is asked for."""

    manifest: Path | None
    """None: the embedded default."""
    rate: float
    """The learning rate that the formula gives, or that was measured."""
    tasks: Mapping[str, tuple[str, ...]]
    """Settings of each."""
    far: Mapping[str, float]
    """Exam accuracy that tokens are counted to."""
    strata: Mapping[str, float]
    """What each multiplies the rate by, in the order of the runs."""
    arms: tuple[str, ...]
    tokens: int
    first_seed: int
    every: int
    """Iterations between exams of the arms that do not go by the budget: about as many exams as the others have."""
    answer: int
    """Most tokens of an answer."""

    @property
    def asked(self) -> list[str]:
        """Tasks of one question each, whose accuracy tells what else an adapter changes."""
        return [task for task, settings in self.tasks.items() if any("reasoning_gym:" in value for value in settings)]

    @property
    def axis(self) -> list[str]:
        """Strata that differ only by the error of the rate, from too low to too high; none if there are others."""
        strata = sorted(self.strata, key=lambda name: self.strata[name])
        return strata if all(name.startswith("x") for name in strata) else []


def _questions(task: str, params: str) -> tuple[str, ...]:
    return (f"environment.task=reasoning_gym:{task}", f"environment.params={params}")


MORE_GENES = {"batch_size": (43, 384), "temperature": (0.5, 1.5), "max_grad_norm": (0.33, 3.0)}
"""Within a factor of 3 of the values that are right (128, 1 and 1), as far as their own ranges go."""
ALONE = ("formula", "formula_decay", "quarter", "tpe", "cmaes", "short", "asha", "replayed")
DECAY = "training.lr_schedule={name: linear, decay: 0.4}"
ARMS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours_4": ("training.pop_size=4",),
    "ours_no_pulses": ("selection_strategy={name: knockout, pulses: {factors: []}}",),
    "ours_1": ("training.pop_size=1",),
    "ours_2": ("training.pop_size=2",),
    "ours_8": ("training.pop_size=8",),
    # As if nobody knew the usual rate of the base, which the configured one is a multiple of.
    "ours_blind": ("training.usual_founder=false",),
    # Controls: the same forks, none of which ever wins; and mutations of agents that are drawn at random.
    "nothing": (
        "selection_strategy={name: knockout, confidence: 1.0, pulses: {challenge: 1.0, guard: 1.0}, "
        "collapse_guard: false}",
    ),
    "variance": (
        "training.pop_size=4",
        "selection_strategy={name: tournament, tournament_size: 1, elitism: false, candidates: 3, "
        "collapse_guard: false}",
    ),
    "formula": ("training.pop_size=1", "selection_strategy={name: none}"),
    # The adapter that it hands over is chosen as in the default search.
    "formula_decay": (*("training.pop_size=1", "selection_strategy={name: none, candidates: 3}"), DECAY),
    # The price in seconds: one agent that has a quarter of the tokens, as each of four has.
    "quarter": ("training.pop_size=1", "selection_strategy={name: none}"),
    "random": ("training.pop_size=4", "selection_strategy={name: none}"),
    "selection_only": (
        "training.pop_size=4",
        "selection_strategy={name: tournament}",
        "mutation.probabilities={no_mut: 1.0, rl_hp_mut: 0.0}",
    ),
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
    "mf_pbt": ("training.pop_size=4", "selection_strategy={name: multi_frequency}"),
    # Half of the tokens are for Optuna's trials, short runs of one agent; the best configuration gets the other half.
    "tpe": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}", DECAY),
    # The same with CMA-ES; with random draws, of which the best continues.
    "cmaes": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}", DECAY),
    "short": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}", DECAY),
    # Random draws that asynchronous successive halving stops after each of their exams; the best continues.
    "asha": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}", DECAY),
    # The schedule that ``ours`` found with another seed, or that of --schedule; the tokens to find it are not counted.
    "replayed": ("training.pop_size=1", "selection_strategy={name: none, candidates: 3}"),
}
TRIALS = 8
"""Trials in half of the tokens; of ``asha``, four that are not stopped. The first one is the configuration."""
DEFAULT = ("ours", "nothing")
"""How the names of arms begin that have the default's own founders and generations."""
FACTORS = ("recipe", "pbt", "mf_pbt")
"""Arms whose genes move by x0.8 and x1.2."""
# Operators, one each, against the tournament without it. It selects after every iteration: at 180k tokens there would
# be three selections otherwise, too few to tell. Of rank, half of the mutations are that.
OFTEN = (*ARMS["tournament"], "training.evo_steps=1")
ARMS |= {
    "often": OFTEN,
    "often_rank": (*OFTEN, "mutation.probabilities={rl_hp_mut: 0.5, arch_mut: 0.5}", "mutation.rank_range=[4, 32]"),
    # Up to its end the run of ``ours``; a soup that is more probably better than not is handed over.
    "ours_soup": ("selection_strategy={name: knockout, soup: 0.5}",),
}
PAST = ("halving", "often_noise", "often_crossover", "often_shared", "often_shared_all", "often_distilled")
"""Arms of what has gone: tables show their results, and nothing runs them."""
NAMES = (*ARMS, *PAST)
SEARCHES = ("tpe", "cmaes", "short", "asha")
"""Arms that spend half of the tokens on Optuna's trials."""
CONTINUED = ("short", "asha")
"""Arms that continue with the adapter of the best trial."""
SMOLLM2 = ROOT / "tutorials" / "manifests" / "real" / "smollm2.yaml"
CALCULATOR = ROOT / "tutorials" / "tools" / "calculator.py"
MODELS = {
    "embedded": Model(
        manifest=None,
        rate=1e-3,
        tasks={
            "gcd": _questions("gcd", "{min_value: 1, max_value: 60}"),
            "chain_sum": _questions("chain_sum", "{min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}"),
            "spell_backward": _questions("spell_backward", "{min_word_len: 5, max_word_len: 8}"),
        },
        far={"gcd": 0.75, "chain_sum": 0.75, "spell_backward": 0.5},
        strata={"right": 1.0, "high": 4.0, "low": 0.1, "four_genes": 1.0},
        arms=tuple(ARMS),
        tokens=180_000,
        first_seed=1,
        every=4,
        answer=10,
    ),
    "smollm2": Model(
        manifest=SMOLLM2,
        rate=5e-4,
        tasks={
            "aiw": _questions("aiw", "{task_type_weights: [0.5, 0.5, 0.0]}"),
            "gcd": _questions("gcd", "{}"),
            "letter_counting": _questions("letter_counting", "{}"),
            # A game of two turns: the question, a call of the calculator, its result, the answer.
            "calculator": (
                f"environment={{env_type: multiturn, env_id: '{CALCULATOR}:calculated', params: "
                "{min_terms: 2, max_terms: 3, min_digits: 2, max_digits: 3}, data_batch_size_per_gpu: 4}",
                "algorithm.max_output_tokens=24",
                "training.dtype=bfloat16",
            ),
        },
        far={"aiw": 0.5, "gcd": 0.3, "letter_counting": 0.35, "calculator": 0.9},
        strata={"x1": 1.0, "x10": 10.0, "x1/10": 1 / 10, "x3": 3.0, "x1/3": 1 / 3, "x30": 30.0, "x1/30": 1 / 30},
        arms=("formula_decay", "ours_1", "ours", "asha"),
        tokens=150_000,
        first_seed=105,  # settings are chosen with seeds below
        every=2,
        answer=6,
    ),
}
HIGHEST = 1e-2
"""End of the learning rate's range: a user who begins above it has to give another range."""


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
    model: str = "embedded"
    device: str = "cpu"
    schedule: str = ""
    """The file that ``replayed`` trains with, found elsewhere; none: the arm finds one itself."""

    @property
    def name(self) -> str:
        """Name of its file."""
        parts = [] if self.model == "embedded" else [self.model]
        parts += [self.task, self.stratum, self.arm, *([self.setting] if self.setting else [])]
        parts += [] if self.device == "cpu" else [self.device]
        parts += [Path(self.schedule).stem] if self.schedule else []
        return f"{'-'.join(parts)}-{self.tokens // 1000}k-{self.seed}.json".replace("/", "_")

    @property
    def rate(self) -> float:
        """The learning rate that is configured."""
        return MODELS[self.model].rate * MODELS[self.model].strata[self.stratum]

    def genes(self) -> dict[str, dict[str, float]]:
        """Return the range of each hyperparameter that may change."""
        more = MORE_GENES if self.stratum == "four_genes" else {}
        spans = {"lr": (self.rate / 10, 3 * self.rate), **more}
        return {name: {"min": low, "max": high} for name, (low, high) in spans.items()}

    def settings(self) -> list[str]:
        """Return the manifest's settings, on top of the embedded default's base and adapter."""
        model = MODELS[self.model]
        genes: Mapping[str, Mapping[str, float]] = {} if self.arm in ALONE else self.genes()
        if self.arm.startswith(DEFAULT):
            # The default's founders; its genes may go further than where they start.
            genes = {name: {"max": 3 * self.rate} if name == "lr" and self.rate > HIGHEST else {} for name in genes}
        if self.arm in FACTORS:
            genes = {name: {**span, "shrink_factor": 0.8, "grow_factor": 1.2} for name, span in genes.items()}
        budget = self.tokens // 4 if self.arm == "quarter" else self.tokens
        return [
            *model.tasks[self.task],
            f"algorithm.lr={self.rate}",
            f"mutation.rl_hp_selection={json.dumps(genes)}",
            f"training.seed={self.seed}",
            f"training.max_tokens={budget}",
            "training.max_steps=100000000",
            "training.threads=1",
            f"training.device={self.device}",
            "training.log_completions=0",
            *([] if self.arm.startswith(DEFAULT) else [f"training.evo_steps={model.every}"]),
            *ARMS[self.arm],
            *([self.setting] if self.setting else []),
        ]

    def config(self, *more: str, replay: Path | None = None) -> Any:
        """Return the configuration, with ``more`` settings."""
        from agilerl.config.manifest import load_manifest

        return load_manifest(MODELS[self.model].manifest, [*self.settings(), *more], replay)


def one(run: Run) -> dict[str, Any]:
    """Carry out a run in this process, and return what it came to."""
    import torch

    torch.set_num_threads(1)
    wall, cpu = perf_counter(), process_time()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if run.arm in SEARCHES:
            outcome = searched(run, home)
        elif run.arm == "replayed":
            if not run.schedule:
                carried_out(replace(run, arm="ours", seed=run.seed + 1000).config(), home / "first")
            schedule = Path(run.schedule) if run.schedule else schedule_of(home / "first")
            outcome = carried_out(run.config(replay=schedule), home / "run")
        else:
            outcome = carried_out(run.config(), home / "run")
        shipped = outcome.pop("shipped")
        drift = {task: off_task(shipped, run, task) for task in MODELS[run.model].asked if task != run.task}
    return {
        **vars(run),
        "rate": run.rate,
        **outcome,
        "elsewhere": drift,
        "seconds": round(perf_counter() - wall, 1),
        "cpu_seconds": round(process_time() - cpu, 1),
        "commit": commit()[:9],
        "date": str(date.today()),
        "machine": machine(run.device),
    }


def machine(device: str = "cpu") -> dict[str, str]:
    """Return what decides how results round."""
    import torch

    facts = {"platform": platform.platform(), "processor": _processor(), "torch": torch.__version__}
    return facts if device == "cpu" else facts | {"gpu": torch.cuda.get_device_name(device)}


def _processor() -> str:
    """Return the name of the processor, as far as the system has one."""
    facts = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def carried_out(config: Any, out: Path, stops: Callable[[int, float], bool] | None = None) -> dict[str, Any]:
    """Train; returns what the run came to, and under ``shipped`` the agent that it hands over.

    ``stops`` is asked after each exam but the last, with the iterations and the accuracy so far, whether to end the run
    there. Of such a run only ``spent`` and ``curve`` are returned.
    """
    from agilerl import GRPO
    from agilerl.training.events import ExamDone, IterationDone, RunFinished
    from agilerl.training.run import train
    from agilerl.training.setup import build

    curve: list[list[float]] = []  # share of the budget, best exam
    summary: Mapping[str, Any] = {}
    spent, worst = 0.0, float("nan")
    session = build(config, allow_code=True)  # of the games
    for event in (events := train(session, out)):
        if isinstance(event, IterationDone):
            spent = event.progress
        if isinstance(event, ExamDone):
            means = [fitness.value for fitness in event.fitness.values()]
            curve.append([round(spent, 4), round(max(means), 4)])
            worst = min(means)
            if stops is not None and spent < 1 and stops(event.iteration, max(means)):
                events.close()
                return {"spent": sum(sum(tokens.values()) for tokens in event.tokens.values()), "curve": curve}
        if isinstance(event, RunFinished):
            summary = event.summary
    elite = summary["test"]["elite"]
    return {
        "shipped": GRPO.load(out / "elite", runtime=session.population.runtime),
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


def searched(run: Run, home: Path) -> dict[str, Any]:
    """Let Optuna choose configurations for short runs in half of the tokens; the best one gets the rest.

    ``asha`` and ``short`` go on with the adapter of the best one; the others begin again with its configuration.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spent, halving, continued = 0, run.arm == "asha", run.arm in CONTINUED
    share = run.tokens // 2 // (4 if halving else TRIALS)
    short = (f"training.max_tokens={share}", "selection_strategy={name: none}", "environment.test_prompts=32")
    short += ("training.lr_schedule=constant", "training.evo_steps=1") if continued else ()

    def objective(trial: optuna.Trial) -> float:
        nonlocal spent
        values = [f"algorithm.{name}={chosen(trial, name, span)}" for name, span in run.genes().items()]
        if run.arm == "cmaes":
            trial.suggest_float("unused", 0.0, 1.0)  # Optuna's needs two dimensions at least
        trial.set_user_attr("settings", values)

        def stops(iteration: int, accuracy: float) -> bool:
            trial.report(accuracy, iteration)
            return trial.should_prune()

        outcome = carried_out(run.config(*values, *short), home / f"trial_{trial.number}", stops if halving else None)
        spent += outcome["spent"]
        if spent >= run.tokens / 2:
            study.stop()
        if "shipped" not in outcome:
            raise optuna.TrialPruned
        return float(outcome["curve"][-1][1])

    def chosen(trial: optuna.Trial, name: str, span: Mapping[str, float]) -> float:
        if name == "batch_size":
            return 8 * trial.suggest_int(name, round(span["min"] / 8), round(span["max"] / 8), log=True)
        return trial.suggest_float(name, span["min"], span["max"], log=True)

    samplers = {"tpe": optuna.samplers.TPESampler, "cmaes": optuna.samplers.CmaEsSampler}
    study = optuna.create_study(
        direction="maximize",
        sampler=samplers.get(run.arm, optuna.samplers.RandomSampler)(seed=run.seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    first = {"lr": run.rate, "batch_size": 16, "temperature": 1.0, "max_grad_norm": 1.0}
    study.enqueue_trial({name: first[name] for name in run.genes()})
    study.optimize(objective)
    settings = list(study.best_trial.user_attrs["settings"])
    start = [f"network.adapter={home / f'trial_{study.best_trial.number}' / 'elite'}"] if continued else []
    left = max(run.tokens - spent, 1)
    outcome = carried_out(run.config(*settings, *start, f"training.max_tokens={left}"), home / "run")
    outcome["curve"] = [[round(1 - (1 - at) * left / run.tokens, 4), best] for at, best in outcome["curve"]]
    outcome["spent"] += spent
    values = (setting.removeprefix("algorithm.").split("=") for setting in settings)
    outcome["hyperparameters"] = {name: float(value) for name, value in values}
    outcome["trials"] = [
        [len(trial.intermediate_values), trial.params, trial.value] for trial in study.get_trials(deepcopy=False)
    ]
    return outcome


def schedule_of(run: Path) -> Path:
    """Export the schedule of a finished run as ``agilerl schedule`` does; returns the file."""
    from agilerl.cli.commands import run_schedule

    out = run.with_suffix(".yaml")
    with contextlib.redirect_stdout(io.StringIO()):
        run_schedule(run, out=out, extrapolate=None, as_json=False)
    return out


def off_task(agent: Any, run: Run, task: str) -> float:
    """Return the accuracy of an agent on 200 questions of a task that it was not trained on."""
    from agilerl import Population
    from agilerl.training.tasks import task as made

    config = replace(run, task=task, seed=0).config("environment.eval_prompts=200", "environment.test_prompts=2")
    answer = MODELS[run.model].answer
    return round(Population([agent], made(config), eval_max_new_tokens=answer).evaluate()[agent.index].mean, 4)


def run_all(out: Path, runs: Sequence[Run]) -> None:
    """Carry out the runs that have no file yet; one that fails says so and does not stop the others."""
    out.mkdir(parents=True, exist_ok=True)
    # So that the run ends with this process.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for number, run in enumerate(runs, start=1):
            target = out / run.name
            with (out / f"{run.name}.running").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # another process is at it
                if not target.exists():
                    print(f"{number}/{len(runs)} {run.name}: {_carried_out_apart(run, target)}", flush=True)
                Path(lock.name).unlink(missing_ok=True)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _carried_out_apart(run: Run, target: Path) -> str:
    """Carry out a run in a process of its own, and write its file; returns what to print."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarking.evidence", "one", json.dumps(vars(run))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(result) + "\n")
    partial.replace(target)
    return f"test {result['test']:.3f}, {result['seconds']:.0f} s"


def results(out: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, or in a file that ``pack`` wrote."""
    read = json.loads(out.read_text())["runs"] if out.is_file() else []
    read += [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return [{"model": "embedded", **result} for result in read]


def pack(out: Path, to: Path) -> None:
    """Write all results into one file, a line each."""
    lines = ",\n".join(json.dumps(result) for result in results(out))
    to.write_text(f'{{"commit": "{commit()[:9]}", "date": "{date.today()}", "runs": [\n{lines}\n]}}\n')


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values (all of them if there are fewer than four)."""
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(*groups: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the mean of the groups' interquartile means.

    Groups are of one length: the runs of the same seeds, in order. Seeds are drawn, each with its runs of all groups,
    because these are not independent (a search that leaves a wrong rate at once is the same run at every rate). For the
    interquartile mean see Agarwal et al., arXiv 2108.13264. There it is taken over all values together. Over rates that
    would leave out the wrong ones, where runs collapse.
    """
    rng = np.random.default_rng(0)
    table = np.asarray(groups, dtype=float)
    picks = rng.choice(table.shape[1], (draws, table.shape[1]))
    middles = [np.mean([interquartile_mean(values) for values in table[:, pick]]) for pick in picks]
    low, high = np.quantile(middles, [0.025, 0.975])
    return float(low), float(high)


def reached(result: Mapping[str, Any]) -> float:
    """Return the tokens after which an exam was good enough for ``Model.far``; infinite if none was."""
    far = MODELS[result["model"]].far[result["task"]]
    return next((at * result["tokens"] for at, best in result["curve"] if best >= far), math.inf)


Results = Sequence[Mapping[str, Any]]


def table(found: Results, against: str = "formula_decay") -> str:
    """Return, for each budget, task and stratum, every arm with its differences to one arm on the same seeds.

    Of models whose strata are errors of the rate: a table of the tests for each task, and one of the whole axis.
    """
    if not found:
        return "No results yet."
    lines = []
    if alike := [r for r in found if not MODELS[r["model"]].axis]:
        lines += [_strata(alike, against)]
    erring = [r for r in found if MODELS[r["model"]].axis]
    for model, tokens, setting in sorted({(r["model"], r["tokens"], r["setting"]) for r in erring}):
        group = [r for r in erring if (r["model"], r["tokens"], r["setting"]) == (model, tokens, setting)]
        title = f"{model}, {tokens // 1000}k tokens" + (f", {setting}" if setting else "")
        lines += ["", *_rates(group, title), "", *_axis(group, title, against)]
    return "\n".join(lines)


def _strata(found: Results, against: str) -> str:
    lines = []
    groups = sorted({(r["tokens"], r["task"], r["stratum"]) for r in found})
    for tokens, task, stratum in groups:
        group = [r for r in found if (r["tokens"], r["task"], r["stratum"]) == (tokens, task, stratum)]
        base = {r["seed"]: r["test"] for r in group if r["arm"] == against}
        lines += ["", f"{task}, prior {stratum}, {tokens // 1000}k tokens", ""]
        far = MODELS[group[0]["model"]].far[task]
        lines += [
            f"| arm | seeds | test | - {against}, points | 95 % | worst seed | tokens to {far:.0%} | elsewhere "
            "| CPU s |"
        ]
        lines += ["|---" * 9 + "|"]
        for arm in NAMES:
            own = {r["seed"]: r for r in group if r["arm"] == arm}
            if not own:
                continue
            tests = [r["test"] for r in own.values()]
            gaps = [100 * (r["test"] - base[seed]) for seed, r in own.items() if seed in base]
            seconds = np.median([r["cpu_seconds"] for r in own.values()])
            gap = f"{interquartile_mean(gaps):+.1f}" if gaps else ""
            span = "{:+.1f} {:+.1f}".format(*interval(gaps)) if len(gaps) > 1 else ""
            when = _tokens_to(own.values())
            others = np.mean([list(r["elsewhere"].values()) for r in own.values()])
            lines.append(
                f"| {arm} | {len(own)} | {interquartile_mean(tests):.3f} | {gap} | {span} | {min(tests):.3f} "
                f"| {when} | {others:.3f} | {seconds:.0f} |"
            )
    return "\n".join(lines)


def _tokens_to(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the median of the tokens after which exams were good enough."""
    middle = float(np.median([reached(r) for r in runs]))
    return "never" if math.isinf(middle) else f"{middle / 1000:.0f}k"


def collapsed(found: Results) -> list[bool]:
    """Return for each run whether it collapsed: its test is below the base's, or below half of the best arm's mean.

    The best arm's mean is that of its best configuration, on the same task with the same budget.
    """
    means: dict[tuple[Any, ...], list[float]] = {}
    for r in found:
        means.setdefault((r["model"], r["setting"], r["tokens"], r["task"], r["stratum"], r["arm"]), []).append(
            r["test"]
        )
    best: dict[tuple[Any, ...], float] = {}
    for key, tests in means.items():
        best[key[:4]] = max(best.get(key[:4], 0.0), float(np.mean(tests)))
    return [
        r["test"] < r["base"] or r["test"] < best[r["model"], r["setting"], r["tokens"], r["task"]] / 2 for r in found
    ]


def _rates(found: Results, title: str) -> list[str]:
    """Return, for each task, a table of arms against errors of the rate: test, interval, number of seeds."""
    lines = []
    axis = MODELS[found[0]["model"]].axis
    for task in sorted({r["task"] for r in found}):
        of_task = [r for r in found if r["task"] == task]
        base = np.mean([r["base"] for r in of_task])
        lines += [f"{title}, {task}: test, 95 % (seeds); base {base:.3f}", ""] if not lines else ["", task, ""]
        lines += [f"| arm | {' | '.join(axis)} |", "|---" * (len(axis) + 1) + "|"]
        for arm in _arms(of_task):
            cells = []
            for stratum in axis:
                tests = [r["test"] for r in of_task if (r["arm"], r["stratum"]) == (arm, stratum)]
                span = " [{:.3f} {:.3f}]".format(*interval(tests)) if len(tests) > 1 else ""
                cells.append(f"{interquartile_mean(tests):.3f}{span} ({len(tests)})" if tests else "missing")
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _axis(found: Results, title: str, against: str) -> list[str]:
    """Return a table of arms over all tasks, errors and seeds that every arm has, and what is missing."""
    arms, axis = _arms(found), MODELS[found[0]["model"]].axis
    cells = {arm: {_cell(r): r for r in found if r["arm"] == arm} for arm in arms}
    shared = sorted(set.intersection(*(set(of_arm) for of_arm in cells.values())))
    wanted = set(itertools.product({r["task"] for r in found}, axis, {r["seed"] for r in found}))
    lines = []
    if shared:
        fell = dict(zip(((r["arm"], _cell(r)) for r in found), collapsed(found), strict=True))
        lines += [f"{title}: the {len(shared)} configurations and seeds that all arms have", ""]
        lines += [
            f"| arm | test | 95 % | - {against}, points | 95 % | collapsed | worst decile | tokens to the score "
            "| elsewhere | tokens | CPU s |"
        ]
        lines += ["|---" * 11 + "|"]
        for arm in arms:
            own = [cells[arm][cell] for cell in shared]
            test, span = _pooled({cell: cells[arm][cell]["test"] for cell in shared})
            gap, gap_span = "", ""
            if against in cells:
                gaps = {cell: 100 * (cells[arm][cell]["test"] - cells[against][cell]["test"]) for cell in shared}
                middle, ends = _pooled(gaps)
                gap, gap_span = f"{middle:+.1f}", "{:+.1f} {:+.1f}".format(*ends)
            falls = sum(fell[arm, cell] for cell in shared)
            low = np.quantile([r["test"] for r in own], 0.1)
            others = np.mean([list(r["elsewhere"].values()) for r in own])
            spent, seconds = (np.median([r[key] for r in own]) for key in ("spent", "cpu_seconds"))
            lines.append(
                f"| {arm} | {test:.3f} | {span[0]:.3f} {span[1]:.3f} | {gap} | {gap_span} "
                f"| {falls} ({falls / len(shared):.0%}) | {low:.3f} | {_tokens_to(own)} | {others:.3f} "
                f"| {spent / 1000:.0f}k | {seconds:.0f} |"
            )
        lines.append("")
    planned = [arm for arm in NAMES if arm in arms or arm in MODELS[found[0]["model"]].arms]
    missing = {arm: len(wanted - set(cells.get(arm, ()))) for arm in planned}
    listed = ", ".join(f"{arm} {count} of {len(wanted)}" for arm, count in missing.items() if count)
    seeds = " ".join(map(str, sorted({r["seed"] for r in found})))
    return [*lines, f"Missing of all rates with the seeds {seeds}: {listed or 'nothing'}."]


def _cell(r: Mapping[str, Any]) -> tuple[str, str, int]:
    return r["task"], r["stratum"], r["seed"]


def _pooled(values: Mapping[tuple[str, str, int], float]) -> tuple[float, tuple[float, float]]:
    """Return the mean over tasks and errors of the interquartile means of their seeds, and its interval."""
    groups: dict[tuple[str, str], list[float]] = {}
    for (task, stratum, _), value in values.items():
        groups.setdefault((task, stratum), []).append(value)
    return float(np.mean([interquartile_mean(group) for group in groups.values()])), interval(*groups.values())


def seeds(found: Results) -> str:
    """Return, for each model and budget, the tests of every arm in the order of its seeds.

    A letter marks those of another commit than most.
    """
    if not found:
        return "No results yet."
    usual, *others = (made for made, _ in Counter(r.get("commit") for r in found).most_common())
    marks = {usual: "", **dict(zip(others, string.ascii_lowercase))}
    arms, lines = list(NAMES), []
    for model, tokens, setting in sorted({(r["model"], r["tokens"], r["setting"]) for r in found}):
        runs = [r for r in found if (r["model"], r["tokens"], r["setting"]) == (model, tokens, setting)]
        lines += ["", f"{model}, {tokens // 1000}k tokens" + (f", {setting}" if setting else ""), ""]
        lines += ["| task | configuration | arm | seeds | tests |", "|---" * 5 + "|"]
        orders = [list(names) for names in (MODELS[model].tasks, MODELS[model].axis or MODELS[model].strata, arms)]
        for cell in itertools.product(*orders):
            own = [r for r in runs if (r["task"], r["stratum"], r["arm"]) == cell]
            own.sort(key=lambda r: r["seed"])
            tests = (f"{r['test']:.3f}".removeprefix("0") + marks[r.get("commit")] for r in own)
            if own:
                lines.append(f"| {' | '.join(cell)} | {' '.join(str(r['seed']) for r in own)} | {' '.join(tests)} |")
    notes = [f"{made or 'not recorded'} ({letter or 'no letter'})" for made, letter in marks.items()]
    return "\n".join([*lines, "", f"Commits: {', '.join(notes)}."])


def _arms(found: Results) -> list[str]:
    return [arm for arm in NAMES if arm in {r["arm"] for r in found}]


LABELS = {
    "ours": "default search",
    "ours_1": "search of one agent (no usual rate)",
    "formula_decay": "one agent, annealed",
    "asha": "ASHA",
}
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#b8860b", "#555555")


def plot(found: Results, to: Path) -> list[Path]:
    """Draw test accuracy against the error of the rate, a line for each arm, with its band; returns the files.

    Only of models whose strata are errors of the rate: a file for each model and budget.
    """
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    # So that the same numbers give the same bytes.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agilerl", "font.size": 9})
    written = []
    erring = {(r["model"], r["tokens"], r["setting"]) for r in found if MODELS[r["model"]].axis}
    for model, tokens, setting in sorted(erring):
        runs = [r for r in found if (r["model"], r["tokens"], r["setting"]) == (model, tokens, setting)]
        tasks, axis, strata = sorted({r["task"] for r in runs}), MODELS[model].axis, MODELS[model].strata
        figure, axes = plt.subplots(
            1, len(tasks), figsize=(1.6 + 4.4 * len(tasks), 3.8), squeeze=False, layout="constrained", sharey=True
        )
        for panel, task in zip(axes[0], tasks, strict=True):
            of_task = [r for r in runs if r["task"] == task]
            for number, arm in enumerate(_arms(runs)):
                tests = {
                    strata[stratum]: own
                    for stratum in axis
                    if (own := [r["test"] for r in of_task if (r["arm"], r["stratum"]) == (arm, stratum)])
                }
                colour, line = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
                middle = [interquartile_mean(own) for own in tests.values()]
                panel.plot(
                    list(tests), middle, line, color=colour, marker="o", markersize=3.5, label=LABELS.get(arm, arm)
                )
                spans = np.array([interval(own) for own in tests.values()]).reshape(-1, 2)
                panel.fill_between(list(tests), *spans.T, color=colour, alpha=0.15, linewidth=0)
            panel.axhline(
                np.mean([r["base"] for r in of_task]), color="#777777", linewidth=1, linestyle=":", label="base"
            )
            panel.set_xscale("log")
            panel.set_xticks([strata[stratum] for stratum in axis], axis)
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.set_title(task, fontsize=9)
            panel.grid(True, linewidth=0.3)
        figure.supxlabel("the configured learning rate, as a multiple of the formula's", fontsize=9)
        figure.supylabel("test accuracy", fontsize=9)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        changed = f"_{setting.partition('=')[0]}" if setting else ""
        path = to.with_name(f"{to.name}_{model}_{tokens // 1000}k{changed}.svg")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        written.append(path)
    return written


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line, checked against the model's tasks and strata."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table", "seeds", "plot", "pack", "one"])
    parser.add_argument("out")
    parser.add_argument("--model", default="embedded", choices=list(MODELS))
    parser.add_argument("--tasks", nargs="*", help="default: all; of smollm2, aiw")
    parser.add_argument("--strata", nargs="*", help="default: all of the model")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), help="default: those of the model")
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--first-seed", type=int, help="smollm2: 105; below that are seeds to choose settings with")
    parser.add_argument("--tokens", type=int, nargs="*", help="default: 180000; of smollm2, 150000")
    parser.add_argument("--device", default="cpu", help="run: where, such as cuda")
    parser.add_argument("--schedule", default="", help="run: what the arm replayed trains with; default: it finds one")
    parser.add_argument("--setting", default="", help="run: KEY=VALUE, changed in the configuration of all runs")
    parser.add_argument("--against", default="formula_decay", choices=NAMES, help="table: the arm to compare with")
    parser.add_argument("--to", type=Path, help="plot: beginning of the files' names; pack: the file")
    parsed = parser.parse_args()
    model = MODELS[parsed.model]
    for option, known in (("strata", model.strata), ("tasks", model.tasks)):
        if unknown := [name for name in getattr(parsed, option) or () if name not in known]:
            parser.error(f"--{option} {' '.join(unknown)}: expected some of {', '.join(known)}")
    if parsed.what in ("plot", "pack") and parsed.to is None:
        parser.error(f"{parsed.what} needs --to")
    return parsed


def runs_of(given: argparse.Namespace) -> list[Run]:
    """Return the runs that are asked for, in order."""
    model = MODELS[given.model]
    first = model.first_seed if given.first_seed is None else given.first_seed
    return [
        Run(task, stratum, arm, seed, tokens, given.setting, given.model, given.device, schedule)
        for tokens in given.tokens or [model.tokens]
        for seed in range(first, first + given.seeds)
        for stratum in given.strata or model.strata
        for task in given.tasks or (list(model.tasks)[:1] if model.axis else model.tasks)
        for arm in given.arms or model.arms
        for schedule in [given.schedule if arm == "replayed" else ""]
    ]


def main() -> None:
    """Run the benchmark, or show its results."""
    given = arguments()
    if given.what == "one":
        print(json.dumps(one(Run(**json.loads(given.out)))))
    elif given.what == "run":
        run_all(Path(given.out), runs_of(given))
    elif given.what == "pack":
        pack(Path(given.out), given.to)
    else:
        wanted = {"task": given.tasks, "stratum": given.strata, "arm": given.arms}
        found = results(Path(given.out))
        found = [r for r in found if all(names is None or r[key] in names for key, names in wanted.items())]
        if given.what == "table":
            print(table(found, given.against))
        else:
            print(seeds(found) if given.what == "seeds" else "\n".join(map(str, plot(found, given.to))))


if __name__ == "__main__":
    main()
