"""One small runtime and what is built on it, for tests of what people get wrong."""

import json
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from agilerl import LocalTrainer, Mutations, Population, Run, TournamentSelection
from agilerl import train as train_run
from agilerl.algorithms import (
    DPO,
    GRPO,
    SFT,
)
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.data import Trajectory, collate
from agilerl.envs import (
    DatasetTask,
    ReasoningGymTask,
)
from agilerl.hpo.fitness import Fitness
from agilerl.llm_envs import (
    ReasoningGym,
    SFTGym,
    TokenObservationWrapper,
)
from agilerl.rewards import (
    exact_match,
)
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning
from tests.faults.small_populations import make_population
from tests.probes import ConstantTarget, GridNavigation
from tests.report.synthetic_run import make_run

ROWS = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(12)]
CHAT = [{"role": "user", "content": "{question}"}]


class World:
    """One small runtime with what is built on it, shared by all mistakes: none of them may change it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.population = make_population(2)
        self.runtime, self.tokenizer = self.population.runtime, self.population.tokenizer
        self.agent = self.population.agents[0]
        self.task = self.population.task

    @cached_property
    def sft(self) -> SFT:
        return SFT(runtime=self.runtime, index=7)

    @cached_property
    def dpo(self) -> DPO:
        return DPO(runtime=self.runtime, index=8)

    @cached_property
    def spare(self) -> GRPO:
        """An agent that may be changed."""
        return self.agent.clone(40)

    @cached_property
    def turns(self) -> GRPO:
        return GRPO(runtime=self.runtime, index=6, max_output_tokens=3, importance_sampling_level="turn")

    @cached_property
    def gym(self) -> ReasoningGym:
        gym = ReasoningGym.from_task(ConstantTarget(), self.tokenizer, 2)
        gym.reset()
        return gym

    @cached_property
    def sft_gym(self) -> SFTGym:
        return SFTGym(ROWS, ROWS, self.tokenizer, response_column="answer", data_batch_size_per_gpu=2)

    @cached_property
    def wrapper(self) -> TokenObservationWrapper:
        wrapper = TokenObservationWrapper(GridNavigation(), self.tokenizer, 3)
        wrapper.reset(0)
        return wrapper

    @cached_property
    def checkpoint(self) -> Path:
        self.agent.save_checkpoint(self.path / "agent")
        return self.path / "agent"

    @cached_property
    def file(self) -> Path:
        (self.path / "file").write_text("not a folder")
        return self.path / "file"

    @cached_property
    def finished(self) -> Run:
        return Run(make_run(self.path / "finished"))

    def prompt(self, *ids: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([list(ids) or [5, 6, 7]])}

    def learned(self, **changes: Any) -> tuple[Any, Any, Any]:
        """What ``learn`` takes: one group of eight completions, with one part of it replaced."""
        parts: dict[str, Any] = {
            "ids": [torch.arange(10).repeat(8, 1)],
            "masks": [torch.ones(8, 9, dtype=torch.bool)],
            "rewards": torch.arange(8.0)[None],
        }
        parts |= changes
        return parts["ids"], parts["masks"], parts["rewards"]

    def batch(self, agent: Any = None) -> Any:
        return collate([Trajectory([4, 5], [6, 7], [True, True], [0.0, 0.0], [1.0], group=k // 2) for k in range(8)], 0)

    def wrapped(self, **changes: Any) -> TokenObservationWrapper:
        given: dict[str, Any] = {"env": GridNavigation(), "tokenizer": self.tokenizer, "max_turns": 3}
        return TokenObservationWrapper(**{**given, **changes})

    def grpo(self, **arguments: Any) -> GRPO:
        return GRPO(**{"runtime": self.runtime, "index": 5, **arguments})


def ids(*shape: int, fill: float = 3, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, fill, dtype=dtype)


def beyond(w: World) -> Any:
    batch = w.batch()
    batch.ids[0, 1] = 10**6
    return batch


def long(w: World) -> Any:
    return collate([Trajectory([4] * 200, [6], [True], [0.0], [float(k)]) for k in range(8)], 0)


def people(w: World, **changes: Any) -> Population:
    return Population(w.population.agents, w.task, **changes)


def foreign(w: World) -> Any:
    return make_population(1).rollout()


def namesake(w: World) -> Any:
    """A rollout of another population whose agents have the same numbers."""
    return make_population(2).rollout()


def stranger(w: World) -> Any:
    return make_population(1).agents[0]


def mutations(**changes: Any) -> Mutations:
    return Mutations(0, 0, 0, 0, 0, 1, **changes)


def evolve(w: World, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "fitness": {0: Fitness(1.0), 1: Fitness(0.0)},
        "selection": TournamentSelection(2, True, 2),
        "mutations": mutations(),
        "generation": 0,
        "seed": 0,
    }
    return w.population.evolve(**{**given, **changes})


def trained(w: World, **changes: Any) -> Any:
    return train_run(**{"out": w.path / "new", "display": False, "max_tokens": 1, **changes})


def trainer(**changes: Any) -> LocalTrainer:
    return LocalTrainer(**{"algorithm": "GRPO", "environment": "reasoning_gym:gcd", **changes})


def questions(w: World, **changes: Any) -> Any:
    """The documented loop over questions."""
    return finetune_llm_reasoning(**{"pop": [w.agent], "env": w.gym, "max_steps": 2, "verbose": False, **changes})


def episodes(w: World, **changes: Any) -> Any:
    """The documented loop over episodes."""
    given = {"pop": [w.agent], "max_turns": 2, "env_factory": GridNavigation, "max_steps": 2, "verbose": False}
    return finetune_llm_multiturn(**{**given, **changes})


def spelling(**changes: Any) -> ReasoningGymTask:
    return ReasoningGymTask("spell_backward", **changes)


def dataset(**changes: Any) -> DatasetTask:
    return DatasetTask(ROWS, ROWS, reward_fn=exact_match, **changes)


def gym(w: World, **changes: Any) -> ReasoningGym:
    given = {"train_dataset": ROWS, "test_dataset": ROWS, "tokenizer": w.tokenizer, "reward_fn": exact_match}
    return ReasoningGym(**{**given, "conversation_template": CHAT, **changes})


def manifest(**sections: Any) -> RunConfig:
    """A manifest with these sections, as it is read for a new run; JSON is YAML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.yaml"
        path.write_text(json.dumps(sections))
        return load_manifest(path)
