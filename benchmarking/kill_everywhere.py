"""Kill runs with SIGKILL, resume them until they are done, and compare every file with an uninterrupted run.

    python benchmarking/kill_everywhere.py OUT [--random 100] [--every | --few]

First at random moments; then at every failpoint (before each operation on the run directory, half-way through each
write, before and after each clone and mutation) of a process that resumes a run, goes through a selection and two
checkpoints, and finishes it. Failpoints that leave the same files but for what lies under hidden temporary
names are one case (see ``Surveyor``), of which one failpoint is tried; ``--every`` tries them all, ``--few`` one of
as many cases as it takes for each operation and each kind of file. Prints one JSON object; the exit code is 1 where
anything differs.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.faults import forked  # noqa: E402
from tests.faults.evidence import SHORT, differences, evidence  # noqa: E402
from tests.faults.failpoints import arm  # noqa: E402

RANDOM = (*SHORT, "training.max_steps=384")
POINTS = (*SHORT, "training.max_steps=144")


def uninterrupted(settings: tuple[str, ...], root: Path) -> float:
    """Run to the end in one go; returns the seconds it took."""
    begun = time.monotonic()
    code = forked.wait(forked.start(["train", *settings, "--out", str(root)], log=root.with_suffix(".log")))
    assert code == 0, root.with_suffix(".log").read_text()
    return time.monotonic() - begun


class RandomKills:
    """Runs that are killed at random moments until enough kills have struck."""

    def __init__(self, out: Path, rng: random.Random) -> None:
        self.out, self.rng = out, rng
        self.seconds = uninterrupted(RANDOM, out / "reference")
        self.expected = evidence(out / "reference")
        self.kills: list[float] = []
        self.failures: list[str] = []
        self.runs = 0

    def go_on(self, kills: int) -> dict[str, Any]:
        while len(self.kills) < kills:
            self._one_run(self.out / f"run-{self.runs}", kills)
            self.runs += 1
        return {"kills": len(self.kills), "runs": self.runs, "failures": self.failures}

    def _one_run(self, root: Path, kills: int) -> None:
        command = ["train", *RANDOM, "--out", str(root), "--resume", "auto"]
        while True:
            child = forked.start(command, log=root.with_suffix(".log"))
            moment = self.rng.uniform(0, 0.7 * self.seconds) if len(self.kills) < kills else None
            code = forked.wait(child, seconds=moment)
            if code is None:
                os.kill(child, signal.SIGKILL)
                code = forked.wait(child)
            if code == -signal.SIGKILL:
                self.kills.append(moment or 0.0)
                continue
            if code != 0:
                self.failures.append(f"{root.name}: exit code {code}: {root.with_suffix('.log').read_text()[-2000:]}")
            else:
                self.failures += [f"{root.name}: {name}" for name in differences(self.expected, evidence(root))]
            return


class Killer:
    """Ends its process at the k-th failpoint."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, operation: str, path: str) -> None:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


class Surveyor:
    """Notes every failpoint, and a number for what a kill there would leave: its case.

    All that is hidden under temporary names is one thing, and so are all lengths of a file of lines since the last
    checkpoint, but for a torn last line.
    """

    def __init__(self, root: Path, notes: Path) -> None:
        self.root, self.notes = root, notes
        self.cases: dict[tuple[Any, ...], int] = {}

    def __call__(self, operation: str, path: str) -> None:
        label = operation if operation.startswith(("before", "after")) else ""
        case = self.cases.setdefault((label, *sorted(self._files(self.root))), len(self.cases))
        name = os.path.relpath(path, self.root) if path else ""
        with self.notes.open("a") as notes:
            notes.write(json.dumps([case, operation, name]) + "\n")

    def _files(self, folder: Path) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for entry in os.scandir(folder):
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                found.append((str(folder), "hidden"))
            elif entry.is_dir():
                found += [(entry.path,), *self._files(Path(entry.path))]
            elif entry.name in ("metrics.jsonl", "lineage.jsonl"):
                found.append((entry.path, Path(entry.path).read_bytes()[-1:]))
            else:
                found.append((entry.path, entry.stat().st_size))
        return found


