"""Populations on a small random model."""

from typing import Any

import numpy as np
import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.rollouts import GenerationRequest
from agilerl.runtime import Runtime
from tests.tiny_models import PAD, VOCABULARY, random_model

RANKS = (8, 4, 8)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "clip_coef": 0.2, "temperature": 1.0, "group_size": 4, "batch_size": 8, "beta": 0.0},
    {"lr": 3e-2, "clip_coef": 0.05, "temperature": 0.7, "group_size": 3, "batch_size": 4, "beta": 0.05},
    {"lr": 1e-4, "clip_coef": 0.4, "temperature": 1.2, "group_size": 5, "batch_size": 20, "update_epochs": 2},
)


def lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def make_agents(count: int = 3, **changes: Any) -> list[GRPO]:
    """Build agents that differ in everything, on one new base."""
    runtime = Runtime.for_model(random_model(), lora_config=lora(8), seed=5)
    runtime.store.reserve(count)
    return [
        GRPO(
            pad_token_id=PAD,
            runtime=runtime,
            index=i,
            lora_config=lora(RANKS[i]),
            max_output_tokens=9,
            seed=5,
            **_settings(i, changes),
        )
        for i in range(count)
    ]


def _settings(i: int, changes: dict[str, Any]) -> dict[str, Any]:
    """CISPO's bounds are its own: ``clip_coef`` would be both of them."""
    own = {k: v for k, v in SETTINGS[i].items() if k != "clip_coef" or changes.get("loss_type") != "cispo"}
    return {**own, **changes}


def reward(tokens: list[int]) -> float:
    """Share of even tokens: something that a policy gradient can climb."""
    return float(np.mean([t % 2 == 0 for t in tokens])) if tokens else 0.0


def sample(agents: list[GRPO], prompts: int = 4) -> list[list[Trajectory]]:
    """Roll out all agents in one batch."""
    asked = []
    for agent in agents:
        for p in range(prompts):
            ids = np.random.default_rng(agent.position + p).integers(2, VOCABULARY, 4 + 2 * p).tolist()
            key = (agent.index, agent.rollouts, p)
            asked.append(GenerationRequest(agent.slot, ids, agent.group_size, agent.sampling(len(ids)), key=key))
    groups = agents[0].runtime.engine.generate(asked)
    result = []
    for number, agent in enumerate(agents):
        mine = range(number * prompts, (number + 1) * prompts)
        result.append(
            [
                Trajectory(
                    list(asked[k].prompt_ids),
                    c.token_ids,
                    [True] * len(c.token_ids),
                    c.logprobs,
                    [reward(c.token_ids)],
                    group=k - number * prompts,
                    finish_reason=c.finish_reason,
                )
                for k in mine
                for c in groups[k]
            ]
        )
        agent.rollouts += 1
        agent.position += prompts
    return result


def batch_of(agent: GRPO, prompts: int = 4) -> RolloutBatch:
    return collate(sample([agent], prompts)[0], PAD)


def weights(agent: GRPO) -> list[torch.Tensor]:
    """Everything an update changes: adapter, moments, step."""
    read = agent.runtime.store.read(agent.slot)
    flat = [t for name in sorted(read) for pair in read[name] for t in pair]
    return [*flat, agent.runtime.store.steps[agent.slot].clone()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
