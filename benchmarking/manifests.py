"""Run the manifests of tutorials/manifests over several seeds and print their test accuracies as a table.

    python benchmarking/manifests.py OUT [--seeds 42 1 2] [--only grpo ppo]

Runs that OUT already holds are not repeated. The table goes to standard output and, with the commit and the machine, to
OUT/manifests.json.
"""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "tutorials" / "manifests"
ORDER = ["sft", "dpo", "grpo", "gspo", "cispo", "rloo", "reinforce", "maxrl", "dppo", "ppo"]


def run(name: str, seed: int, out: Path) -> dict[str, Any]:
    folder = out / f"{name}-{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        manifest = str(MANIFESTS / f"{name}.yaml")
        command = [sys.executable, "-m", "agilerl", "train", manifest, "--seed", str(seed), "--out", str(folder)]
        subprocess.run([*command, "--quiet"], check=True)
    found = json.loads(summary.read_text())
    return {"manifest": name, "seed": seed, "test": found["test"], "seconds": found["seconds"]}


def shown(fitness: dict[str, float]) -> str:
    return f"{fitness['mean']:.3f} ± {fitness['stderr']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = []
    print("| manifest | seed | base | median agent of the first generation | elite | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.only:
        for seed in arguments.seeds:
            result = run(name, seed, arguments.out)
            results.append(result)
            columns = [shown(result["test"][who]) for who in ("base", "median_first_generation", "elite")]
            print(f"| `{name}.yaml` | {seed} | {' | '.join(columns)} | {result['seconds']:.0f} |", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {"commit": commit, "machine": platform.platform(), "python": platform.python_version(), "runs": results}
    (arguments.out / "manifests.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
