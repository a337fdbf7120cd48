"""Measure what a dry run's prediction is made of, and print constants for ``agilerl/planning/time.py``.

    python benchmarking/roofline.py [--device cpu] [--rounds 7] [--out FILE]

Each model runs in a child process, which measures F (the rate of a large matrix product) and BW (of a large copy)
and the phases of an iteration and a generation in turn, ``--rounds`` times. On a CPU times are the CPU time of one
thread, which other processes lengthen little; but ``checkpoint`` is wall time. The constants fit all models. What they
predict for others, and what share of its limit each phase reaches, is a part of gpu.py: ``step``, on a CPU too.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agilerl.planning.time import CPU_COSTS, GPU_COSTS, ITERATION, Machine, ModelShape, Workload, seconds, work
from agilerl.sizes import CPU_ROWS, PASS_TOKENS
from benchmarking.measuring import ROOT, surroundings, written

SIZES: dict[str, dict[str, int]] = {
    "1M": {"hidden": 128, "feed_forward": 384, "layers": 4, "heads": 4, "kv_heads": 2, "vocabulary": 1024},
    "30M": {"hidden": 512, "feed_forward": 1408, "layers": 8, "heads": 8, "kv_heads": 4, "vocabulary": 8192},
    # The shape of SmolLM2-135M.
    "135M": {"hidden": 576, "feed_forward": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "vocabulary": 49152},
    "0.5B": {"hidden": 896, "feed_forward": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "vocabulary": 151936},
    "1.5B": {"hidden": 1536, "feed_forward": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocabulary": 151936},
    # For peers.py only: eight query heads share two heads of keys and values.
    "1.25M": {"hidden": 128, "feed_forward": 376, "layers": 6, "heads": 8, "kv_heads": 2, "vocabulary": 1024},
    "27.8M": {"hidden": 512, "feed_forward": 1408, "layers": 8, "heads": 8, "kv_heads": 2, "vocabulary": 10240},
    # For the constants only:
    "0.2M": {"hidden": 80, "feed_forward": 208, "layers": 2, "heads": 2, "kv_heads": 2, "vocabulary": 256},
    "0.5M": {"hidden": 96, "feed_forward": 256, "layers": 5, "heads": 3, "kv_heads": 3, "vocabulary": 512},
    "2M": {"hidden": 192, "feed_forward": 512, "layers": 5, "heads": 6, "kv_heads": 2, "vocabulary": 2048},
    "5M": {"hidden": 256, "feed_forward": 704, "layers": 6, "heads": 8, "kv_heads": 4, "vocabulary": 4096},
    "12M": {"hidden": 384, "feed_forward": 1024, "layers": 7, "heads": 6, "kv_heads": 2, "vocabulary": 2048},
}
LOADS: dict[str, dict[str, int]] = {
    "embedded": {"agents": 4, "prompts": 16, "group": 8, "prompt": 12, "longest": 16},
    "1M": {"agents": 4, "prompts": 4, "group": 8, "prompt": 40, "longest": 48},
    "30M": {"agents": 2, "prompts": 2, "group": 8, "prompt": 60, "longest": 32},
    "135M": {"agents": 4, "prompts": 2, "group": 8, "prompt": 48, "longest": 24},
    "0.5B": {"agents": 4, "prompts": 8, "group": 8, "prompt": 120, "longest": 48},
    "1.5B": {"agents": 4, "prompts": 8, "group": 8, "prompt": 120, "longest": 48},
    "0.2M": {"agents": 8, "prompts": 4, "group": 4, "prompt": 30, "longest": 30},
    "0.5M": {"agents": 2, "prompts": 8, "group": 8, "prompt": 20, "longest": 40},
    "2M": {"agents": 2, "prompts": 4, "group": 8, "prompt": 90, "longest": 36},
    "5M": {"agents": 4, "prompts": 4, "group": 4, "prompt": 30, "longest": 60},
    "12M": {"agents": 2, "prompts": 2, "group": 16, "prompt": 60, "longest": 60},
}
CALIBRATION = ("0.2M", "0.5M", "2M", "5M", "12M")
RANK = 16


# -- the child: one model ---------------------------------------------------------------------------------------------


def made_model(name: str, device: str, dtype: Any = None) -> Any:
    """Return a model that never ends a completion by itself, so that lengths are known; None: bf16 but on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from agilerl.models.base import resolve_model

    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if name == "embedded":
        model = AutoModelForCausalLM.from_pretrained(resolve_model("embedded"), dtype=dtype)
    else:
        s = SIZES[name]
        config = Qwen2Config(
            vocab_size=s["vocabulary"],
            hidden_size=s["hidden"],
            intermediate_size=s["feed_forward"],
            num_hidden_layers=s["layers"],
            num_attention_heads=s["heads"],
            num_key_value_heads=s["kv_heads"],
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
        with torch.device(device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    return model.to(device)


def child(name: str, device: str, rounds: int, agents: int | None, *, disk: bool = True) -> dict[str, Any]:
    """Measure one model in this process; without ``disk`` no checkpoints are written."""
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.utils.logging.set_verbosity_error()
    from benchmarking.roofline_phases import Bench

    load = LOADS[name] | ({"agents": agents} if agents else {})
    tiny = {"agents": 1, "prompts": 1, "group": 2, "prompt": 4, "longest": 2}
    Bench(made_model("1M", device), tiny, RANK, device).round(
        disk=disk
    )  # imports and kernels are no part of the memory
    resident = resident_bytes(device)
    bench = Bench(made_model(name, device), load, RANK, device)
    bench.round(disk=disk)
    used = peak_bytes(device) - resident
    times: dict[str, list[float]] = {}
    rates: list[tuple[float, float]] = []
    for _ in range(rounds):
        rates.append(bench.rates())
        for phase, spent in bench.round(disk=disk).items():
            times.setdefault(phase, []).append(spent)
    flops, bandwidth = median(f for f, _ in rates), median(b for _, b in rates)
    return {
        "model": name,
        "device": device,
        "load": load,
        "shape": bench.shape.__dict__,
        "parameters": bench.runtime.base.parameters,
        "F": flops,
        "F_spread": [min(f for f, _ in rates), max(f for f, _ in rates)],
        "BW": bandwidth,
        "BW_spread": [min(b for _, b in rates), max(b for _, b in rates)],
        "disk": bench.disk_rate(),
        "times": times,
        "peak_bytes": used,
        "pass_tokens": bench.runtime.pass_tokens,
    }


def resident_bytes(device: str) -> int:
    """Return what the process holds now, and begin to watch for its peak."""
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return int(next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)) * 1024


def peak_bytes(device: str) -> int:
    if device != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return int(next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)) * 1024


