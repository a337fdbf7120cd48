"""PPO agents and batches that several test files share."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from agilerl.algorithms import PPO
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.data import MicroBatch, RolloutBatch, Trajectory, collate
from agilerl.runtime import Runtime
from tests.algorithms.conftest import lora, sample
from tests.tiny_models import PAD, VOCABULARY, random_model

SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr_actor": 1e-3, "lr_critic": 1e-2, "group_size": 4, "batch_size": 8, "beta": 0.0},
    {"lr_actor": 3e-3, "lr_critic": 1e-3, "group_size": 3, "batch_size": 5, "beta": 0.05, "update_epochs": 2},
)
RANKS = (8, 4)


def new_runtime() -> Runtime:
    return Runtime.for_model(random_model(), lora_config=lora(8), seed=5)


def make_agents(count: int = 2, runtime: Runtime | None = None, **changes: Any) -> list[PPO]:
    """PPO agents that differ in everything, their value heads away from zero."""
    runtime = runtime or new_runtime()
    runtime.store.reserve(2 * count + 1)
    common = {"pad_token_id": PAD, "max_output_tokens": 9, "seed": 5, "runtime": runtime}
    agents = [PPO(index=i, lora_config=lora(RANKS[i]), **{**common, **SETTINGS[i], **changes}) for i in range(count)]
    for agent in agents:
        noise = torch.from_numpy(np.random.default_rng(agent.index).normal(0, 0.02, runtime.store.heads.shape[1]))
        runtime.store.heads[agent.critic_slot] = noise.float()
    return agents


def batch_of(agent: Any, prompts: int = 3) -> RolloutBatch:
    return collate(sample([agent], prompts)[0], PAD)


def turn_batch(agent: PPO, rows: int = 6, turns: int = 3) -> RolloutBatch:
    """Episodes of 1 to ``turns`` turns of 1 to 3 tokens, environment tokens between them, a reward a turn."""
    rng, found = np.random.default_rng(rows), []
    for row in range(rows):
        t = Trajectory([5, 9, 3], [], [], [], [], group=row)
        for turn in range(1 + row % turns):
            for length, number in ((int(rng.integers(1, 4)), turn), (2, -1)):
                t.token_ids += rng.integers(2, VOCABULARY, length).tolist()
                t.turn_ids += [number] * length
            t.rewards.append(float(rng.normal()))
        t.action_mask, t.logprobs = [k >= 0 for k in t.turn_ids], [0.0] * len(t.turn_ids)
        found.append(t)
    batch = collate(found, PAD)
    return replace(
        batch, sampling_logps=fixed_logprobs(agent.runtime, agent.slot, batch, agent.temperature, MicroBatch(rows))
    )


def bits(agent: Any) -> list[torch.Tensor]:
    """Everything an update changes, in every slot of the agent."""
    store = agent.runtime.store
    slots = [s for s in (agent.slot, agent.critic_slot) if s is not None]
    return [bank[s].clone() for s in slots for bank in (store.theta, store.exp_avg, store.exp_avg_sq, store.steps)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b))
