"""Measure the memory of a run against the estimate that `agilerl train` makes of it before it starts.

    python benchmarking/memory_estimate.py [--device cpu] [--model 30M] [--arms NAME ...] [--out FILE]

Each arm is a child process: it makes the embedded run small once (so that libraries are loaded and warm), takes the
memory it then has as zero, sets up a run on a random base model, and does one iteration: rollout, update. The measure
is the peak since zero: of the resident set on a CPU, of torch.cuda.max_memory_allocated on a GPU. The error is
estimate / measured - 1. The arms ``agents-N`` tell the memory of a further agent, to be compared with 16 D bytes (D:
numbers of an adapter; parameters, gradients and two moments in fp32; the adapters are fp32 under a bf16 base as well).

Blocks go back to the system at once (MALLOC_MMAP_THRESHOLD_), else the resident set would hold what earlier
phases have freed.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES: dict[str, dict[str, int]] = {
    "5M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
    "30M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VOCABULARIES = {"0.5B": 151_936, "1.5B": 151_936}
ARMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "checkpointing": ("algorithm.gradient_checkpointing=true",),
    "bf16": ("training.dtype=bfloat16",),
    "bf16 checkpointing": ("training.dtype=bfloat16", "algorithm.gradient_checkpointing=true"),
    "nf4": ("network.quantization=nf4",),
    "int8": ("network.quantization=int8",),
    "packing": ("algorithm.use_sequence_packing=true",),
    "more tokens": ("training.max_tokens_in_flight=8192",),
    **{f"agents-{n}": (f"training.pop_size={n}", "network.lora_config.r=64") for n in (1, 2, 4, 8)},
    **{
        f"bf16 agents-{n}": (f"training.pop_size={n}", "network.lora_config.r=64", "training.dtype=bfloat16")
        for n in (1, 4)
    },
}
COMMON = (
    "training.pop_size=2",
    "environment.data_batch_size_per_gpu=8",
    "environment.eval_prompts=16",
    "environment.test_prompts=16",
    "algorithm.batch_size=64",
    "algorithm.micro_batch_size_per_gpu=64",
    "algorithm.max_output_tokens=60",
    "network.lora_config.r=16",
    "mutation.rl_hp_selection={}",
    "selection_strategy.name=none",
    "algorithm.beta=0.01",  # else rows of equal rewards, all those of a random model, would not be computed
)


def build_model(size: str, folder: Path) -> None:
    """Write a random Qwen2 with the embedded model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from agilerl.models.base import load_tokenizer

    tokenizer = load_tokenizer("embedded")
    vocabulary = max(VOCABULARIES.get(size, 4096), len(tokenizer))
    config = Qwen2Config(
        **SIZES[size],
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def resident() -> int:
    """Return the bytes of this process that lie in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def iterate(overrides: list[str]) -> tuple[Any, Any]:
    """Set up a run, and do its first rollout and update; returns the session and the estimate."""
    from agilerl.config.manifest import load_manifest
    from agilerl.training.memory import estimate
    from agilerl.training.setup import build

    session = build(load_manifest(None, overrides))
    population = session.population
    population.learn(population.rollout())
    return session, estimate(session.config, population)


def child(folder: str, device: str, overrides: list[str]) -> dict[str, Any]:
    """Measure one arm in this process."""
    import torch

    from agilerl.planning.footprint import peak as most

    where = f"training.device={device}"
    iterate([*COMMON, "environment.data_batch_size_per_gpu=2", "algorithm.group_size=2", where])
    gc.collect()
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        zero = torch.cuda.memory_allocated()
    else:
        forget_peak()
        zero = resident()
    session, parts = iterate([*COMMON, f"network.pretrained_model_name_or_path={folder}", where, *overrides])
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident_peak()
    gc.collect()
    lasting = torch.cuda.memory_allocated() if on_gpu else resident()
    if on_gpu:
        parts.pop("rollouts")
    store = session.population.runtime.store
    return {
        "measured_peak": peak - zero,
        "measured_lasting": lasting - zero,
        "estimate": most(parts),
        "parts": parts,
        "agents": len(session.population),
        "slots": store.capacity,
        "adapter_numbers": store.size,
        "base_parameters": session.population.runtime.base.parameters,
    }


def run(arm: str, folder: Path, device: str) -> dict[str, Any]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    command = [sys.executable, __file__, "--child", str(folder), "--device", device, "--overrides", *ARMS[arm]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"arm": arm, "failed": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"arm": arm, **found, "error": found["estimate"] / found["measured_peak"] - 1}


def slopes(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the memory of a further agent, by the peak and by what lasts, against 16 D bytes."""
    found = []
    for prefix in ("agents-", "bf16 agents-"):
        arms = [r for r in results if r["arm"].startswith(prefix) and "failed" not in r]
        if len(arms) < 2:
            continue
        first, last = arms[0], arms[-1]
        target = 16 * last["adapter_numbers"]
        steps = last["agents"] - first["agents"]
        row = {"arms": prefix, "agents": [r["agents"] for r in arms], "bytes_16_D": target}
        for name in ("measured_peak", "measured_lasting"):
            row[name.replace("measured", "ratio")] = (last[name] - first[name]) / steps / target
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="30M", choices=SIZES)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.device, given.overrides)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build_model(given.model, Path(folder))
        results = []
        print(f"{'arm':20} {'estimate':>10} {'measured':>10} {'error':>7}   MiB above the libraries", file=sys.stderr)
        for arm in given.arms:
            results.append(run(arm, Path(folder), given.device))
            print(line(results[-1]), file=sys.stderr)
            document = report(given.model, given.device, results)
            if given.out is not None:  # after each arm, so that an interruption leaves whole ones
                given.out.write_text(document + "\n")
    for row in slopes(results):
        print(
            f"a further agent ({row['arms']}N): {row['ratio_lasting']:.2f} x 16 D bytes lasting, "
            f"{row['ratio_peak']:.2f} x at the peak",
            file=sys.stderr,
        )
    print(document)


def report(model: str, device: str, results: list[dict[str, Any]]) -> str:
    found = {"model": model, "device": device, "machine": platform.platform(), "arms": results}
    return json.dumps({**found, "memory_of_a_further_agent": slopes(results)}, indent=1)


def line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['arm']:20} failed: {result['failed']}"
    mib = [result[name] / 2**20 for name in ("estimate", "measured_peak")]
    return f"{result['arm']:20} {mib[0]:10,.0f} {mib[1]:10,.0f} {result['error']:+7.0%}"


if __name__ == "__main__":
    main()
