"""What each arm of peers.py is made of, and the arm of TRL's GRPOTrainer; imports nothing of agilerl.

    python benchmarking/peer_arm.py JSON

The JSON is the load, with ``model``: a folder that :func:`written_model` made, and ``steps``: the most that there will
be. The process then makes one step for each line it reads, and answers with one JSON object a line.
"""

import json
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

FIRST_TOKEN = 5
"""Prompts are made of the tokens from here on."""
MARK = 4
"""The last token of every prompt, from which activated adapters act."""


def prompt_ids(index: int, length: int, vocabulary: int, common: int = 0) -> list[int]:
    """Return the tokens of a prompt, which are the same in every arm; the first ``common`` are the same in all."""
    draws = [random.Random(seed) for seed in ("common", index)]
    return [draws[i >= common].randrange(FIRST_TOKEN, vocabulary) for i in range(length - 1)] + [MARK]


def reward_of(token_ids: Sequence[int]) -> float:
    """Return a reward that differs from completion to completion, so that every row has an advantage."""
    return zlib.crc32(repr(list(token_ids)).encode()) / 2**32


def written_model(model: Any, folder: Path) -> None:
    """Write what all arms load: a model without an end token, and a tokenizer of which each word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    count = model.config.vocab_size
    words = {f"t{i}": i for i in range(count)}
    # Trainers want an end token: this one lies beyond what the model can draw, so that all lengths are the longest.
    tokenizer = Tokenizer(models.WordLevel({**words, "<end>": count}, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="<end>").save_pretrained(folder)
    model.save_pretrained(folder)


def written_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of such a folder; AutoTokenizer would take the class that goes with the model's type."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def said(token_ids: Sequence[int]) -> str:
    """Return the text that :func:`written_model`'s tokenizer turns into these tokens."""
    return " ".join(f"t{i}" for i in token_ids)


class TokenCounter:
    """Counts the tokens that go through a model, padding included, by whether a gradient is wanted."""

    def __init__(self, model: Any) -> None:
        import torch

        self.counts = {"with_gradient": 0, "without_gradient": 0}

        def count(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            kind = "with_gradient" if torch.is_grad_enabled() else "without_gradient"
            self.counts[kind] += inputs[0].numel()

        self._hook = model.get_input_embeddings().register_forward_hook(count)

    def taken(self) -> dict[str, int]:
        """Return what was counted, and end counting."""
        self._hook.remove()
        return self.counts


class Turns:
    """Steps that another process asks for: a line in, a line of JSON out. The first is counted, and warms up."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._commands, self._answers, self._start = commands, answers, 0.0
        self._counter: TokenCounter | None = None

    @classmethod
    def on_standard_streams(cls) -> "Turns":
        """Return those of a child process; whatever else it prints goes to standard error."""
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return cls(sys.stdin, answers)

    def ready(self, model: Any) -> None:
        """Say that all is loaded, and count the tokens of the first step."""
        self._counter = TokenCounter(model)
        self._answer({"loaded": memory()["VmRSS"]})

    def begin(self) -> bool:
        """Wait for the next step and start the clock; returns False if there is none."""
        asked = bool(self._commands.readline().strip())
        self._start = process_time()
        return asked

    def end(self) -> None:
        """Stop the clock and answer."""
        answer: dict[str, Any] = {"seconds": process_time() - self._start}
        if self._counter is not None:
            answer["tokens"] = self._counter.taken()
            self._counter = None
        self._answer(answer | {"peak": memory()["VmHWM"]})

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def memory() -> dict[str, int]:
    """Return the bytes of this process's resident set, now (VmRSS) and at most (VmHWM)."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def trainer_of(load: Mapping[str, Any], callbacks: Sequence[Any], out: str) -> Any:
    """Return TRL's trainer for one agent. What is not said here is its default."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig
    from trl import GRPOConfig, GRPOTrainer

    rows, vocabulary = load["prompts"] * load["group"], AutoConfig.from_pretrained(load["model"]).vocab_size
    count = load["prompts"] * load["steps"]
    prompts = [{"prompt": said(prompt_ids(i, load["prompt_tokens"], vocabulary, load["common"]))} for i in range(count)]
    settings = GRPOConfig(
        output_dir=out,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=load.get("trl_rows") or rows,
        gradient_accumulation_steps=rows // (load.get("trl_rows") or rows),
        num_generations=load["group"],
        max_completion_length=load["tokens"],
        max_steps=load["steps"],
        num_iterations=1,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )

    def reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
        return [reward_of(ids) for ids in completion_ids]

    rank = load["rank"]
    return GRPOTrainer(
        model=load["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=written_tokenizer(load["model"]),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=list(callbacks),
    )


def train_with_trl(load: Mapping[str, Any], turns: Turns) -> None:
    """Make the steps that are asked for, one after the other, with everything the trainer does between them."""
    import torch
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.ready(kwargs["model"])
            control.should_training_stop = not turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.end()
            control.should_training_stop |= not turns.begin()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        trainer_of(load, [Steps()], out).train()


if __name__ == "__main__":
    train_with_trl(json.loads(sys.argv[1]), Turns.on_standard_streams())
