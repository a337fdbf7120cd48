"""Agents that learn from data, on a small random model, and batches for them."""

from typing import Any

import numpy as np
import torch

from agilerl.algorithms import DPO, SFT
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.models.base import load_tokenizer
from agilerl.runtime import Runtime
from tests.algorithms.conftest import lora
from tests.tiny_models import PAD, VOCABULARY, qwen2, random_model

RANKS = (8, 4, 8)


def new_runtime(scale: float = 1.0) -> Runtime:
    runtime = Runtime.for_model(random_model(scale=scale), lora_config=lora(8), seed=5)
    runtime.store.reserve(4)
    return runtime


def agents_of(kind: type, settings: tuple[dict[str, Any], ...], runtime: Runtime | None = None, **changes: Any) -> list:
    """Build an agent for each of the settings, on one base."""
    runtime = new_runtime() if runtime is None else runtime
    return [
        kind(
            runtime=runtime,
            pad_token_id=PAD,
            index=i,
            seed=5,
            **{"lora_config": lora(RANKS[i]), **s, **changes},
        )
        for i, s in enumerate(settings)
    ]


def examples(count: int, seed: int = 0, pairs: bool = False, longest: int = 9) -> RolloutBatch:
    """Random prompts with random completions of 1 to ``longest`` tokens; of a pair the second one is longer."""
    draws = np.random.default_rng(seed)
    made = []
    for group in range(count):
        prompt = draws.integers(2, VOCABULARY, int(draws.integers(2, 8))).tolist()
        length = int(draws.integers(1, longest + 1))
        for extra in range(2 if pairs else 1):
            tokens = draws.integers(2, VOCABULARY, length + extra).tolist()
            mask = [True] * len(tokens)
            made.append(Trajectory(prompt, tokens, mask, [0.0] * len(tokens), [float("nan")], group=group))
    return collate(made, PAD)


def moment(agent: SFT | DPO) -> torch.Tensor:
    """Adam's first moment: after one step 0.1 of the (clipped) gradient."""
    return agent.runtime.store.exp_avg[agent.slot].clone()


def embedded_runtime(scale: float = 0.5) -> Runtime:
    """A random model that speaks the embedded tokenizer's characters."""
    tokenizer = load_tokenizer("embedded")
    config = qwen2(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Runtime.for_model(random_model(config, scale=scale), tokenizer=tokenizer, seed=1)
