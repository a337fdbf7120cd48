"""Where the time of `agilerl train` goes, phase by phase, and how near each phase is to what the machine allows.

    python benchmarking/train_profile.py [--seed S] [--runs 1] [--out FILE] [MANIFEST] [KEY.PATH=VALUE ...]

The command itself runs, in this process, with functions of the package wrapped in clocks: what a function calls counts
for the inner one if that has a clock, else for the outer one. Exams, selection and records hold all that they call. The
clock is the CPU time of one thread.

The floor of a phase is the least time for its work by the formulas of a dry run, at the rates of a large matrix
product and of a large copy as this process measures them after the run. The tokens are those that the run really had:
no padding, each prompt as often as it was computed, rows without a gradient left out. ``fraction_of_limit`` is floor /
measured; of phases that only handle numbers and files, no floor is known: theirs is 0. Of several runs, which have the
same tokens, the table shows the medians. Prints a table and one JSON object.

(Not profile.py: beside a file of that name, Python's own profiler cannot be imported.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

START, LOAD = "start: interpreter and imports", "load: base, task, agents, and imports"
REST = "rest: loop, plan, display"
EXAMS, EVOLUTION, RECORDS = "exams", "selection and clones", "records and checkpoints"
BOTH = "update: forward and backward"
CLOSED = (LOAD, EXAMS, EVOLUTION, RECORDS, "update: fixed log-probs")
"""Phases that hold all that happens in them."""


class Clocked(NamedTuple):
    """A function whose time counts for a phase."""

    module: str
    name: str
    """``function`` or ``Class.method``."""
    phase: str
    within: str = ""
    """Only inside phases that begin so."""


CLOCKS = (
    Clocked("agilerl.training.setup", "build", LOAD),
    Clocked("agilerl.population", "Population.rollout", "rollout: rest"),
    Clocked("agilerl.population", "Population.draw", "rollout: rest"),
    Clocked("agilerl.rollouts.torch_engine", "TorchEngine.generate", "rollout: decode", "rollout"),
    Clocked("agilerl.rollouts.torch_engine", "_Decoder._enter", "rollout: prefill", "rollout"),
    Clocked("agilerl.rollouts.torch_engine", "_uniforms", "rollout: draw", "rollout"),
    Clocked("agilerl.rollouts.torch_engine", "draw", "rollout: draw", "rollout"),
    Clocked("agilerl.rollouts.collect", "collect_answers", "rollout: build rows", "rollout"),
    Clocked("agilerl.rollouts.episodes", "collect_episodes", "rollout: build rows", "rollout"),
    Clocked("agilerl.rollouts.collect", "verdicts_of", "rollout: grade", "rollout"),
    Clocked("agilerl.envs.prompts", "decode_completions", "rollout: grade", "rollout"),
    Clocked("agilerl.population", "Population.learn", "update: rest"),
    Clocked("agilerl.data.batch", "collate", "update: lines", "update"),
    Clocked("agilerl.data.batch", "RolloutBatch.select", "update: lines", "update"),
    Clocked("agilerl.algorithms.update", "Share.cut", "update: lines", "update"),
    Clocked("agilerl.models.flat", "flatten", "update: lines", "update"),
    Clocked("agilerl.runtime", "Runtime.forward", "update: forward", "update"),
    Clocked("agilerl.algorithms.custom_loss", "compute_loss", "update: forward", "update"),
    Clocked("torch", "Tensor.backward", "update: backward", "update"),
    Clocked("agilerl.algorithms.update", "optim_step", "update: optimizer", "update"),
    Clocked("agilerl.runtime", "Runtime._without_gradient", "update: fixed log-probs", "update"),
    Clocked("agilerl.algorithms.exams", "Exams.evaluate", EXAMS),
    Clocked("agilerl.algorithms.exams", "Exams.evaluate_base", EXAMS),
    Clocked("agilerl.training.finish", "before_and_after", EXAMS),
    Clocked("agilerl.algorithms.exams", "Exams.evaluate_agent", EXAMS),
    Clocked("agilerl.population", "Population.sick", EVOLUTION),
    Clocked("agilerl.population", "Population.state_of", EVOLUTION),
    Clocked("agilerl.population", "Population.evolve", EVOLUTION),
    Clocked("agilerl.runs.directory", "RunDirectory.create", RECORDS),
    Clocked("agilerl.training.records", "RunWriter.__init__", RECORDS),
    Clocked("agilerl.training.records", "RunWriter.write", RECORDS),
    Clocked("agilerl.training.records", "RunWriter.checkpoint", RECORDS),
    Clocked("agilerl.training.records", "RunWriter.elite", RECORDS),
    Clocked("agilerl.training.records", "RunWriter.finish", RECORDS),
    Clocked("agilerl.training.loop", "completion_rows", RECORDS),
)
PHASES = tuple(dict.fromkeys((START, *(c.phase for c in CLOCKS), REST)))
_ALL = 10**9
"""Tokens: as many as there are, in one pass."""
MODULES = ("agilerl.cli.app", "agilerl.cli.launch", "agilerl.cli.progress", "agilerl.training.loop")
"""What the command imports, so that every name for a function is there to be replaced."""


class Clock:
    """CPU seconds of each phase, of which one is on at a time."""

    def __init__(self, time: Callable[[], float] = process_time, first: str = START) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._time, self._stack, self._last = time, [first], 0.0
        self._first = first

    @property
    def phase(self) -> str:
        """What is on now."""
        return self._stack[-1]

    @contextmanager
    def during(self, clocked: Clocked) -> Iterator[None]:
        """Count for a phase, unless the present one holds all, or is not what this belongs to."""
        if self.phase in CLOSED or not self.phase.startswith(clocked.within):
            yield
            return
        self._mark()
        if self._stack == [self._first]:
            self._stack = [REST]
        self._stack.append(clocked.phase)
        try:
            yield
        finally:
            self._mark()
            self._stack.pop()

    def stop(self) -> None:
        """Count what is left."""
        self._mark()

    def _mark(self) -> None:
        now = self._time()
        self.seconds[self.phase] += now - self._last
        self._last = now


class Counted:
    """What the run really computed, a call an entry, with the phase that it happened in."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.session: Any = None
        self.decoded: list[tuple[str, dict[str, Any]]] = []
        self.forwards: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[int] = []
        """Agents of each optimizer step."""
        self.clones = 0

    def note_session(self, arguments: Sequence[Any], result: Any) -> None:
        self.session = result

    def note_decoding(self, arguments: Sequence[Any], result: Any) -> None:
        requests = arguments[1]
        lengths = [len(completion.token_ids) for group in result for completion in group]
        found = {
            "agents": len({request.slot for request in requests}),
            "prompts": len(requests),
            "rows": len(lengths),
            "prompt": fmean(len(request.prompt_ids) for request in requests),
            "completion": fmean(lengths),
            "longest": max(lengths),
        }
        self.decoded.append((self._clock.phase, found))

    def note_forward(self, arguments: Sequence[Any], result: Any) -> None:
        import torch

        runtime, parts = arguments
        flat = runtime.base.flattens
        found = {
            "agents": len(parts),
            "rows": sum(len(part.batch) for part in parts),
            "tokens": sum(part.batch.distinct_tokens if flat else int(part.batch.lengths.sum()) for part in parts),
            "spoken": sum(int(part.batch.action_mask.sum()) for part in parts),
            "length": fmean(float(length) for part in parts for length in part.batch.lengths),
            "gradient": torch.is_grad_enabled(),
        }
        self.forwards.append((self._clock.phase, found))

    def note_step(self, arguments: Sequence[Any], result: Any) -> None:
        self.steps.append(len(arguments[0]))

    def note_evolution(self, arguments: Sequence[Any], result: Any) -> None:
        self.clones += len(result.plan.births)

    @property
    def watched(self) -> tuple[tuple[str, str, Callable[[Sequence[Any], Any], None]], ...]:
        """Functions, with what notes their arguments and results."""
        return (
            ("agilerl.training.setup", "build", self.note_session),
            ("agilerl.rollouts.torch_engine", "TorchEngine.generate", self.note_decoding),
            ("agilerl.runtime", "Runtime.forward", self.note_forward),
            ("agilerl.algorithms.update", "optim_step", self.note_step),
            ("agilerl.population", "Population.evolve", self.note_evolution),
        )


