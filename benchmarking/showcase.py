"""Do the published numbers of the real model come out again? A run of `make train-real` against the committed result.

    make train-real ARGS='--out runs/smollm2'          # from nothing: the base, the agents, the elite and its card
    python -m benchmarking.showcase runs/smollm2       # compare it with benchmarking/results/showcase.json
    python -m benchmarking.showcase runs/smollm2 --to benchmarking/results/showcase.json

Without make, train with `agilerl train tutorials/manifests/real/smollm2.yaml --out runs/smollm2`. The result has the
tests, and the sha256 of the elite's files. On a CPU of the same kind they come out equal to the byte; on another one,
products round differently, and the tests differ by a few points. Where files differ, it prints both runs and exits
with 1.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarking.measuring import ROOT, commit

RESULT = ROOT / "benchmarking" / "results" / "showcase.json"
FILES = ("adapter_model.safetensors", "README.md")


def result_of(run: Path) -> dict[str, Any]:
    """Return what a finished run came to."""
    summary = json.loads((run / "summary.json").read_text())
    info = json.loads((run / "run.json").read_text())
    config, hardware = info["config"], info["hardware"]
    return {
        "seed": config["training"]["seed"],
        "max_steps": config["training"]["max_steps"],
        "test": summary["test"],
        "hyperparameters": summary["elite"]["hyperparameters"],
        "tokens": summary["tokens"],
        "seconds": round(summary["seconds"]),
        "sha256": {name: sha256((run / "elite" / name).read_bytes()).hexdigest() for name in FILES},
        "commit": commit()[:9],
        "machine": {
            "platform": hardware["platform"],
            "processor": hardware["cpu"],
            "torch": info["versions"]["torch"],
        },
    }


def described(result: Mapping[str, Any]) -> str:
    """Return the tests, tokens and machine of a result, a line each."""
    rows = {name: f"{test['mean']:.3f} ± {test['stderr']:.3f}" for name, test in result["test"].items()}
    rows |= {f"tokens {name}": f"{count:,}" for name, count in result["tokens"].items()}
    rows |= {name: result["machine"][name] for name in ("processor", "torch")}
    return "\n".join(f"  {name:<24} {value}" for name, value in rows.items())


def main() -> None:
    """Compare a run with the committed result, or write that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, help="the file to write")
    given = parser.parse_args()
    try:
        result = result_of(given.run)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SystemExit(
            f"expected a finished run at {given.run}, found no {error.filename}; "
            f"train it: make train-real ARGS='--out {given.run}'"
        ) from error
    print(f"This run:\n{described(result)}")
    if given.to is not None:
        given.to.write_text(json.dumps(result, indent=1) + "\n")
        return
    expected = json.loads(RESULT.read_text())
    differ = [name for name in FILES if result["sha256"][name] != expected["sha256"][name]]
    if differ:
        print(f"The published run:\n{described(expected)}")
    for name in FILES:
        print(f"{name:<28} {'differs' if name in differ else 'equal to the byte'}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
