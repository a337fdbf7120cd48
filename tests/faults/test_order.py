"""What must not matter does not: the order of agents, reward workers, how rows are divided into micro-batches."""

from typing import Any

import pytest
import torch

from agilerl.config.manifest import load_manifest
from agilerl.envs.graded import GradedTask
from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.training.setup import Session, build
from tests.faults.evidence import SHORT
from tests.faults.graders import odd_letters
from tests.faults.small_populations import Parity, iterate, make_population
from tests.faults.test_resume_kinds import KINDS

pytestmark = pytest.mark.model

TINY = (*SHORT, "algorithm.lr=1e-3", "algorithm.group_size=4", "environment.data_batch_size_per_gpu=4")


def session(*overrides: str) -> Session:
    return build(load_manifest(None, [*TINY, *overrides]))


def bits(made: Session, iterations: int) -> dict[int, tuple[bytes, ...]]:
    """Train and examine; returns all that is numbers in each agent, and the scores of its exams, by index."""
    population = made.population
    scores: dict[int, list[float]] = {agent.index: [] for agent in population.agents}
    for _ in range(iterations):
        population.learn(population.rollout())
        for index, fitness in population.evaluate("exam").items():
            scores[index] += fitness.scores
    store = population.runtime.store
    return {
        agent.index: (
            *(bank[agent.slot].numpy().tobytes() for bank in (store.theta, store.exp_avg, store.exp_avg_sq)),
            repr(scores[agent.index]).encode(),
            repr(sorted(agent.tokens.items())).encode(),
        )
        for agent in population.agents
    }


@pytest.mark.parametrize("kind", ["GRPO", "PPO"])
def test_the_order_of_agents(kind: str) -> None:
    """In rollouts, updates and exams; the agents keep their slots."""
    settings = KINDS["PPO"] if kind == "PPO" else ()
    expected = bits(session(*settings), 2)
    assert len(set(expected.values())) == 3
    for order in ((2, 1, 0), (1, 2, 0)):
        other = session(*settings)
        other.population.agents = [other.population.agents[place] for place in order]
        assert bits(other, 2) == expected


def test_the_slots_of_agents() -> None:
    """Where an agent lies in the bank is no part of what it is: a resumed run lays it out again."""
    expected = bits(session(), 2)
    other = session()
    agents, store = other.population.agents, other.population.runtime.store
    store.reserve(8)
    for agent, slot in zip(agents, (6, 3, 4)):
        agent.move_to(slot)
    assert [agent.slot for agent in agents] == [6, 3, 4]
    assert bits(other, 2) == expected


@pytest.mark.processes
def test_the_number_of_reward_workers() -> None:
    """One process or two, or none: the same grades, each for its completion."""

    def seen(grader: Any) -> dict[int, Any]:
        with CombinedGrader([grader]) as combined:
            return iterate(make_population(3, task=GradedTask(Parity(), combined)), 2)

    expected = seen(odd_letters)
    assert len({agent.metrics[-1]["reward"] for agent in expected.values()}) > 1
    for workers in (1, 2):
        assert seen(IsolatedGrader(odd_letters, workers=workers, timeout=60)) == expected


@pytest.mark.parametrize("kind", ["GRPO", "PPO", "DPO", "SFT", "KTO"])
def test_the_size_of_micro_batches(kind: str) -> None:
    """The gradient of a whole optimizer step, relative to its length, for each slot that is trained."""
    settings = {"GRPO": ("algorithm.beta=0.04", "algorithm.batch_size=16")} | {
        name: tuple(s for s in KINDS[name] if not s.startswith("training")) for name in ("PPO", "DPO", "SFT", "KTO")
    }
    found = []
    for rows in ("null", "1", "3"):
        made = session(*settings[kind], f"algorithm.micro_batch_size_per_gpu={rows}")
        population = made.population
        rollout = population.draw() if population.learns_from_data else population.rollout()
        population.learn(rollout)
        store = population.runtime.store
        found.append(store.exp_avg[: store.used].clone())
    lengths = found[0].norm(dim=1)
    assert lengths.min() > 0
    for gradient in found[1:]:
        # Sums of float32 in another order; how far apart depends on the processor.
        assert torch.all((gradient - found[0]).norm(dim=1) <= 5e-6 * lengths)
    assert not torch.equal(found[0], found[1])