def _replace_everywhere(module: str, name: str, wrap: Callable[[Any], Any], undo: ExitStack) -> None:
    """Wrap a function, under every name that a module of the package has for it, or a method in its class."""
    *owner, last = name.split(".")
    if owner:
        holder = getattr(import_module(module), owner[0])
        original = vars(holder)[last]
        own = isinstance(original, classmethod)
        setattr(holder, last, classmethod(wrap(original.__func__)) if own else wrap(original))
        undo.callback(setattr, holder, last, original)
        return
    original = getattr(import_module(module), last)
    wrapped = wrap(original)
    for found in [m for n, m in sys.modules.items() if n.partition(".")[0] == "agilerl"]:
        for name_there in [n for n, value in vars(found).items() if value is original]:
            setattr(found, name_there, wrapped)
            undo.callback(setattr, found, name_there, original)


@contextmanager
def watched(clock: Clock) -> Iterator[Counted]:
    """Put the clocks in; yields what the run computes meanwhile, and takes them out again."""
    counted = Counted(clock)

    def timed(clocked: Clocked) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            @wraps(function)
            def call(*arguments: Any, **options: Any) -> Any:
                with clock.during(clocked):
                    return function(*arguments, **options)

            return call

        return wrap

    def noted(note: Callable[[Sequence[Any], Any], None]) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            @wraps(function)
            def call(*arguments: Any, **options: Any) -> Any:
                result = function(*arguments, **options)
                note(arguments, result)
                return result

            return call

        return wrap

    for module in (*MODULES, *(clocked.module for clocked in CLOCKS)):
        import_module(module)
    with ExitStack() as undo:
        for module, name, note in counted.watched:
            _replace_everywhere(module, name, noted(note), undo)
        for clocked in CLOCKS:
            _replace_everywhere(clocked.module, clocked.name, timed(clocked), undo)
        yield counted


