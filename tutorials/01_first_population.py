"""A first population: four agents, one base, and the best of them in the end. About 15 seconds on one core.

Four LoRA agents learn to find greatest common divisors, from nothing but the score of their answers. They share one
frozen base (the tiny model of the package, nothing is downloaded) and every batch. They differ in their learning rate:
the first has the rate that is known for this base, the others are spread around it. After every exam the worse half
leaves, and what it would have spent goes to those that stay.
"""

import shutil

import agilerl

shutil.rmtree("runs/first", ignore_errors=True)  # a run is never overwritten

# The plan comes first: what is trained, on what, for how long. Then a table, an agent a row, during the run.
run = agilerl.train(
    task="reasoning_gym:gcd",
    population=4,
    evolve=["lr"],
    max_tokens=80_000,  # of all agents together: sampled, trained on, and in exams
    environment={"params": {"max_value": 60}, "eval_prompts": 100, "test_prompts": 200},
    algorithm={"max_output_tokens": 10},
    out="runs/first",
)

# The test has questions that neither training nor selection used. That is the number to quote.
base, elite = run.test["base"], run.test["elite"]
print(f"\nright on the test: {base.mean:.2f} -> {elite.mean:.2f}, standard error {elite.stderr:.2f}; expect 0.5 -> 0.7")
assert elite.mean > base.mean

# The elite is an agent, and an ordinary PEFT adapter in runs/first/elite.
question = "Find the Greatest Common Divisor (GCD) of these numbers: 12, 18. Give only the GCD as your final answer."
print("gcd of 12 and 18:", run.elite.generate(question))
