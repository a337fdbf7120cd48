"""Populations on a tiny random model, and what is compared of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agilerl.algorithms import GRPO
from agilerl.envs.core import Row, Split, Task
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.models.base import load_tokenizer
from agilerl.population import Population
from agilerl.runtime import Runtime
from tests.tiny_models import qwen2, random_model

PROMPTS, GROUP = 4, 8
"""Of one training batch of an agent."""


class Parity(Task):
    """Half of all tokens are right; ``fault`` may say something else of the completions of one agent."""

    name, exam_prompts, test_prompts = "parity", 12, 12

    def __init__(self) -> None:
        self.fault: Callable[[], float] | None = None
        self.faulty = range(0)
        """Places in a batch that ``fault`` is asked about; those of an agent stand side by side."""

    def row(self, split: Split, index: int) -> Row:
        return {"question": f"{split} {index}", "answer": ""}

    def grade(self, completions: Any, rows: Any) -> Any:
        self._place = 0
        return super().grade(completions, rows)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        place, self._place = self._place, self._place + 1
        if self.fault is not None and place in self.faulty:
            return self.fault()
        return float(sum(row["completion_ids"]) % 2)


def make_population(size: int = 3, kind: Any = GRPO, task: Task | None = None, **settings: Any) -> Population:
    tokenizer = load_tokenizer("embedded")
    config = qwen2(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    runtime = Runtime.for_model(random_model(config, scale=0.5), tokenizer=tokenizer, seed=1)
    defaults: dict[str, Any] = {"group_size": GROUP, "batch_size": 64, "beta": 0.0, "max_output_tokens": 3, "seed": 1}
    rate = "lr" if "lr" in kind.Config.model_fields else "lr_actor"
    genes = HyperparameterConfig(**{rate: RLParameter(1e-5, 1e-1)})
    agents = kind.population(size, runtime=runtime, hp_config=genes, **{**defaults, rate: 1e-2, **settings})
    return Population(agents, task or Parity(), prompts_per_step=PROMPTS, eval_max_new_tokens=3)


@dataclass(frozen=True)
class Seen:
    """What an agent did and became."""

    samples: list[list[int]]
    metrics: list[dict[str, float]]
    weights: list[Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Seen)
        same = (self.samples, self.metrics) == (other.samples, other.metrics)
        return same and all(map(torch.equal, self.weights, other.weights))


def iterate(population: Population, times: int) -> dict[int, Seen]:
    """Let everybody sample and learn a few times."""
    seen: dict[int, Seen] = {agent.index: Seen([], [], []) for agent in population.agents}
    for _ in range(times):
        rollout = population.rollout()
        learned = population.learn(rollout)
        for index, own in seen.items():
            own.samples.extend(t.token_ids for t in rollout.trajectories[index])
            own.metrics.append(learned[index])
    for agent in population.agents:
        seen[agent.index].weights.extend(weights(agent))
    return seen


def weights(agent: Any) -> list[Tensor]:
    """Return copies of an agent's adapter and moments."""
    state = agent.state()
    return [t for part in (state.adapter, *state.moments.values()) for pair in part for t in pair]