def train(arguments: Sequence[str]) -> None:
    """Run ``agilerl train`` with some arguments, as the command line does."""
    from agilerl.cli.app import app

    app(["train", *arguments], standalone_mode=False)


# -- the limit ----------------------------------------------------------------------------------------------------


def floors(counted: Counted, machine: Any) -> dict[str, float]:
    """Return the least seconds of each phase, training's in one, for the tokens that the run had."""
    from agilerl.cli.forecast import shape_of, workload
    from agilerl.planning.time import work

    shape = shape_of(counted.session.population.runtime)
    usual = replace(workload(counted.session, 1), common=0, row_multiple=1)
    found: dict[str, float] = defaultdict(float)
    for phase, d in counted.decoded:
        sizes = {name: d[name] for name in ("agents", "prompt", "completion", "longest")}
        prompts, group = d["prompts"] / d["agents"], max(1, round(d["rows"] / d["prompts"]))
        done = work(shape, replace(usual, prompts=prompts, group=group, max_rows=d["rows"], samples=True, **sizes))
        for part in ("prefill", "decode"):
            found[EXAMS if phase == EXAMS else f"rollout: {part}"] += done[part].floor(machine)
    for _, d in counted.forwards:
        # As if each row had a prompt of its own, in one pass; then as many tokens as there were. The head only speaks.
        rows, spoken = d["rows"] / d["agents"], d["spoken"] / d["rows"]
        sizes = {"prompt": max(d["length"] - spoken, 0), "completion": spoken, "longest": 1, "epochs": 1}
        kinds = {"reference": True, "old_pass": False, "critic": False, "max_tokens": _ALL, "micro_tokens": _ALL}
        load = replace(usual, agents=d["agents"], prompts=rows, group=1, window=rows, **sizes, **kinds)
        once = work(shape, load)["train" if d["gradient"] else "logprobs"]
        head = (4 if d["gradient"] else 2) * shape.head * d["spoken"]
        share = d["tokens"] / (d["length"] * d["rows"])
        once = replace(once, flops=(once.flops - head) * share + head)
        found[BOTH if d["gradient"] else "update: fixed log-probs"] += once.floor(machine)
    for agents in counted.steps:
        step = work(shape, replace(usual, agents=agents, prompts=1, group=1, window=1, epochs=1))["optimizer"]
        found["update: optimizer"] += step.floor(machine)
    if counted.clones:
        found[EVOLUTION] += work(shape, replace(usual, agents=counted.clones))["evolve"].floor(machine)
    return dict(found)


