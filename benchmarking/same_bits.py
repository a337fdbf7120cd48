"""Say whether two checkouts of agilerl compute the same bits: seven small runs on each, compared file by file.

    python benchmarking/same_bits.py OLD NEW [--only ppo dpo] [--keep FOLDER] [--jobs 2]

OLD and NEW are folders that hold a checkout, or revisions of this repository (``HEAD~3``, ``main``, ``1be8d52``). Both
run with the interpreter that runs this script, on one thread. Compared are the sha256 of every file of ``elite/`` and
``checkpoints/``, of ``lineage.jsonl`` and of ``journal.jsonl``; what tells of time is left out (``clock.json``, and
its line in each ``MANIFEST.json``). Prints one line a run and ends with ``same`` (exit code 0) or ``different`` (1).

A refactoring is measured by it: each step leaves the bits. It says nothing about a change that means to change them.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    *("selection_strategy.name=tournament", "algorithm.lr=1e-5"),
    "mutation={probabilities: {no_mut: 0.2, rl_hp_mut: 0.8}, rl_hp_selection: {lr: {min: 1e-6, max: 1e-2}}}",
    "training.pop_size=3",
    "training.max_steps=192",
    "training.evo_steps=2",
    "training.checkpoint_steps=1",
    "environment.data_batch_size_per_gpu=4",
    "environment.eval_prompts=8",
    "environment.test_prompts=10",
    "network.lora_config.r=4",
)
"""4 iterations in 2 generations, a checkpoint after each."""
GRPO = ("algorithm.group_size=4", "algorithm.batch_size=8", "algorithm.lr=1e-3")
RUNS: dict[str, tuple[str, ...]] = {
    "default": (*SMALL, *GRPO),
    "ppo": (
        *SMALL,
        "algorithm={name: PPO, lr_actor: 1e-3, lr_critic: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
        "mutation.rl_hp_selection={lr_actor: {}, lr_critic: {}}",
    ),
    "mixed": (
        *SMALL,
        "algorithm={name: 'choice[GRPO, CISPO, GSPO]', lr: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
    ),
    "rank": (
        *SMALL,
        *GRPO,
        "mutation.rl_hp_selection={lr: {}}",
        "mutation.probabilities={arch_mut: 1.0, rl_hp_mut: 0.0}",
        "mutation.rank_range=[2, 16]",
        "mutation.mutate_elite=true",
        "training.evo_steps=1",
        "training.seed=2",
    ),
    "multi_turn": (
        *SMALL,
        *GRPO,
        "environment={env_type: multiturn, env_id: agilerl/GuessTheNumber-v0, params: {max_number: 9}, "
        "data_batch_size_per_gpu: 2, eval_prompts: 4, test_prompts: 4}",
        "algorithm.max_output_tokens=3",
        "training.max_steps=96",
    ),
    "dpo": (
        *SMALL,
        "algorithm={name: DPO, lr: 1e-3, beta: 0.1, batch_size: 4, max_output_tokens: 6}",
        "environment.env_type=preference",
        "training.max_steps=48",
        "mutation.rl_hp_selection={lr: {}, beta: {}}",
    ),
    "processes": (*SMALL, *GRPO, "training.pop_size=4", "training.max_steps=256"),
}
PROCESSES = {"processes": 2}


def train(checkout: Path, name: str, out: Path) -> None:
    """Run ``agilerl train`` of a checkout; the last lines of what it printed are the error if it fails."""
    module = ["-m", "agilerl", "train", *RUNS[name], "--out", str(out), "--quiet"]
    if name in PROCESSES:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[name]), *module]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *module], cwd=out.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed in {checkout} with code {done.returncode}:\n{done.stderr[-2000:]}")


def digests(run: Path) -> dict[str, str]:
    """Return the sha256 of each compared file by its name."""
    paths = [
        run / "lineage.jsonl",
        run / "journal.jsonl",
        *(run / "elite").rglob("*"),
        *(run / "checkpoints").rglob("*"),
    ]
    return {
        path.relative_to(run).as_posix(): hashlib.sha256(_content(path)).hexdigest()
        for path in paths
        if path.is_file() and path.name != "clock.json"
    }


def _content(path: Path) -> bytes:
    if path.name != "MANIFEST.json":
        return path.read_bytes()
    return json.dumps(
        {name: entry for name, entry in json.loads(path.read_text()).items() if name != "clock.json"}
    ).encode()


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the names of the files in which two runs differ, those that only one of them has included."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def lay_out(given: str, place: Path) -> str:
    """Copy the package of a folder or of a revision to ``place``; return what to call it.

    Both checkouts run from the same place, one after the other, because an adapter's configuration names the folder of
    its base model, and the embedded one lies in the package.
    """
    shutil.rmtree(place, ignore_errors=True)
    folder = Path(given)
    if folder.is_dir():
        if not (folder / "agilerl" / "__init__.py").is_file():
            raise SystemExit(f"expected a folder that holds agilerl/, found {given!r}")
        shutil.copytree(folder / "agilerl", place / "agilerl", ignore=shutil.ignore_patterns("__pycache__"))
        return given
    found = subprocess.run(
        ["git", "rev-parse", "--verify", f"{given}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(f"expected a folder with a checkout or a revision of this repository, found {given!r}")
    archive = subprocess.run(
        ["git", "archive", found.stdout.strip(), "agilerl"], cwd=ROOT, capture_output=True, check=True
    )
    place.mkdir()
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return f"{given} ({found.stdout[:7]})"


def main() -> int:
    """Run and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--keep", type=Path, help="where the run directories stay; by default they are removed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        package, out = Path(temporary) / "checkout", (arguments.keep or Path(temporary)).resolve()
        for which in ("old", "new"):
            print(f"{which}: {lay_out(getattr(arguments, which), package)}", flush=True)
            folders = [out / which / run for run in arguments.only]
            (out / which).mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(arguments.jobs) as pool:
                list(pool.map(train, repeat(package), arguments.only, folders))
        equal = True
        for run in arguments.only:
            first, second = digests(out / "old" / run), digests(out / "new" / run)
            if not first:
                raise SystemExit(f"{run} left no files to compare in {out / 'old' / run}")
            found = differences(first, second)
            equal = equal and not found
            shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
            print(f"{run:<11} {len(first):>4} files  {f'different: {shown}' if found else 'same'}")
    print("same" if equal else "different")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
