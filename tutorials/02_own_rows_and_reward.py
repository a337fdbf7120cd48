"""Your own rows and reward. About 15 seconds on one core.

A run needs questions and a way to grade answers. Rows are dicts, from a list, a file, a DataFrame or the Hugging Face
hub; a reward is a function that names the columns it wants. The run keeps rows for the exam and for the test, which
training never sees, and says which rows it left out and why.
"""

import itertools
import shutil

import agilerl

# 1. Rows. Only `question` has a meaning; `answer` is a column that rewards usually want, and `vowels` one of our own.
syllables = ["ba", "ko", "mi", "nu", "re", "so", "ta", "vi", "lo", "pe"]
words = ["".join(pair) for pair in itertools.permutations(syllables, 3)]
rows = [
    {
        "question": f"Spell this word backward (example: sun -> nus): {word}",
        "answer": word[::-1],
        "vowels": [letter for letter in word[::-1] if letter in "aeiou"],
    }
    for word in words
]


# 2. Rewards. Several are added. Exact answers are rare at the start, so letters in the right place help.
def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def letters(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion.strip(), answer)) / len(answer)


def kept_vowels(completion: str, vowels: list[str]) -> float:
    return 0.1 * ([letter for letter in completion if letter in "aeiou"] == vowels)


# 3. A run. The exam, which decides who stays, and the test measure one of the rewards: what is wanted in the end.
shutil.rmtree("runs/rows", ignore_errors=True)
run = agilerl.train(
    dataset=rows,
    reward=[exact, letters, kept_vowels],
    population=2,
    evolve=["lr"],
    max_tokens=40_000,
    environment={"fitness_grader": "exact", "eval_prompts": 60, "test_prompts": 100},
    algorithm={"max_output_tokens": 8},
    out="runs/rows",
)

# Each reward is a separate metric; agents are compared by them, not by their sum.
learned = [line for line in run.metrics if line["kind"] == "train"]
first, last = learned[0], learned[-1]
for name in ("exact", "letters", "kept_vowels"):
    key = f"rewards/{name}/mean"
    print(f"{name:12} {first[key]:.2f} -> {last[key]:.2f}")
base, elite = run.test["base"], run.test["elite"]
print(f"spelt right on the test: {base.mean:.2f} -> {elite.mean:.2f} of {elite.n} words; expect 0.3 -> 1.0")
assert elite.mean > base.mean
