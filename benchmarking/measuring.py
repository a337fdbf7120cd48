"""What several benchmarks measure and write alike; imports only Python itself, for a bare interpreter."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; that of COMMIT, if set, for a copy."""
    if given := os.environ.get("COMMIT"):
        return given
    asked = (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip() for words in asked
        )
    except FileNotFoundError:
        head = changed = ""
    return head + "+" * bool(changed) if head else ""


def surroundings(rounds: int) -> dict[str, Any]:
    """Return what decides how fast and how exactly a machine computes."""
    return {
        "commit": commit(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "rounds": rounds,
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median with the bounds of a bootstrap interval of 95 %."""
    import numpy as np

    sample = np.asarray(values)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(sample, (2000, len(sample))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(sample)), float(low), float(high)


def written(path: Path, document: Any) -> None:
    """Write a JSON file, whole or not at all."""
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    half.write_text(json.dumps(document, indent=1) + "\n")
    half.replace(path)
