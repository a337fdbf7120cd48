"""Which learning rate suits a base? One bank: GRPO agents on one base that differ only by their rate, none selected.

    python -m benchmarking.rates --model FOLDER --out benchmarking/results/rates_NAME.json [--seeds 1 2]
                                 [--rates 1e-4 2.2e-4 4.6e-4 1e-3 2.2e-3] [--iterations 12]

The task is sums and differences of two numbers of two digits, answered after the words "The answer is"; a completion
earns 1 if the only number in it is the right one. All agents see the same questions and share each batch. The file
gets a line per seed and exam: accuracy on 200 test questions, greedy. A seed that it has is not run again.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl import GRPO, Population, Runtime
from agilerl.envs.core import Task
from agilerl.streams import stream


class Sums(Task):
    """``a + b`` and ``a - b`` with two digits, endless."""

    name = "sums"
    exam_prompts, test_prompts = 0, 200

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def row(self, split: str, index: int) -> dict[str, Any]:
        draw = stream(self.seed if split == "train" else 0, f"sums {split}", index)
        low, high = sorted(int(number) for number in draw.integers(10, 100, 2))
        plus = bool(draw.integers(2))
        question = f"What is {high} {'+' if plus else '-'} {low}?"
        return {"question": question, "answer": str(high + low if plus else high - low)}

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        return [*super().messages(row), {"role": "assistant", "content": "The answer is"}]

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(set(re.findall(r"\d+", completion)) == {row["answer"]})


def bank(model: str, rates: list[float], seed: int, iterations: int) -> list[dict[str, Any]]:
    """Train one agent per rate; return the accuracies after each third of the iterations."""
    runtime = Runtime.from_pretrained(model)
    settings = {"group_size": 8, "batch_size": 128, "max_output_tokens": 6, "beta": 0.0, "seed": seed}
    agents = [GRPO(runtime=runtime, index=index, lr=rate, **settings) for index, rate in enumerate(rates)]
    population = Population(agents, Sums(seed), prompts_per_step=16, eval_max_new_tokens=6)
    lines = []
    for iteration in range(1, iterations + 1):
        population.learn(population.rollout())
        if iteration % max(1, iterations // 3) == 0:
            fitness = population.evaluate("test")
            lines.append(
                {
                    "seed": seed,
                    "iteration": iteration,
                    "accuracy": {f"{agent.lr:g}": round(fitness[agent.index].mean, 4) for agent in agents},
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2.2e-4, 4.6e-4, 1e-3, 2.2e-3])
    parser.add_argument("--iterations", type=int, default=12)
    asked = parser.parse_args()
    lines = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for seed in asked.seeds:
        if not any(line["seed"] == seed for line in lines):
            lines += bank(asked.model, asked.rates, seed, asked.iterations)
            asked.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
