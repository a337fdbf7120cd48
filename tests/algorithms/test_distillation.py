"""Distillation: what a teacher adds to an agent's advantages, and that agents come near it."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.distillation import Teacher, load_teacher, with_teacher
from agilerl.algorithms.update import learn_together
from agilerl.envs.datasets import DatasetTask
from agilerl.errors import CheckpointError, ConfigError
from agilerl.functional import (
    distillation_advantages,
)
from agilerl.population import Population
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, weights
from tests.algorithms.data_agents import embedded_runtime
from tests.tiny_models import PAD, random_model

TOKENS = 5


def distribution(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_expected_gradient_of_distillation_is_that_of_the_kl() -> None:
    logits = distribution(0).requires_grad_()
    teacher = distribution(1).log_softmax(0)
    logp = logits.log_softmax(0)
    found = []
    for token in range(TOKENS):  # beside another row, which may be anything
        rows, mask = torch.tensor([[token, 0], [3, 1]]), torch.tensor([[True, False], [True, True]])
        both = distillation_advantages(logp[rows], teacher[rows], mask, 0.3)
        assert not both.requires_grad
        assert both[0, 1] == 0
        found.append(both[0, 0])
    advantages = torch.stack(found)
    (policy,) = torch.autograd.grad((logp.exp().detach() * advantages * logp).sum(), logits, retain_graph=True)
    (kl,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)
    assert torch.allclose(policy, -0.3 * kl, atol=1e-15)
    alone = distillation_advantages(logp[:1, None], teacher[:1, None], torch.ones(1, 1, dtype=torch.bool), 1.0)
    assert torch.allclose(alone[0, 0], teacher[0] - logp[0])


# -- on agents --------------------------------------------------------------------------------------------------------


def pair(**changes: Any) -> list[GRPO]:
    settings = {"temperature": 1.0, "group_size": 4, "batch_size": 64, "beta": 0.0, "lr": 1e-3, "update_epochs": 1}
    return make_agents(3, **{**settings, **changes})


@pytest.mark.model
def test_a_student_comes_near_its_teacher() -> None:
    agents = pair(lr=1e-2, group_size=16)
    teacher, student = agents[:2]
    store = teacher.runtime.store
    g = torch.Generator().manual_seed(1)
    factors = [(a, 0.3 * torch.randn(b.shape, generator=g)) for a, b in store.adapter(teacher.slot)]
    store.load_adapter(teacher.slot, factors)
    fixed, gaps = weights(teacher), []
    for _ in range(25):
        student.position = 0  # the same prompts again
        batch = batch_of(student, prompts=2)
        batch.rewards[:] = 0.0  # there is nothing else to learn from
        tokens = student.tokens["trained"]
        metrics = learn_together([student], [batch], teacher=Teacher(teacher.slot, 1.0))[0]
        gaps.append(metrics["teacher/kl"])
        assert student.tokens["trained"] - tokens == 2 * int(batch.lengths.sum())  # the teacher's forward counts
    assert np.mean(gaps[-5:]) < 0.75 * np.mean(gaps[:5])
    assert equal(weights(teacher), fixed)


@pytest.mark.model
def test_idle_rows_are_taught_too() -> None:
    agents = pair()
    batch = batch_of(agents[0])
    batch.rewards[:] = 1.0
    plain = agents[0].prepare(batch)
    assert plain.idle is not None
    assert plain.idle.all()
    store = agents[1].runtime.store
    store.load_adapter(agents[1].slot, [(a, b + 0.1) for a, b in store.adapter(agents[1].slot)])
    taught = with_teacher(agents[0], plain, agents[1].slot, 0.5)
    assert taught.idle is not None
    assert not taught.idle.any()


@pytest.mark.model
@pytest.mark.parametrize("folder", ["agent", pytest.param("agent/actor", marks=pytest.mark.nightly)])
def test_a_saved_adapter_teaches_every_agent_of_a_population(tmp_path: Path, folder: str) -> None:
    """Its slot holds the policy that was saved; students come near it, alone as in company."""

    def population(places: tuple[int, ...] = (0, 1)) -> Population:
        runtime = embedded_runtime()
        agents = [
            GRPO(runtime=runtime, index=i, seed=5, lr=1e-2, beta=0.0, group_size=24, max_output_tokens=4, batch_size=96)
            for i in places
        ]
        rows = [{"question": str(i), "answer": "0"} for i in range(4)]
        task = DatasetTask(rows, rows, reward_fn=lambda completion, answer, question: 0.0)
        return Population(agents, task, prompts_per_step=4, teacher={"weight": 1.0, "adapter": tmp_path / folder})

    runtime = embedded_runtime()
    teacher = GRPO(runtime=runtime, seed=5)
    g = torch.Generator().manual_seed(1)
    factors = [(a, 0.3 * torch.randn(b.shape, generator=g)) for a, b in runtime.store.adapter(teacher.slot)]
    runtime.store.load_adapter(teacher.slot, factors)
    teacher.save_checkpoint(tmp_path / "agent")
    both, found = population(), []
    for _ in range(20):
        found.append([m["teacher/kl"] for m in both.learn(both.rollout()).values()])
    gaps = np.array(found)
    assert (gaps[-4:].mean(0) < 0.75 * gaps[:4].mean(0)).all()
    for place in (0, 1):
        alone = population((place,))
        for _ in range(20):
            alone.learn(alone.rollout())
        assert equal(weights(alone.agents[0]), weights(both.agents[place]))
    assert both.teacher is not None
    slot = both.teacher.source
    assert isinstance(slot, int)
    for own, saved in zip(both.runtime.store.adapter(slot), factors):
        assert torch.equal(own[0], saved[0])
        assert torch.equal(own[1], saved[1])
    used = both.runtime.store.used
    store = both.runtime.store
    del both
    gc.collect()
    assert store.used < used


@pytest.mark.model
def test_a_teacher_must_fit(tmp_path: Path) -> None:
    (agent,) = make_agents(1)
    with pytest.raises(CheckpointError, match="adapter_config"):
        load_teacher(agent.runtime, tmp_path)
    wide = GRPO(runtime=Runtime.for_model(random_model(), lora_config=lora(16), seed=5), pad_token_id=PAD)
    wide.save_checkpoint(tmp_path / "wide")
    with pytest.raises(ConfigError, match="rank 16"):
        load_teacher(agent.runtime, tmp_path / "wide")
