"""Do the published numbers of the real model come out again? A run of `make train-real` against the committed result.

    make train-real                                    # from nothing: the base, four agents, the elite and its card
    python -m benchmarking.showcase runs/smollm2       # compare it with benchmarking/results/showcase.json
    python -m benchmarking.showcase runs/smollm2 --to benchmarking/results/showcase.json

The result has the tests, and the sha256 of the elite's files. On a CPU of the same kind they come out equal to the
byte; on another one, products round differently, and the tests differ by a few points.
"""

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarking.evidence import ROOT, commit, machine

RESULT = ROOT / "benchmarking" / "results" / "showcase.json"
FILES = ("adapter_model.safetensors", "README.md")


def result_of(run: Path) -> dict[str, Any]:
    """Return what a finished run came to."""
    summary = json.loads((run / "summary.json").read_text())
    config = json.loads((run / "run.json").read_text())["config"]
    return {
        "seed": config["training"]["seed"],
        "max_steps": config["training"]["max_steps"],
        "test": summary["test"],
        "hyperparameters": summary["elite"]["hyperparameters"],
        "tokens": summary["tokens"],
        "seconds": round(summary["seconds"]),
        "sha256": {name: sha256((run / "elite" / name).read_bytes()).hexdigest() for name in FILES},
    }


def main() -> None:
    """Compare a run with the committed result, or write that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, help="the file to write")
    given = parser.parse_args()
    result = result_of(given.run)
    for name, test in result["test"].items():
        print(f"{name:<24} {test['mean']:.3f} ± {test['stderr']:.3f}")
    if given.to is not None:
        given.to.write_text(json.dumps({**result, "commit": commit()[:9], "machine": machine()}, indent=1) + "\n")
        return
    expected = json.loads(RESULT.read_text())
    differ = [name for name in FILES if result["sha256"][name] != expected["sha256"][name]]
    for name in FILES:
        print(f"{name:<28} {'differs' if name in differ else 'equal to the byte'}")
    if differ:
        print(f"the published run was made on {expected['machine']['processor']}, torch {expected['machine']['torch']}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
