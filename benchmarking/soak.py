"""Kill `agilerl train` for hours, resume it each time, and compare every finished run with one that nobody touched.

    python benchmarking/soak.py OUT [--minutes 30] [--seed 0]

Processes of the command line are started one after the other with ``--resume auto`` and get SIGKILL (mostly), SIGTERM
or SIGINT after a random time. Where a run gets to its end, every file of it must equal the reference's but for wall
times; then it is deleted and the next begins. Meanwhile memory, file descriptors and threads of the processes and the
disk space are measured, and their slopes printed: all should be about 0. ``OUT/soak.json`` holds the numbers; the exit
code is 1 where anything differed. Ctrl-C ends it early, with the results so far.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.evidence import SHORT, differences, evidence  # noqa: E402
from tests.training.small_runs import environment  # noqa: E402

SETTINGS = (*SHORT, "training.max_steps=19200", "training.evo_steps=10", "mutation.rl_hp_selection={lr: {}}")
"""400 iterations in 40 generations, a checkpoint after each iteration."""
WARM = 0.25
"""Share of the reference's time after which a process has imported and allocated what it needs."""
ENDS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 143, 130)
"""Exit codes of a process that got a signal: one that has not imported everything yet dies of it."""
SIGNALS = {signal.SIGKILL: 0.7, signal.SIGTERM: 0.15, signal.SIGINT: 0.15}


@dataclass
class Sample:
    """What a process holds at a moment."""

    at: float
    """Seconds since the soak began."""
    child: int
    age: float
    memory: float
    """Resident MiB."""
    descriptors: int
    threads: int


@dataclass
class Soak:
    """All that has happened so far."""

    out: Path
    rng: random.Random
    begun: float = field(default_factory=time.monotonic)
    expected: dict[str, str] = field(default_factory=dict)
    reference_seconds: float = 0.0
    children: int = 0
    finished: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peaks: list[tuple[float, float]] = field(default_factory=list)
    """Moment and peak memory in MiB of each process that lived long enough to be warm."""
    disk: list[tuple[float, float]] = field(default_factory=list)
    """Moment and MiB in ``OUT``, whenever a run has been deleted."""

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    @property
    def warm(self) -> list[Sample]:
        return [s for s in self.samples if s.age > WARM * self.reference_seconds]

    def make_reference(self) -> None:
        start = time.monotonic()
        code = self._process(self.out / "reference", None)
        self.reference_seconds = time.monotonic() - start
        assert code == 0, (self.out / "log").read_text()[-2000:]
        self.expected = evidence(self.out / "reference")

    def go_on(self, until: float) -> None:
        while self.now < until:
            self._one_run(self.out / "run", until)

    def _one_run(self, root: Path, until: float) -> None:
        while self.now < until:
            code = self._process(root, self.rng.uniform(0, 1.2 * self.reference_seconds))
            if code == 0:
                self.failures += [f"run {self.finished}: {name}" for name in differences(self.expected, evidence(root))]
                self.finished += 1
                shutil.rmtree(root)
                self.disk.append((self.now, _mebibytes(self.out)))
                return
            if code not in ENDS:
                self.failures.append(f"run {self.finished}: exit code {code}: {(self.out / 'log').read_text()[-2000:]}")
                shutil.rmtree(root, ignore_errors=True)
                return

    def _process(self, root: Path, moment: float | None) -> int:
        """Start a process, send it a signal after ``moment`` seconds, and return its exit code."""
        command = [
            sys.executable,
            "-m",
            "agilerl",
            "train",
            *SETTINGS,
            "--out",
            str(root),
            "--resume",
            "auto",
            "--quiet",
        ]
        with (self.out / "log").open("wb") as log:
            child = subprocess.Popen(
                command,
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        number, start = self.children, time.monotonic()
        self.children += 1
        try:
            while child.poll() is None:
                age = time.monotonic() - start
                if moment is not None and age >= moment:
                    moment = None
                    (chosen,) = self.rng.choices(list(SIGNALS), list(SIGNALS.values()))
                    child.send_signal(chosen)
                self._sample(child.pid, number, age)
                time.sleep(0.5 if moment is None else min(0.5, max(0.0, moment - age)))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        warm = [s.memory for s in self.warm if s.child == number]
        if warm:
            self.peaks.append((self.now, max(warm)))
        self.ends[str(child.returncode)] = self.ends.get(str(child.returncode), 0) + 1
        return child.returncode

    def _sample(self, pid: int, number: int, age: float) -> None:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            values = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            memory, threads = int(values["VmRSS"].split()[0]) / 1024, int(values["Threads"])
        except (OSError, KeyError):  # it has just ended
            return
        self.samples.append(Sample(self.now, number, age, memory, descriptors, threads))

    def result(self) -> dict[str, Any]:
        """Return the numbers; slopes within processes are those of all of them, each from its own level."""
        warm = self.warm
        return {
            "minutes": round(self.now / 60, 1),
            "processes": self.children,
            "killed_or_stopped": sum(count for code, count in self.ends.items() if code != "0"),
            "exit_codes": dict(sorted(self.ends.items())),
            "runs_finished_and_compared": self.finished,
            "failures": self.failures,
            "reference_seconds": round(self.reference_seconds, 1),
            "peak_memory_mib": round(max((s.memory for s in warm), default=0.0), 1),
            "most_descriptors": max((s.descriptors for s in warm), default=0),
            "most_threads": max((s.threads for s in warm), default=0),
            "slopes": {
                "memory_within_a_process_mib_per_minute": _pooled(warm, "memory"),
                "descriptors_within_a_process_per_minute": _pooled(warm, "descriptors"),
                "threads_within_a_process_per_minute": _pooled(warm, "threads"),
                "peak_memory_over_processes_mib_per_hour": _slope(self.peaks, 3600),
                "disk_over_runs_mib_per_hour": _slope(self.disk, 3600),
            },
            "disk_mib": [round(value, 2) for _, value in self.disk],
        }


def _slope(points: list[tuple[float, float]], seconds: float) -> float | None:
    """Return the least-squares slope of values over moments, per so many seconds; None for fewer than three points."""
    if len(points) < 3:
        return None
    moments, values = np.array(points).T
    return round(float(np.polyfit(moments, values, 1)[0]) * seconds, 4)


def _pooled(samples: list[Sample], name: str) -> float | None:
    """Return the slope per minute of age, after the mean of each process has been taken off."""
    points: list[tuple[float, float]] = []
    for child in sorted({s.child for s in samples}):
        own = np.array([(s.age, getattr(s, name)) for s in samples if s.child == child], dtype=float)
        points += [(float(age), float(value)) for age, value in own - own.mean(axis=0)]
    return _slope(points, 60)


def _mebibytes(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for the runs; must be new")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True)
    soak, interrupted = Soak(out, random.Random(arguments.seed)), False
    try:
        soak.make_reference()
        soak.go_on(arguments.minutes * 60)
    except KeyboardInterrupt:
        interrupted = True
    result = soak.result()
    (out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    slopes = result.pop("slopes")
    for name, value in {**result, **slopes}.items():
        print(f"{name.replace('_', ' '):45} {value}")
    sys.exit(130 if interrupted else 1 if soak.failures else 0)


if __name__ == "__main__":
    main()
