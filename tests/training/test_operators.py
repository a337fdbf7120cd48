"""Operators on whole agents and in whole runs: crossover, the soup of the best exams."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, PPO
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, weights
from tests.tiny_models import PAD, random_model
from tests.training.small_runs import lines, run_here

pytestmark = pytest.mark.model


def trained(**changes: Any) -> list[GRPO]:
    agents = make_agents(2, lr=3e-2, beta=0.0, batch_size=8, **changes)
    for agent in agents:
        agent.learn(batch_of(agent))
    return agents


def deltas(agent: GRPO, slot: int | None = None) -> list[torch.Tensor]:
    store = agent.runtime.store
    slot = agent.slot if slot is None else slot
    return [float(store.scaling[slot]) * b.double() @ a.double() for a, b in store.adapter(slot)]


def far(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    gap = torch.stack([(a - b).norm() for a, b in zip(found, expected)]).norm()
    return float(gap / torch.stack([b.norm() for b in expected]).norm())


def low_rank(delta: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(delta)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


# -- crossover --------------------------------------------------------------------------------------------------------


def test_a_child_of_two_equal_parents_is_the_same_policy() -> None:
    agent, _ = trained()
    twin = agent.clone(7)
    batch = batch_of(agent)
    before = agent.logprobs(batch)
    twin.cross(agent)
    assert far(deltas(twin), deltas(agent)) < 1e-6
    assert torch.allclose(twin.logprobs(batch), before, atol=1e-5)
    assert not equal(weights(twin)[:-1], weights(agent)[:-1])  # other factors of the same product


def test_a_child_of_different_ranks_and_scales_is_the_nearest_to_their_mean() -> None:
    agent, mate = trained()
    assert (agent.rank, mate.rank) == (8, 4)
    expected = [(a + b) / 2 for a, b in zip(deltas(agent), deltas(mate))]
    best = [low_rank(delta, 8) for delta in expected]
    child, theirs = agent.clone(5), weights(mate)
    child.cross(mate)
    assert far(deltas(child), best) < 1e-6
    assert (child.rank, child.parent, child.lr) == (8, 0, agent.lr)
    assert equal(weights(mate), theirs)
    read = agent.runtime.store.read(child.slot)
    assert all(a.abs().sum() == 0 and b.abs().sum() == 0 for a, b in read["exp_avg"])
    assert all(a.min() > 0 and float(a.std()) < 1e-6 * float(a.mean()) for a, _ in read["exp_avg_sq"])
    assert float(agent.runtime.store.steps[child.slot]) == float(agent.runtime.store.steps[agent.slot]) > 0


def test_a_child_goes_on_learning() -> None:
    agent, mate = trained()
    child = agent.clone(5)
    child.cross(mate)
    before = deltas(child)
    child.learn(batch_of(child))
    assert 1e-4 < far(deltas(child), before) < 1


def test_critics_are_crossed_as_well() -> None:
    runtime = Runtime.for_model(random_model(), lora_config=lora(4), seed=5)
    agents = [
        PPO(pad_token_id=PAD, runtime=runtime, index=i, max_output_tokens=9, seed=5 + i, batch_size=8, lr_critic=1e-2)
        for i in range(2)
    ]
    for agent in agents * 2:  # the first update moves the heads only, which are 0 before it
        agent.learn(batch_of(agent))  # type: ignore[arg-type]
    child = agents[0].clone(2)
    child.cross(agents[1])
    store = runtime.store
    heads = [store.read_head(agent.critic_slot) for agent in (*agents, child)]
    assert torch.allclose(heads[2][0], (heads[0][0] + heads[1][0]) / 2)
    assert torch.allclose(heads[2][2], (heads[0][2] + heads[1][2]) / 2)
    ours, theirs, own = (deltas(agent, agent.critic_slot) for agent in (*agents, child))  # type: ignore[arg-type]
    mean = [(a + b) / 2 for a, b in zip(ours, theirs)]
    assert far(own, [low_rank(delta, child.rank) for delta in mean]) < 1e-5


CROSSING = ("mutation.crossover=1.0", "training.pop_size=4", "training.max_steps=384", "algorithm.lr=1e-3")


def test_a_run_with_crossover_says_who_the_parents_are(tmp_path: Path) -> None:
    root = run_here(tmp_path / "run", *CROSSING)
    events = lines(root / "lineage.jsonl")
    born = [line for line in events if line["event"] == "birth" and line["parent"] is not None]
    assert born
    assert all("mate" in line and line["mate"] != line["parent"] for line in born)
    child = born[0]
    assert f"{child['parent']} and {child['mate']}" in (root / "report.html").read_text()
    again = run_here(tmp_path / "again", *CROSSING)
    assert lines(again / "lineage.jsonl") == events
