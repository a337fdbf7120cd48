"""Measure what checkpoints cost: the share of a run's wall time that is spent saving it.

    python benchmarking/checkpoint_overhead.py OUT [KEY.PATH=VALUE ...]

Runs the embedded default (a checkpoint after each selection) in this process, with a clock around every commit, and
prints one JSON object. One run gives the ratio, so that what else the machine does matters little. Reading the ratio of
``training.checkpoint_steps=1`` tells what it would cost to save after every iteration.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agilerl.config.manifest import load_manifest  # noqa: E402
from agilerl.training.events import IterationDone  # noqa: E402
from agilerl.training.loop import train  # noqa: E402
from agilerl.training.records import RunWriter  # noqa: E402
from agilerl.training.setup import build  # noqa: E402


class Clock:
    """Adds up the seconds that a method takes."""

    def __init__(self, method: Any) -> None:
        self.method, self.each = method, list[float]()

    def bound(self) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = perf_counter()
            try:
                return self.method(*arguments, **options)
            finally:
                self.each.append(perf_counter() - start)

        return call


def measure(out: Path, overrides: list[str]) -> dict[str, Any]:
    clock = Clock(RunWriter.checkpoint)
    RunWriter.checkpoint = clock.bound()  # type: ignore[method-assign]
    session = build(load_manifest(None, overrides))
    start, iterations = perf_counter(), 0
    for event in train(session, out):
        iterations += isinstance(event, IterationDone)
    seconds = perf_counter() - start
    newest = max(p for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    return {
        "settings": overrides,
        "iterations": iterations,
        "checkpoints": len(clock.each),
        "seconds": round(seconds, 2),
        "seconds_saving": round(sum(clock.each), 3),
        "milliseconds_each": round(1000 * sum(clock.each) / max(1, len(clock.each)), 1),
        "mib_each": round(sum(p.stat().st_size for p in newest.rglob("*") if p.is_file()) / 2**20, 2),
        "share": round(sum(clock.each) / seconds, 5),
        "target": 0.02,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="run directory; must be new")
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="settings of the run")
    arguments = parser.parse_args()
    result = measure(arguments.out, arguments.overrides)
    print(json.dumps(result, indent=1))
    sys.exit(result["share"] > result["target"] and not any("checkpoint" in o for o in arguments.overrides))


if __name__ == "__main__":
    main()
