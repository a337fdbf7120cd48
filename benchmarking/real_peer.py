"""TRL's GRPOTrainer on the first row of real.py: the same prompts, reward, completions and test questions.

    make peers ARGS=--help                                            # makes .venv-trl
    python -m benchmarking.real_peer --out benchmarking/results/real_trl.json [--model build/smollm2] [--seed 42]
                                     [--trl-python .venv-trl/bin/python] [--runs FOLDER]

The arms, each with 2,048 completions of at most 6 tokens in all:

* ``trl, its defaults``: full fine-tuning at 1e-6, 8 completions of one prompt a step. Only the limit of completions is
  not the default, which is 256: this model would talk that long.
* ``trl, our settings``: LoRA as in the manifest, 16 prompts x 8 completions a step, and the rate of our first founder.
* ``ours, one agent``: the manifest with ``training.pop_size=1``.
* ``ours, the search``: the manifest, four agents that share the completions.

The clock is CPU time in one thread: TRL's of ``train()`` alone, ours of the whole command, exams and tests included.
The test is greedy: 200 questions, 1 for a right last number.
"""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from time import process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPLETIONS, TOKENS = 2048, 6
ARMS: dict[str, dict[str, Any]] = {
    "trl, its defaults": {},
    "trl, our settings": {
        "learning_rate": 5e-4,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
    },
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def right(completion: str, answer: str) -> float:
    """Return 1 if the last number of a completion is the answer."""
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and numbers[-1] == answer)


def questions(model: str, seed: int) -> dict[str, list[dict[str, str]]]:
    """Return prompts, as a run of ours renders them, and answers, for training and for the test."""
    from transformers import AutoTokenizer

    from agilerl.config.manifest import load_manifest
    from agilerl.envs.core import Task
    from agilerl.envs.prompts import render_prompt
    from agilerl.training.tasks import task
    from benchmarking.real import MANIFEST, arguments

    tokenizer = AutoTokenizer.from_pretrained(model)
    made = task(load_manifest(MANIFEST, [a for a in arguments("aiw", seed, model) if "=" in a]))
    assert isinstance(made, Task)
    found = {}
    for split, count in (("train", COMPLETIONS // 8), ("test", 200)):
        rows = [made.row(split, index) for index in range(count)]  # type: ignore[arg-type]
        texts = [tokenizer.decode(render_prompt(tokenizer, made.messages(row))) for row in rows]
        found[split] = [{"prompt": text, "answer": str(row["answer"])} for text, row in zip(texts, rows)]
    return found


def train_with_trl(load: dict[str, Any]) -> dict[str, Any]:
    """Train and test; what is not said here is TRL's default."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    settings = load["settings"]

    def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [right(*pair) for pair in zip(completions, answer)]

    step = settings.get("per_device_train_batch_size", 8) * settings.get("gradient_accumulation_steps", 1)
    config = GRPOConfig(
        output_dir=load["out"],
        max_completion_length=TOKENS,
        max_steps=COMPLETIONS // step,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=load["seed"],
        **settings,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if settings else None
    rows = Dataset.from_list(load["train"])
    trainer = GRPOTrainer(load["model"], reward, args=config, train_dataset=rows, peft_config=lora)
    before = score(trainer, load["test"])
    start = process_time()
    trainer.train()
    seconds = process_time() - start
    return {"base": before, "trained": score(trainer, load["test"]), "cpu_seconds": round(seconds)}


def score(trainer: Any, rows: list[dict[str, str]]) -> float:
    """Return the share of right greedy answers."""
    import torch

    model, tokenizer = trainer.model.eval(), trainer.processing_class
    total = 0.0
    for start in range(0, len(rows), 20):
        part = rows[start : start + 20]
        given = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():
            ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[:, given["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        total += sum(right(text, row["answer"]) for text, row in zip(texts, part))
    return total / len(rows)


def table(document: dict[str, Any]) -> str:
    """Return a line for each arm."""
    lines = ["| arm | base | trained | CPU min |", "| --- | ---: | ---: | ---: |"]
    for name, arm in document["arms"].items():
        lines.append(f"| {name} | {arm['base']:.3f} | {arm['trained']:.3f} | {arm['cpu_seconds'] / 60:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the arms that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="build/smollm2")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "real")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        print(json.dumps(train_with_trl(json.loads(given.load.read_text()))))
        return
    from benchmarking.real import run

    document = json.loads(given.out.read_text()) if given.out.exists() else {"seed": given.seed, "arms": {}}
    given.runs.mkdir(parents=True, exist_ok=True)
    for name in (*ARMS, "ours, one agent", "ours, the search"):
        if name in document["arms"]:
            continue
        if name in ARMS:
            load = given.runs / "load.json"
            common = {"model": given.model, "seed": given.seed, "out": str(given.runs / "trl"), "settings": ARMS[name]}
            load.write_text(json.dumps(questions(given.model, given.seed) | common))
            command = [given.trl_python, str(Path(__file__).resolve()), "--out", str(given.out), "--load", str(load)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            document["arms"][name] = json.loads(done.stdout.splitlines()[-1])
        else:
            more = ["training.pop_size=1"] if name == "ours, one agent" else []
            row = run("aiw", given.seed, given.model, given.runs / name.replace(", ", "-").replace(" ", "_"), more)
            base, elite = (row["test"][who]["mean"] for who in ("base", "elite"))
            document["arms"][name] = {"base": base, "trained": elite, "cpu_seconds": row["cpu_seconds"]}
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        print(name, document["arms"][name], flush=True)


if __name__ == "__main__":
    main()
