"""Measure the start of the command: processor time of imports, help, a typing error and a dry run; the first output.

    python benchmarking/startup.py OUT [--against CHECKOUT] [--rounds 7]

Each round starts every program once in a fresh process, on one thread, and takes the
processor time (user and system) that the kernel counted for it. ``first_output`` is the wall time until a dry run
prints its first character. With ``--against`` the same is done with another checkout: the two take turns, the one that
begins changes with the round, and ``ratio`` is the median over rounds of (other / this) within a round, with a
bootstrap interval of 95 %. Both run with the interpreter that runs this script. Writes OUT and prints it.
"""

import argparse
import json
import os
import platform
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
sys.path.insert(0, str(ROOT))

from benchmarking.rollout import interval  # noqa: E402

PROGRAMS: dict[str, tuple[tuple[str, ...], int]] = {
    "import": (("-c", "import agilerl"), 0),
    "help": (("-m", "agilerl", "--help"), 0),
    "typing_error": (("-m", "agilerl", "train", "algorithm.gruop_size=4"), 2),
    "dry_run": (("-m", "agilerl", "train", "--dry-run"), 0),
}
"""Arguments of Python, and the exit code."""
TARGETS = {"import": 0.05, "help": 0.3, "dry_run": 4.0, "first_output": 0.3}
"""Seconds at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="JSON file")
    parser.add_argument("--against", type=Path, help="another checkout of agilerl")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": arguments.against.resolve()} if arguments.against else {})
    rounds: list[dict[str, dict[str, float]]] = []
    loads = []
    for checkout in checkouts.values():
        measured(checkout)  # makes bytecode, and brings files into memory
    for number in range(arguments.rounds):
        loads.append(os.getloadavg()[0])
        order = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
        rounds.append({name: measured(checkouts[name]) for name in order})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    result = {
        "commit": {name: revision(checkout) for name, checkout in checkouts.items()},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": loads},
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "targets": TARGETS,
        **{name: summary([r[name] for r in rounds]) for name in checkouts},
    }
    if "other" in checkouts:
        result["ratio"] = {
            what: [round(r, 3) for r in interval([r["other"][what] / r["this"][what] for r in rounds])]
            for what in rounds[0]["this"]
        }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def measured(checkout: Path) -> dict[str, float]:
    """Return the processor seconds of each program, and the wall seconds until the first output of a dry run."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (arguments, code) in PROGRAMS.items():
            spent, first = run(arguments, code, checkout, folder)
            found[name] = spent
        found["first_output"] = first  # of the last, the dry run
    return found


def run(arguments: Sequence[str], code: int, checkout: Path, folder: str) -> tuple[float, float]:
    """Run a program to its end; return its processor seconds, and the wall seconds until its first output."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    start = perf_counter()
    child = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    child.stdout.read(1)
    first = perf_counter() - start
    child.stdout.read()
    child.stdout.close()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != code:
        raise SystemExit(f"{' '.join(arguments)} in {checkout} ended with {child.returncode}, expected {code}")
    return usage.ru_utime + usage.ru_stime, first


def revision(checkout: Path) -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip()


def summary(values: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the median, the smallest and the largest of each."""
    found = {}
    for what in values[0]:
        each = [value[what] for value in values]
        found[what] = {"median": round(median(each), 3), "spread": [round(min(each), 3), round(max(each), 3)]}
    return found


if __name__ == "__main__":
    main()
