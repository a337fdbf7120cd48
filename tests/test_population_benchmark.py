"""The two arms of ``benchmarking/population.py`` do the same work, in one batch or one agent at a time."""

import pytest
import torch

from benchmarking.population import Bench

pytestmark = pytest.mark.model

LOAD = {"prompt_tokens": 6, "tokens": 5, "prompts": 1, "group": 4, "rank": 2}


def test_agents_end_with_the_same_adapters_in_both_arms() -> None:
    torch.set_num_threads(1)
    benches = [Bench("embedded", 2, LOAD) for _ in range(2)]
    before = benches[0].runtime.store.theta.clone()
    seconds = [bench.step(arm) for bench, arm in zip(benches, (benches[0].together, benches[1].alone))]
    together, alone = (bench.runtime.store.theta for bench in benches)
    assert torch.equal(together, alone)
    assert all(not torch.equal(together[agent.slot], before[agent.slot]) for agent in benches[0].agents)
    assert all(spent["step"] == spent["rollout"] + spent["learn"] > 0 for spent in seconds)
    assert all(len(agent.fitness) == 0 and agent.tokens["generated"] == 20 for agent in benches[0].agents)
