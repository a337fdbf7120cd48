"""A custom task: rows from any source, and a function that scores an answer.

Here: write the larger of two digits. The rows are made in place; a file or a Hugging Face dataset works as well (see
docs/datasets.md). The reward function names the columns that it wants; everything else is taken care of.
"""

import itertools

from agilerl import GRPO, Population, Runtime
from agilerl.envs import DatasetTask


def larger(completion: str, a: int, b: int) -> float:
    return float(completion.strip() == str(max(a, b)))


def main() -> None:
    rows = [
        {"question": f"{a}{b}", "answer": str(max(a, b)), "a": a, "b": b}
        for a, b in itertools.product(range(10), repeat=2)
        if a != b
    ]
    held_out = rows[::3]  # a third of all pairs, spread evenly; training never sees them
    training = [row for row in rows if row not in held_out]
    task = DatasetTask(training, held_out, reward_fn=larger)
    runtime = Runtime.from_pretrained("embedded")
    (agent,) = GRPO.population(
        1, runtime=runtime, lr=2e-3, beta=0.0, group_size=16, batch_size=256, max_output_tokens=2
    )
    population = Population([agent], task, prompts_per_step=16)
    before = population.evaluate()[agent.index]
    for step in range(1, 25):
        metrics = population.learn(population.rollout())[agent.index]
        if step % 8 == 0:
            print(f"step {step}: reward {metrics['reward']:.2f}, entropy {metrics['entropy']:.2f}")
    after = population.evaluate()[agent.index]
    print(f"held-out pairs right: {before.mean:.0%} -> {after.mean:.0%} of {after.n}; expect 0% -> 85%")
    assert after.mean > before.mean


if __name__ == "__main__":
    main()
