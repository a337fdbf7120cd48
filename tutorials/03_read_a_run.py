"""Reading a run: who lived, who left and why; its curves; its schedule, used again. About 20 seconds on one core.

Everything that a run knows is in its directory, as plain files, while it trains and afterwards. `agilerl.Run` opens any
of them; the same is on the command line as `agilerl report`, `agilerl schedule` and `agilerl train --replay`.
"""

import json
import shutil
from pathlib import Path

import agilerl

for folder in ("runs/read", "runs/replayed"):
    shutil.rmtree(folder, ignore_errors=True)
settings = {
    "task": "reasoning_gym:gcd",
    "environment": {"params": {"max_value": 60}, "eval_prompts": 64, "test_prompts": 100},
    "algorithm": {"max_output_tokens": 10, "lr": 1e-3},
    "display": False,
}
agilerl.train(population=4, evolve=["lr"], max_tokens=80_000, out="runs/read", **settings)
run = agilerl.Run("runs/read")  # as another process would open it
print(run)

# The lineage: a line for each birth, exam, decision and death, with its numbers.
for line in run.lineage:
    if line["event"] == "birth":
        born = f"from {line['parent']}" if line["parent"] is not None else "at the start"
        print(f"agent {line['agent']} born {born}: lr {line['hyperparameters']['lr']:.2g}")
    elif line["event"] == "death":
        print(f"agent {line['agent']} {line['reason']}")

# The metrics: a line for each agent and iteration. `pandas.DataFrame(run.metrics)` makes a table of them.
elite = run.summary["elite"]["index"]
rewards = [line["reward"] for line in run.metrics if line["kind"] == "train" and line["agent"] == elite]
print(f"reward of agent {elite}: first iterations {sum(rewards[:3]) / 3:.2f}, last {sum(rewards[-3:]) / 3:.2f}")

# Completions are Parquet files, checkpoints folders; `elite/` is the adapter.
print("files:", ", ".join(sorted(path.name for path in Path("runs/read").iterdir() if not path.name.startswith("."))))

# The report is one HTML file that needs no network: family tree, curves, completions, what may have gone wrong.
print("report:", run.report())

# The schedule is what the search found: the learning rate of the elite and its ancestors, against tokens.
schedule = run.schedule()
print("schedule:", json.dumps(schedule["genes"]))

# Another run of one agent can follow it, without the search. That is what a search is for when a larger run follows.
replay = {"genes": schedule["genes"], "algorithm": "GRPO"}
again = agilerl.train(
    max_tokens=80_000,
    training={"replay": replay},
    selection_strategy={"name": "none"},
    population=1,
    seed=1,
    out="runs/replayed",
    **settings,
)
searched, replayed = run.test["elite"], again.test["elite"]
print(f"on the test: base {run.test['base'].mean:.2f}, searched {searched.mean:.2f}, replayed {replayed.mean:.2f}")
print("expect 0.5 for the base, and 0.65 to 0.75 for both others: with 100 questions a standard error is 0.05")
assert min(searched.mean, replayed.mean) > run.test["base"].mean