class EveryPoint:
    """A process that resumes, selects, saves twice and finishes, killed at one failpoint after the other."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.start = out / "start"
        uninterrupted(POINTS, out / "short")
        self.expected = evidence(out / "short")
        self._kill_after_first_checkpoint()

    def _kill_after_first_checkpoint(self) -> None:
        """Leave a run that has a checkpoint after iteration 1, and metrics and completions of iteration 2."""
        command = ["train", *POINTS, "--out", str(self.start)]

        def at_second_checkpoint(operation: str, path: str) -> None:
            if operation == "mkdir" and ".000002." in path:
                os.kill(os.getpid(), signal.SIGKILL)

        forked.wait(forked.start(command, log=self._log, first=lambda: arm(self.start, at_second_checkpoint)))
        assert (self.start / "checkpoints" / "000001").is_dir()
        assert (self.start / "completions" / "step_000002.parquet").exists()

    @property
    def _log(self) -> Path:
        return self.out / "points.log"

    def _resume(self, visit: Callable[[str, str], None] | None = None) -> int | None:
        first = (lambda: None) if visit is None else (lambda: arm(self.out / "run", visit))
        return forked.wait(forked.start(["resume", str(self.out / "run")], log=self._log, first=first))

    def _fresh(self) -> Path:
        root = self.out / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.start, root)
        return root

    def survey(self) -> list[tuple[int, str, str]]:
        """Return the failpoints, each with the number of its case."""
        root, notes = self._fresh(), self.out / "survey.json"
        code = self._resume(Surveyor(root, notes))
        assert code == 0, self._log.read_text()[-2000:]
        assert not differences(self.expected, evidence(root)), differences(self.expected, evidence(root))
        return [tuple(json.loads(line)) for line in notes.read_text().splitlines()]

    def go_on(self, rng: random.Random, *, every: bool, few: bool) -> dict[str, Any]:
        points = self.survey()
        cases: dict[int, list[int]] = {}
        for number, (case, _, _) in enumerate(points):
            cases.setdefault(case, []).append(number)
        tried = _covering(list(cases.values()), points) if few else list(cases.values())
        chosen = list(range(len(points))) if every else [rng.choice(numbers) for numbers in tried]
        failures: list[str] = []
        for number in chosen:
            found = [f"failpoint {number} {points[number][1:]}: {what}" for what in self._kill_at(number)]
            print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr, flush=True)
            failures += found
        kinds = sorted({operation for _, operation, _ in points})
        return {
            "failpoints": len(points),
            "cases": len(cases),
            "tried": len(chosen),
            "operations": kinds,
            "failures": failures,
        }

    def _kill_at(self, number: int) -> list[str]:
        root = self._fresh()
        code = self._resume(Killer(number))
        if code != -signal.SIGKILL:
            return [f"it was not reached, exit code {code}"]
        code = self._resume()
        if code != 0:
            return [f"exit code {code} after resuming: {self._log.read_text()[-2000:]}"]
        return differences(self.expected, evidence(root))


def _covering(cases: list[list[int]], points: list[tuple[int, str, str]]) -> list[list[int]]:
    """Return the cases that bring an operation or a kind of file (its name without numbers) not seen before them."""
    seen: set[str] = set()
    found = []
    for numbers in sorted(cases, key=len, reverse=True):
        new = {what for n in numbers for what in (points[n][1], re.sub(r"\d+", "", points[n][2]))} - seen
        if new:
            seen |= new
            found.append(numbers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for the runs; must be new")
    parser.add_argument("--random", type=int, default=10, metavar="N", help="kills at random moments")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--every", action="store_true", help="every failpoint instead of one of each case")
    which.add_argument("--few", action="store_true", help="each operation and each kind of file instead of each case")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True)
    forked.warm(RANDOM)
    begun, rng = time.monotonic(), random.Random(arguments.seed)
    result: dict[str, Any] = {"random": RandomKills(out, rng).go_on(arguments.random)}
    result["points"] = EveryPoint(out).go_on(rng, every=arguments.every, few=arguments.few)
    result["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["random"]["failures"] or result["points"]["failures"] else 0)


if __name__ == "__main__":
    main()
