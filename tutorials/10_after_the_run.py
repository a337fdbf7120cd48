"""After the run: examine the elite on harder questions, load it with PEFT, merge it. About 15 seconds on one core.

A run leaves an ordinary PEFT adapter in `elite/`, with its tokenizer and a model card. In a terminal, `agilerl eval`,
`chat`, `merge`, `export`, `push` and `compare` are about it (docs/after_the_run.md). This is what they do, in Python.
"""

import shutil

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import agilerl
from agilerl import Population, ReasoningGymTask
from agilerl.hpo.fitness import probability_better
from agilerl.models.tiny import tiny_model_path

for folder in ("runs/after", "merged"):
    shutil.rmtree(folder, ignore_errors=True)
run = agilerl.train(
    task="reasoning_gym:gcd",
    population=1,
    evolve=[],  # one agent, no search: the adapter is what matters here
    max_tokens=60_000,
    environment={"params": {"max_value": 60}, "eval_prompts": 32, "test_prompts": 200},
    algorithm={"max_output_tokens": 10, "lr": 1e-3},
    display=False,
    out="runs/after",
)

# 1. Is it better than the base, and is it still better on larger numbers than it was trained on? The same questions
#    for both, so that the comparison is paired: `agilerl eval runs/after environment.params.max_value=99`.
elite = agilerl.load("runs/after")
for largest in (60, 99):
    task = ReasoningGymTask("gcd", {"max_value": largest}, exam_prompts=2, test_prompts=200)
    population = Population([elite], task, eval_max_new_tokens=10)
    base, own = population.evaluate_base("test"), population.evaluate("test")[elite.index]
    low, high = own.interval
    print(
        f"numbers up to {largest}: {base.mean:.2f} -> {own.mean:.2f} ({low:.2f} to {high:.2f}), "
        f"better than the base with P = {probability_better(own, base):.2f}"
    )
print("expect 0.5 -> 0.7, and a gain of about the same size on larger numbers")

# 2. For every other program it is a PEFT adapter.
tokenizer = AutoTokenizer.from_pretrained(run.adapter)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_path()), run.adapter)
question = "Find the Greatest Common Divisor (GCD) of these numbers: 12, 18. Give only the GCD as your final answer."
messages = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def answer(policy: torch.nn.Module) -> str:
    ids = policy.generate(**prompt, max_new_tokens=10, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


with_peft = answer(model)
print(f"agilerl: {elite.generate(question)}, PEFT: {with_peft}")
assert with_peft == elite.generate(question)

# 3. Merged, it is a model like the base, which needs no PEFT: `agilerl merge runs/after merged`.
with torch.no_grad():
    before = model(**prompt).logits
merged = model.merge_and_unload()
with torch.no_grad():
    after = merged(**prompt).logits
merged.save_pretrained("merged")
tokenizer.save_pretrained("merged")
print(f"merged: {answer(AutoModelForCausalLM.from_pretrained('merged'))}, logits differ by", end=" ")
print(f"{(after - before).abs().max():.1e} at most; expect less than 1e-4")
assert (after - before).abs().max() < 1e-4
assert run.test["elite"].mean > run.test["base"].mean