def summary(seconds: Mapping[str, float], least: Mapping[str, float]) -> dict[str, Any]:
    """Return each phase with its floor; forward and backward have one together."""
    total = sum(seconds.values())
    phases = {name: {"seconds": seconds.get(name, 0.0), "floor": least.get(name, 0.0)} for name in PHASES}
    forward = seconds.get("update: forward", 0.0) + seconds.get("update: backward", 0.0)
    groups = {
        "rollout": [name for name in PHASES if name.startswith("rollout")],
        "update": [name for name in PHASES if name.startswith("update")],
    }
    floor_of = {name: sum(least.get(p, 0.0) for p in own) for name, own in groups.items()}
    floor_of["update"] += least.get(BOTH, 0.0)
    whole = {name: (sum(seconds.get(p, 0.0) for p in own), floor_of[name]) for name, own in groups.items()}
    whole[BOTH] = (forward, least.get(BOTH, 0.0))
    whole["iterations"] = (whole["rollout"][0] + whole["update"][0], floor_of["rollout"] + floor_of["update"])
    whole["command"] = (total, sum(least.values()))
    found = phases | {name: {"seconds": spent, "floor": floor} for name, (spent, floor) in whole.items()}
    for values in found.values():
        values["share"] = values["seconds"] / total
        values["fraction_of_limit"] = values["floor"] / values["seconds"] if values["seconds"] else 0.0
    return found


# -- the program --------------------------------------------------------------------------------------------------


def measured(arguments: Sequence[str], clock: Clock) -> dict[str, Any]:
    """Run the command once; returns its phases, what it computed, and the rates of the machine."""
    with watched(clock) as counted:
        train(arguments)
        clock.stop()
    from agilerl.cli.forecast import measured_machine

    machine = measured_machine(clock=process_time)
    decoded = [d for _, d in counted.decoded]
    trained = [d for _, d in counted.forwards if d["gradient"]]
    return {
        "F": machine.flops,
        "BW": machine.bandwidth,
        "phases": summary(clock.seconds, floors(counted, machine)),
        "tokens": {
            "prefilled": round(sum(d["prompts"] * d["prompt"] for d in decoded)),
            "decoded": round(sum(d["rows"] * d["completion"] for d in decoded)),
            "trained": sum(d["tokens"] for d in trained),
            "trained_actions": sum(d["spoken"] for d in trained),
        },
        "optimizer_steps": len(counted.steps),
    }


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("seconds", "floor", "share", "fraction_of_limit")
    return {
        phase: {name: median(run["phases"][phase][name] for run in runs) for name in names}
        for phase in runs[0]["phases"]
    }


def table(phases: Mapping[str, Mapping[str, float]]) -> str:
    lines = ["| phase | CPU s | share | floor s | fraction of limit |", "|---|---|---|---|---|"]
    for name, p in phases.items():
        limit = f"{p['floor']:.2f} | {p['fraction_of_limit']:.2f}" if p["floor"] else " | "
        shown = name if name in PHASES else f"**{name}**"
        lines.append(f"| {shown} | {p['seconds']:.2f} | {100 * p['share']:.1f} % | {limit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("arguments", nargs="*", metavar="MANIFEST or KEY.PATH=VALUE", help="as for agilerl train")
    parser.add_argument("--seed", type=int, help="of the run")
    parser.add_argument("--runs", type=int, default=1, help="processes that run the command, one after the other")
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    given = [*arguments.arguments, *(["--seed", str(arguments.seed)] if arguments.seed is not None else [])]
    if arguments.child:
        # Time counts from the start of this process: the clock begins at 0.
        with tempfile.TemporaryDirectory() as folder:
            found = measured([*given, "--out", str(Path(folder) / "run"), "--quiet"], Clock())
        print(json.dumps(found))
        return
    from benchmarking.roofline import surroundings, written

    command = [sys.executable, __file__, "--child", *arguments.arguments]
    command += ["--seed", str(arguments.seed)] if arguments.seed is not None else []
    document: dict[str, Any] = {
        "benchmark": "train_profile",
        **surroundings(arguments.runs),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "clock": "cpu seconds, one thread",
        "arguments": given,
        "load_average": [],
        "runs": [],
    }
    for _ in range(arguments.runs):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"agilerl train: exit {done.returncode}: {done.stderr[-1500:]}")
        document["runs"].append(json.loads(done.stdout.splitlines()[-1]))
        document["load_average"].append(round(os.getloadavg()[0], 1))
    document["phases"] = medians(document["runs"])
    print(table(document["phases"]))
    print(json.dumps(document))
    if arguments.out is not None:
        written(arguments.out, document)


if __name__ == "__main__":
    main()
