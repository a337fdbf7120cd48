"""Do activated adapters learn as ordinary ones do? One GRPO agent, the same seeds with both.

    python -m benchmarking.activated --out benchmarking/results/activated.json [--seeds 1 2 3 4 5 6 7 8]
                                     [--iterations 60] [--rates 1e-3 3e-3]
    python -m benchmarking.activated --model build/smollm2 --out benchmarking/results/activated_smollm2.json

On the embedded model the task is gcd of numbers up to 60; 32 prompts x 8 completions an iteration, no KL, 400 test
questions. With ``--model`` it is the task of tutorials/manifests/real/smollm2.yaml, once with prompts of 57 to 78
tokens and once with six worked examples before each question (about 300 in all): 1,024 completions, products in
bfloat16, 200 test questions, and the default rate. A line per task, rate and seed has the accuracy, greedy, the CPU
seconds of one thread (of the whole command with ``--model``), and how many tokens were trained on. What the file has
is not run again.
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
from benchmarking.real import ROOT, run

TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"max_value": 60},
}
EXAMPLES = "\n\n".join(
    f"{question} The answer is {answer}."
    for question, answer in (
        ("Alice has 3 sisters and she also has 2 brothers. How many sisters does David's brother have?", 4),
        (
            "Mary has 2 male friends and she also has 4 female friends. They all are friends with each other and have "
            "no other friends aside. How many female friends does John, a male friend of Mary, have?",
            5,
        ),
        ("Karen has 6 brothers and she also has 1 sisters. How many sisters does Peter's brother have?", 2),
        (
            "Laura has 5 male friends and she also has 6 female friends. They all are friends with each other and have "
            "no other friends aside. How many female friends does Mark, a male friend of Laura, have?",
            7,
        ),
        ("Sarah has 4 sisters and she also has 5 brothers. How many sisters does Paul's brother have?", 5),
        (
            "Emma has 3 male friends and she also has 1 female friends. They all are friends with each other and have "
            "no other friends aside. How many female friends does Thomas, a male friend of Emma, have?",
            2,
        ),
    )
)
PREFILL = {"role": "assistant", "content": "The answer is"}
SETTINGS: dict[str, tuple[str, ...]] = {
    "aiw": (),
    "aiw with examples": (
        "environment.conversation_template="
        + json.dumps([{"role": "user", "content": EXAMPLES + "\n\n{question}"}, PREFILL]),
    ),
}
"""Of each task of a real model, its settings beside those of the manifest."""
BUDGET = ("training.pop_size=1", "training.max_steps=1024", "training.dtype=bfloat16")
ARMS = {"ordinary": (), "activated": ("network.lora_config.alora_invocation_tokens=generation_prompt",)}


def learned_by_command(model: str, task: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run ``agilerl train`` with both kinds of adapters; return the line."""
    line: dict[str, Any] = {"task": task, "rate": None, "seed": seed}
    for arm, settings in ARMS.items():
        runs = folder / f"{task.replace(' ', '_')}-{seed}-{arm}"
        row = run("aiw", seed, model, runs, (*BUDGET, *SETTINGS[task], *settings))
        line |= {arm: row["test"]["elite"]["mean"], f"{arm}_seconds": row["cpu_seconds"]}
        line |= {f"{arm}_tokens": row["tokens"]["trained"], "base": row["test"]["base"]["mean"]}
        line["rate"] = row["hyperparameters"]["lr"]
    return line


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
    parser.add_argument("--model", help="the folder of a real model, in place of the embedded one")
    parser.add_argument("--iterations", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = json.loads(given.out.read_text()) if given.out.exists() else []
    cases = [(task, None) for task in SETTINGS] if given.model else list(product(TASKS, given.rates))
    for seed, (task, rate) in product(given.seeds, cases):
        if any(line["task"] == task and rate in (None, line["rate"]) and line["seed"] == seed for line in lines):
            continue
        if given.model:
            line = learned_by_command(given.model, task, seed, ROOT / "build" / "activated")
        else:
            line = {"task": task, "rate": rate, "seed": seed}
            for arm in ARMS:
                accuracy, seconds = learned(task, rate, seed, given.iterations, activated=arm == "activated")
                line |= {arm: accuracy, f"{arm}_seconds": round(seconds, 1)}
        lines.append(line)
        given.out.write_text(json.dumps(lines, indent=1) + "\n")
    print("| task | rate | seeds | ordinary | activated | difference, 95 % | CPU s, ordinary / activated |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for task, rate in sorted({(line["task"], line["rate"]) for line in lines}):
        rows = [line for line in lines if (line["task"], line["rate"]) == (task, rate)]
        means = [fmean(line[arm] for line in rows) for arm in ARMS]
        differences = [line["activated"] - line["ordinary"] for line in rows]
        # Student's t at 95 %, two-sided, of 7 degrees of freedom
        half = 2.36 * stdev(differences) / len(rows) ** 0.5 if len(rows) > 1 else float("nan")
        seconds = fmean(line["ordinary_seconds"] / line["activated_seconds"] for line in rows)
        difference = f"{fmean(differences):+.3f} ± {half:.3f}"
        print(f"| {task} | {rate:g} | {len(rows)} | {means[0]:.3f} | {means[1]:.3f} | {difference} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
