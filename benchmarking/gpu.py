"""Run everything that only a GPU can show, in order of value, within a budget of time; gpu.sh calls it.

    python benchmarking/gpu.py OUT [--device cuda|cpu] [--only PART ...] [--budget SECONDS]

It says first what this Python lacks and which parts go without. Each part is a process of its own with a limit of its
own (gpu_parts.py), and adds each row to OUT/<part>.json when it is measured: a part that fails, or is stopped at its
limit, keeps the rows it has, and the next one begins. OUT/gpu.json holds all parts, and is rewritten after each. The
exit code is 0 if every part that could run ended well, 1 if one did not, 2 if none could run.

Only Python itself is imported here, so that a bare interpreter can say what is missing.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarking.measuring import ROOT, commit, written

BUDGET = {"cuda": 570, "cpu": 290}
"""Seconds for everything."""

PACKAGE = [
    *("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "pydantic", "yaml", "gymnasium", "regex"),
    *("jinja2", "httpx2", "tenacity"),
]
"""What the package's own modules import."""
RUN = [*PACKAGE, "scipy", "filelock", "pyarrow", "plotly", "psutil", "typer", "rich"]
"""What `agilerl train` imports besides."""
REAL = [*RUN, "reasoning_gym"]
"""What the task of the run on SmolLM2 imports besides."""

MODULES = {
    "torch": "everything",
    "transformers": "everything",
    "peft": "everything",
    "accelerate": "everything (peft imports it)",
    "safetensors": "everything (weights)",
    "numpy": "everything",
    "pydantic": "everything (settings)",
    "pydantic_core": "everything (settings)",
    "yaml": "everything (manifests)",
    "gymnasium": "everything (environments)",
    "regex": "everything (answers)",
    "jinja2": "everything (chat templates)",
    "scipy": "runs: selection and the spread of the first values",
    "filelock": "runs: the lock of a run directory",
    "pyarrow": "runs: completions",
    "plotly": "runs: reports",
    "psutil": "runs: processes that grade",
    "typer": "runs: the command line",
    "rich": "runs: the command line",
    "reasoning_gym": "the run on SmolLM2",
    "pytest": "the tests",
    "pytest_timeout": "the tests' time limit; without it there is none",
    "hypothesis": "the tests",
    "datasets": "datasets of the hub; no part needs it",
    "httpx2": "everything (the package imports it; judges, tools and servers use it)",
    "tenacity": "everything (the package imports it; judges, tools and servers use it)",
    "gguf": "bases in GGUF files; no part needs it",
    "huggingface_hub": "names of the hub; transformers brings it",
    "markupsafe": "reports; jinja2 brings it",
    "bitsandbytes": "the row with a base in 4 bits",
    "liger_kernel": "the row with Liger's kernels",
    "flash_attn": "the row with FlashAttention 2",
    "triton": "the rows with torch.compile, FlexAttention and Liger's kernels; torch for CUDA brings it",
    "vllm": "the arm of the engines that decodes with vLLM",
}
"""Modules, and what they are for here."""
DISTRIBUTIONS = {"yaml": "pyyaml", "liger_kernel": "liger-kernel", "reasoning_gym": "reasoning-gym"}
"""Names for pip, of those that have another one; else dashes for underscores."""


@dataclass(frozen=True)
class Part:
    """Something to measure, in a process of its own."""

    name: str
    limit: int
    """Seconds that it may take."""
    what: str
    needs: Sequence[str] = tuple(PACKAGE)
    command: Sequence[str] = ()
    """What runs it; empty: gpu_parts.py. It gets ``--device DEVICE --out FILE``."""


PARTS = (
    Part("tests", 80, "pytest -m gpu", (*RUN, "pytest", "hypothesis")),
    Part("bits", 60, "agents together against alone, with and without deterministic kernels"),
    Part("run", 100, "agilerl train on the device: elite, time, a resumed run against one that was not stopped", RUN),
    Part("real", 100, "SmolLM2, if build/smollm2 is there (make real): what is learned, in both data types", REAL),
    Part("step", 140, "a step at 135M, 0.5B and 1.5B, of 1 to 16 agents: time, memory, limits, the plan"),
    Part("decode", 60, "decoded tokens a second against rows, with and without adapters; host syncs; a CUDA graph"),
    Part("train", 60, "trained tokens a second and MFU, with prompts of 256 and 1,024 tokens"),
    Part("ratios", 40, "GSPO's ratios in bf16: the decoder's log-probs against the trainer's"),
    Part("engines", 80, "our engine against Hugging Face generate, and vLLM with sleep mode where it is installed"),
    Part("fsdp", 40, "FSDP2 with one process, over NCCL on a GPU"),
    Part("options", 120, "checkpointing, offload, TF32, packing, FlashAttention, Liger, 4 bits, torch.compile"),
)
"""In order of value: what comes late is what is left out if time is short."""


def missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def for_pip(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def versions() -> dict[str, str]:
    found = {}
    for module in MODULES:
        try:
            found[for_pip(module)] = importlib.metadata.version(for_pip(module))
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.version.split()[0], **found}


FACTS = """
import json, platform, sys, torch
kind = sys.argv[1]
facts = {"kind": kind, "name": platform.processor() or platform.machine(), "machine": platform.platform()}
if kind != "cpu":
    p = torch.cuda.get_device_properties(0)
    facts |= {"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"}
    facts |= {"cuda": torch.version.cuda}
print(json.dumps(facts))
"""


def device_facts(device: str) -> dict[str, Any]:
    """Return what torch knows of the device, in a process of its own that leaves no context on it."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FACTS, device], capture_output=True, text=True)
    if done.returncode:
        return {"kind": device, "error": (done.stderr.strip().splitlines() or ["torch did not start"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def head(device: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return what every JSON of these benchmarks begins with."""
    return {
        "benchmark": "gpu",
        "device": dict(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [word.removeprefix(f"{ROOT}/") for word in command],
    }


class Rows:
    """The rows of a part as they are measured, written after each."""

    def __init__(self, out: Path, part: str, device: Mapping[str, Any]) -> None:
        self.out = out
        self.document = {"part": part, **head(device, sys.argv), "rows": []}
        written(out, self.document)

    def add(self, **row: Any) -> None:
        self.document["rows"].append(row)
        written(self.out, self.document)
        print(json.dumps(row), flush=True)


def done(part: Part, out: Path, device: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Run a part for at most so many seconds; returns its rows, and what became of it."""
    path, started = out / f"{part.name}.json", time.monotonic()
    path.unlink(missing_ok=True)
    script = [sys.executable, str(ROOT / "benchmarking" / "gpu_parts.py"), part.name]
    command = [*(part.command or script), "--device", str(device["kind"]), "--out", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    environment |= {"OMP_NUM_THREADS": os.getenv("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    environment |= {"GPU_DEVICE": json.dumps(dict(device)), "TOKENIZERS_PARALLELISM": "false"}
    with (out / f"{part.name}.log").open("w") as log:
        # A group of its own: processes that a part has started end with it, and leave the device.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            last = (lines_of(out / f"{part.name}.log") or [""])[-1]
            status = "done" if code == 0 else f"failed with exit code {code}: {last}"
        except subprocess.TimeoutExpired:
            status = f"stopped after its limit of {seconds:.0f} s"
        finally:
            ended(process)
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        document = {"part": part.name, **head(device, command), "rows": []}
        status = status if status != "done" else "failed: it wrote no JSON"
    if status == "done" and not document["rows"]:
        status = "failed: it has no rows"
    document |= {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status != "done":
        document["log"] = lines_of(out / f"{part.name}.log")[-60:]
    written(path, document)
    return document


def ended(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a part: itself, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(log: Path) -> list[str]:
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()]


def measured(parts: Sequence[Part], out: Path, device: str, budget: float) -> int:
    """Run the parts in turn; returns the exit code."""
    started, failed, ran = time.monotonic(), False, False
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    lacking = missing(list(MODULES))
    for name in lacking:
        print(f"missing: {for_pip(name):18} for {MODULES[name]}")
    needed = sorted({for_pip(name) for part in parts for name in missing(part.needs)})
    if needed:
        print(f"parts are left out without these: pip install {' '.join(needed)}", flush=True)
    facts = device_facts(device)
    document = head(facts, sys.argv) | {"missing": {for_pip(name): MODULES[name] for name in lacking}, "parts": []}
    for part in parts:
        left = budget - (time.monotonic() - started)
        lacks = missing(part.needs)
        found: dict[str, Any] = {"part": part.name, "rows": [], "seconds": 0.0}
        if lacks:
            found["status"] = "not run: it needs " + ", ".join(for_pip(name) for name in lacks)
        elif "error" in facts:
            found["status"] = f"not run: no device: {facts['error']}"
        elif left < 5:
            found["status"], failed = "not run: the time was up", True
        else:
            found, ran = done(part, out, facts, min(part.limit, left)), True
            failed |= found["status"] != "done"
        document["parts"].append({"what": part.what, **found})
        document["seconds"] = round(time.monotonic() - started, 1)
        written(out / "gpu.json", document)
        print(f"{part.name}: {found['status']} ({len(found['rows'])} rows, {found['seconds']:.0f} s)", flush=True)
    print(f"{out / 'gpu.json'}, after {time.monotonic() - started:.0f} s")
    return 1 if failed else 0 if ran else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="some parts; default: all")
    parser.add_argument("--budget", type=float, help=f"seconds for everything; default: {BUDGET}")
    given = parser.parse_args()
    chosen = [part for part in PARTS if given.only is None or part.name in given.only]
    return measured(chosen, given.out, given.device, given.budget or BUDGET[given.device])


if __name__ == "__main__":
    sys.exit(main())
