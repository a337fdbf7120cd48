"""Operators on whole agents and in whole runs: the soup of the best exams, a teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.state import soup
from agilerl.config.manifest import load_manifest
from agilerl.errors import ConfigError
from agilerl.runs.strict_json import read_json
from agilerl.training.setup import build
from tests.algorithms.conftest import batch_of, make_agents
from tests.algorithms.test_reference_sync import deltas, nearest
from tests.training.small_runs import lines, run_here

pytestmark = pytest.mark.model


def trained(**changes: Any) -> list[GRPO]:
    agents = make_agents(2, lr=3e-2, beta=0.0, batch_size=8, **changes)
    for agent in agents:
        agent.learn(batch_of(agent))
    return agents


def far(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    gap = torch.stack([(a - b).norm() for a, b in zip(found, expected)]).norm()
    return float(gap / torch.stack([b.norm() for b in expected]).norm())


# -- soup -------------------------------------------------------------------------------------------------------------


def test_a_soup_is_the_weighted_mean_of_all_deltas() -> None:
    agent, other = trained()
    shares = (0.5, 0.3, 0.2)
    states = [agent.state(), other.state(), agent.clone(4).state()]
    mixed = GRPO.from_state(soup(states, shares), agent.runtime)
    expected = [0.7 * a + 0.3 * b for a, b in zip(deltas(agent, agent.slot), deltas(other, other.slot))]
    assert far(deltas(mixed, mixed.slot), [nearest(delta, 8) for delta in expected]) < 1e-6
    assert (mixed.index, mixed.rank, mixed.lr) == (agent.index, 8, agent.lr)
    same = GRPO.from_state(soup([agent.state()] * 3, (1 / 3,) * 3), agent.runtime)
    assert far(deltas(same, same.slot), deltas(agent, agent.slot)) < 1e-6


SEARCH = (
    *("selection_strategy={name: tournament, candidates: 3, soup: 0.5}", "training.max_steps=384"),
    *("algorithm.lr=1e-3", "environment.eval_prompts=30"),
)


def test_a_soup_is_the_elite_only_if_it_wins_on_the_second_panel(tmp_path: Path) -> None:
    root = run_here(tmp_path / "soup", *SEARCH)
    plain = run_here(tmp_path / "plain", *SEARCH, "selection_strategy.soup=null")
    with_soup, without = (read_json(path / "summary.json") for path in (root, plain))
    found = with_soup["elite"]["soup"]
    assert len(found["of"]) == 3
    assert found["is_elite"] == (found["probability_better"] > 0.5)
    assert "soup" not in without["elite"]
    # Everything before the soup is the same run, and its second panel is counted.
    assert lines(root / "lineage.jsonl") == lines(plain / "lineage.jsonl")
    assert with_soup["tokens"]["trained"] == without["tokens"]["trained"]
    spent = with_soup["tokens"]["evaluated"] - without["tokens"]["evaluated"]
    assert 30 * 1 <= spent <= 30 * 10
    adapters = [(path / "elite" / "adapter_model.safetensors").read_bytes() for path in (root, plain)]
    assert (adapters[0] == adapters[1]) == (not found["is_elite"])


def test_a_soup_needs_candidates() -> None:
    with pytest.raises(ConfigError, match=r"soup=0.8.*1.*candidates=3"):
        load_manifest(None, ["selection_strategy={name: tournament, soup: 0.8}"])


def test_a_teacher_of_data_is_refused(tmp_path: Path) -> None:
    data = ("algorithm={name: SFT}", "environment.env_type=sft", "mutation.rl_hp_selection={}")
    with pytest.raises(ConfigError, match="agents that sample their own completions, found SFT"):
        build(load_manifest(None, [*data, f"teacher={{weight: 0.1, adapter: {tmp_path}}}"]))
