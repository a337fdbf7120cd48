"""Train the embedded base from nothing and write its files; the same files, bit for bit, every time."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agilerl.streams import normal, stream
from tools.embedded_model.demonstrations import TASKS, demonstrations
from tools.embedded_model.tokenizer import tiny_tokenizer
from tools.embedded_model.verify import write_checksums

IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """Every number that makes the embedded base what it is; a change here changes the shipped weights."""

    seed: int = 0
    """Seed of every draw: initial weights, mixture of tasks, the demonstrator's mistakes."""
    hidden: int = 96
    """Width of the residual stream."""
    layers: int = 3
    """Number of transformer blocks."""
    heads: int = 3
    """Attention heads; the width of one is ``hidden / heads``, 32."""
    feed_forward: int = 192
    """Width of the gated feed-forward layer."""
    positions: int = 1024
    """Longest text, in tokens."""
    steps: int = 1800
    """Optimizer steps."""
    batch: int = 128
    """Demonstrations a step."""
    chunks: int = 8
    """Parts of a batch, sorted by length so that little of each is padding."""
    learning_rate: float = 3e-3
    """Peak of the cosine schedule, which ends at zero."""
    warmup: int = 20
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    init_std: float = 0.05
    """Standard deviation of the initial matrices."""


def build(folder: Path, recipe: Recipe | None = None) -> None:
    """Train as ``recipe`` says (default: the shipped one) and write model and tokenizer into ``folder``.

    Takes some minutes on one core. Equal recipes give equal bytes on one machine and one set of package versions;
    another processor may round a product differently, and training amplifies that.
    """
    recipe = recipe or Recipe()
    threads = torch.get_num_threads()
    # The order in which threads add up partial sums would change the last bit, and then everything.
    torch.set_num_threads(1)
    try:
        write(train(recipe), folder)
    finally:
        torch.set_num_threads(threads)


def train(recipe: Recipe) -> LlamaForCausalLM:
    """Return the base, trained on the answers of the careless demonstrator with cross-entropy on answer tokens."""
    tokenizer = tiny_tokenizer()
    model = _initial_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay, foreach=True
    )
    weights = [task.weight for task in TASKS]
    shares = [weight / sum(weights) for weight in weights]
    cursors = [0] * len(TASKS)
    for step in range(recipe.steps):
        draws = stream(recipe.seed, "tiny demonstrations", step)
        rows: list[tuple[list[int], list[int]]] = []
        for index, count in enumerate(draws.multinomial(recipe.batch, shares)):
            pairs, cursors[index] = demonstrations(TASKS[index], int(count), start=cursors[index], draws=draws)
            rows += [_tokens(tokenizer, question, answer) for question, answer in pairs]
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(recipe, step)
        _update(model, optimizer, rows, recipe)
    return model.eval()


def write(model: LlamaForCausalLM, folder: Path) -> None:
    """Write ``model`` (as float16) with its configuration and tokenizer into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save_pretrained(folder)
    # The output matrix is the embedding: stored once.
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Owner-only permissions, which save_file gives, would not survive packaging unharmed.
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", {**model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]})
    generation = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    _write_json(folder / "generation_config.json", generation.to_diff_dict())
    write_checksums(folder)


def _initial_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model whose every weight comes from the recipe's own streams."""
    # Not Qwen2: for that model type transformers 5 loads Qwen's own tokenizer class, whatever the files say.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.feed_forward,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # The weights are stored in half precision, but a processor without a GPU computes in single.
        dtype="float32",
    )
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    weights: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        if len(shape) == 2:
            draws = normal(recipe.seed, "tiny initial weights", (index,), shape.numel()) * recipe.init_std
            weights[name] = torch.from_numpy(draws).to(torch.float32).view(shape)
        else:
            weights[name] = torch.full(shape, 1.0 if "norm" in name else 0.0)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights).train()


def _tokens(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], list[int]]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _learning_rate(recipe: Recipe, step: int) -> float:
    warm = min(1.0, (step + 1) / recipe.warmup)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rows: list[tuple[list[int], list[int]]], recipe: Recipe
) -> None:
    """Do one optimizer step on the mean cross-entropy over the answer tokens of ``rows``."""
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    count = sum(len(answer) for _, answer in rows)
    size = -(-len(rows) // recipe.chunks)
    optimizer.zero_grad()
    for begin in range(0, len(rows), size):
        ids, labels = _collate(rows[begin : begin + size], model.config.pad_token_id)
        targets = labels[:, 1:]
        hidden = model.model(ids).last_hidden_state[:, :-1][targets != IGNORED]
        logits = model.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits, targets[targets != IGNORED], reduction="sum") / count
        torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()


def _collate(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [B, T], padded on the right; labels are ``IGNORED`` outside the answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # The version of transformers that happened to write the file is no property of the model.
    content = {key: value for key, value in content.items() if key not in ("transformers_version", "_name_or_path")}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
