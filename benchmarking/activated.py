"""Do activated adapters learn as ordinary ones do? One GRPO agent on the embedded model, the same seeds with both.

    python -m benchmarking.activated --out benchmarking/results/activated.json [--seeds 1 2 3 4 5 6 7 8]
                                     [--iterations 60] [--rates 1e-3 3e-3]

The task is gcd of numbers up to 60; 32 prompts x 8 completions an iteration, no KL. A
line per task, rate and seed has the accuracy on 400 test questions, greedy, and CPU seconds of one thread. What the
file has is not run again.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from time import process_time
from typing import Any

import torch
from peft import LoraConfig

from agilerl import GRPO, Population, ReasoningGymTask, Runtime
from agilerl.envs.prompts import generation_prompt

TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"max_value": 60},
}


def learned(task: str, rate: float, seed: int, iterations: int, *, activated: bool) -> tuple[float, float]:
    """Train one agent; return its accuracy and the CPU seconds."""
    tokens = generation_prompt(Runtime.from_pretrained("embedded").tokenizer) if activated else None
    shape = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    lora = LoraConfig(**shape, alora_invocation_tokens=tokens)
    runtime = Runtime.from_pretrained("embedded", lora_config=lora, seed=seed)
    agent = GRPO(runtime=runtime, lr=rate, beta=0.0, group_size=8, batch_size=256, max_output_tokens=10, seed=seed)
    made = ReasoningGymTask(task, TASKS[task], seed=seed)
    population = Population([agent], made, prompts_per_step=32, eval_max_new_tokens=10)
    start = process_time()
    for _ in range(iterations):
        population.learn(population.rollout())
    seconds = process_time() - start
    return population.evaluate("test")[0].mean, seconds


def main() -> None:
    """Run what the file does not have yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--iterations", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = json.loads(given.out.read_text()) if given.out.exists() else []
    for seed, task, rate in product(given.seeds, TASKS, given.rates):
        if any((line["task"], line["rate"], line["seed"]) == (task, rate, seed) for line in lines):
            continue
        line: dict[str, Any] = {"task": task, "rate": rate, "seed": seed}
        for arm in ("ordinary", "activated"):
            accuracy, seconds = learned(task, rate, seed, given.iterations, activated=arm == "activated")
            line |= {arm: accuracy, f"{arm}_seconds": round(seconds, 1)}
        lines.append(line)
        given.out.write_text(json.dumps(lines, indent=1) + "\n")
    print(
        "| task | rate | seeds | ordinary | activated | difference, 95 % |\n| --- | --- | ---: | ---: | ---: | ---: |"
    )
    for task, rate in product(TASKS, given.rates):
        own = [line for line in lines if (line["task"], line["rate"]) == (task, rate)]
        means = [fmean(line[arm] for line in own) for arm in ("ordinary", "activated")]
        apart = [line["activated"] - line["ordinary"] for line in own]
        half = 2.36 * stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")  # t of 7 degrees of freedom
        told = f"{fmean(apart):+.3f} ± {half:.3f}"
        print(f"| {task} | {rate:g} | {len(own)} | {means[0]:.3f} | {means[1]:.3f} | {told} |")


if __name__ == "__main__":
    main()