# -- the parent: floors, predictions, the table -----------------------------------------------------------------------


def workload(found: dict[str, Any]) -> Workload:
    load, tokens = found["load"], found.get("pass_tokens", PASS_TOKENS)
    return Workload(
        agents=load["agents"],
        rank=RANK,
        prompts=load["prompts"],
        group=load["group"],
        prompt=load["prompt"],
        completion=load["longest"],
        window=load["prompts"] * load["group"],
        reference=True,
        row_multiple=CPU_ROWS if found["device"] == "cpu" else 1,
        micro_tokens=tokens,
        max_tokens=tokens,
    )


def machine_of(found: dict[str, Any]) -> Machine:
    return Machine(found["F"], found["BW"], found["disk"])


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return the phases of one model with floors, fractions and predictions."""
    shape, load, machine = ModelShape(**found["shape"]), workload(found), machine_of(found)
    costs = CPU_COSTS if found["device"] == "cpu" else GPU_COSTS
    works, predicted, phases = work(shape, load), seconds(shape, load, machine, costs), {}
    for phase, times in found["times"].items():
        measured, floor = median(times), works[phase].floor(machine)
        phases[phase] = {
            "measured": measured,
            "spread": [min(times), max(times)],
            "floor": floor,
            "fraction_of_limit": floor / measured,
            "predicted": predicted[phase],
        }
        phases[phase]["predicted_over_measured"] = phases[phase]["predicted"] / measured
    whole = [p for p in phases if p in ITERATION]
    total = {n: sum(phases[p][n] for p in whole) for n in ("measured", "floor", "predicted")}
    total |= {"fraction_of_limit": total["floor"] / total["measured"]}
    total |= {"predicted_over_measured": total["predicted"] / total["measured"]}
    return {
        **{n: found[n] for n in ("model", "device", "load", "F", "F_spread", "BW", "BW_spread", "disk", "parameters")},
        "phases": phases,
        "iteration": total,
        "memory": {"peak": found["peak_bytes"]},
    }


def measured(name: str, device: str, rounds: int, agents: int | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--device", device, "--rounds", str(rounds)]
    command += ["--agents", str(agents)] if agents else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def calibrated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return costs that fit measurements, phase by phase: least squares of relative errors, never below the floor.

    What the call of a layer costs can be told from decoding alone, whose batches are small; the others have the same.
    """
    import numpy as np
    from scipy.optimize import lsq_linear

    fitted: dict[str, Any] = {}
    call = np.inf
    for phase in ("decode", *(p for p in found[0]["times"] if p != "decode")):
        rows = []
        for f in found:
            w, machine = work(ModelShape(**f["shape"]), workload(f))[phase], machine_of(f)
            time = median(f["times"][phase])
            rows.append([w.floor(machine) / time, w.traffic / machine.bandwidth / time, w.layer_calls / time])
        matrix = np.array(rows)
        scale = np.where(matrix.max(axis=0) > 0, matrix.max(axis=0), 1.0)
        least = np.array([1.0, 0.0, 0.0]) * scale
        most = np.array([np.inf, np.inf, np.inf if phase == "optimizer" else call]) * scale
        values = lsq_linear(matrix / scale, np.ones(len(rows)), (least, most)).x / scale
        call = float(values[2]) if phase == "decode" else call
        used = [float(v) if column.any() else 0.0 for v, column in zip(values, matrix.T)]
        fitted[phase] = dict(zip(("floor", "traffic", "call"), used))
        fitted[phase]["predicted_over_measured"] = [round(float(row @ values), 2) for row in matrix]
    return fitted


def named(result: dict[str, Any]) -> str:
    """Return the model's name, with its size if that does not say it."""
    name, size = str(result["model"]), f"{result['parameters'] / 1e6:.2f}M"
    return name if name[0].isdigit() else f"{name} ({size})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="default: benchmarking/results/roofline-calibration-DEVICE.json")
    parser.add_argument("--child", choices=LOADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    if arguments.child:
        print(json.dumps(child(arguments.child, device, rounds, arguments.agents)))
        return
    out = arguments.out or ROOT / "benchmarking" / "results" / f"roofline-calibration-{device}.json"
    document = {**surroundings(rounds), "raw": []}
    for model, agents in [*((m, None) for m in CALIBRATION), *((m, 1) for m in CALIBRATION[1::2])]:
        document["raw"].append(measured(model, device, rounds, agents))
        written(out, document)
    document["costs"] = calibrated(document["raw"])
    print(json.dumps(document["costs"], indent=1))
    written(out, document)


if __name__ == "__main__":
    main()
