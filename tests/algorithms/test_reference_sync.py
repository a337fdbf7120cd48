"""A reference that follows the policy (TR-DPO): what it becomes, when, and that agents stay independent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agilerl.algorithms import DPO, GRPO, PPO
from agilerl.errors import ConfigError
from tests.algorithms.conftest import batch_of, equal, make_agents, weights
from tests.algorithms.data_agents import agents_of, examples

pytestmark = pytest.mark.model


def make(**changes: Any) -> DPO:
    return agents_of(DPO, ({"lr": 1e-2, "batch_size": 64},), **changes)[0]


def pairs(seed: int = 0) -> Any:
    return examples(6, seed, pairs=True)


def deltas(agent: Any, slot: int | None) -> list[Tensor]:
    """What an adapter adds to each layer's weight, in fp64; nothing for the base model."""
    store = agent.runtime.store
    if slot is None:
        return [torch.zeros(len(b), a.shape[1], dtype=torch.double) for a, b in store.adapter(agent.slot)]
    return [float(store.scaling[slot]) * b.double() @ a.double() for a, b in store.adapter(slot)]


def nearest(matrix: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def test_the_reference_is_the_mean_of_weights_as_far_as_its_rank_holds_it() -> None:
    agent = make(ref_sync_steps=2, ref_sync_alpha=0.3)
    assert "reference/energy" not in agent.learn(pairs())
    assert agent.reference_slot is None
    for step in range(2):
        old = deltas(agent, agent.reference_slot)
        if step:
            assert "reference/energy" not in agent.learn(pairs(2))
        metrics = agent.learn(pairs(step + 3))
        policy, found = deltas(agent, agent.slot), deltas(agent, agent.reference_slot)
        whole = [0.3 * new + 0.7 * ref for new, ref in zip(policy, old)]
        for own, mean in zip(found, whole):
            scale = float(mean.abs().max())
            assert scale > 1e-6
            torch.testing.assert_close(own, nearest(mean, agent.rank), rtol=1e-4, atol=1e-5 * scale)
        kept = sum(float(f.square().sum()) for f in found) / sum(float(m.square().sum()) for m in whole)
        assert metrics["reference/energy"] == pytest.approx(kept, abs=1e-5)
        assert metrics["reference/energy"] == pytest.approx(1.0, abs=1e-6) if step == 0 else kept < 1.0


def test_with_alpha_one_the_reference_is_the_policy_to_the_bit() -> None:
    agent = make(ref_sync_steps=1, ref_sync_alpha=1.0)
    for seed in range(2):
        agent.learn(pairs(seed))
        store = agent.runtime.store
        assert agent.reference_slot is not None
        for own, ref in zip(store.adapter(agent.slot), store.adapter(agent.reference_slot)):
            assert torch.equal(own[0], ref[0])
            assert torch.equal(own[1], ref[1])
    assert agent.learn(pairs(5))["rewards/margins"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("every", [None, 2])
def test_a_policy_gradients_kl_is_to_the_moved_reference(every: int | None) -> None:
    (agent,) = make_agents(1, beta=0.1, lr=1e-2, batch_size=64, ref_sync_steps=every, ref_sync_alpha=1.0)
    kl = [agent.learn(batch_of(agent))["kl"] for _ in range(3)]
    assert kl[1] > 1e-6
    assert (kl[2] == pytest.approx(0.0, abs=1e-6)) == (every is not None)


def test_steps_taken_by_hand_count_as_updates() -> None:
    agent = make(ref_sync_steps=2)
    for step in range(2):
        agent.accumulate(pairs(step))
        assert ("reference/energy" in agent.optim_step()) == (step == 1)
    assert agent.reference_slot is not None


def test_clones_and_checkpoints_continue_to_the_bit(tmp_path: Path) -> None:
    agent = make(ref_sync_steps=2, ref_sync_alpha=0.4)
    for seed in range(3):
        agent.learn(pairs(seed))
    agent.save_checkpoint(tmp_path / "a")
    copies = [agent.clone(), DPO.load(tmp_path / "a", runtime=agent.runtime)]
    expected = [agent.learn(pairs(seed)) for seed in (7, 8)]
    for copy in copies:
        assert [copy.learn(pairs(seed)) for seed in (7, 8)] == expected
        assert equal(weights(copy), weights(agent))
        assert copy.reference_key == agent.reference_key != b"base"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (DPO, {"ref_sync_steps": 2, "use_separate_reference_adapter": False}, "use_separate_reference_adapter=False"),
        (DPO, {"ref_sync_steps": 2, "loss_type": "simpo"}, "loss_type='simpo'"),
        (DPO, {"ref_sync_steps": 2, "reference_free": True}, "reference_free=True"),
        (GRPO, {"ref_sync_steps": 2, "beta": 0.0}, "beta=0"),
        (PPO, {"ref_sync_steps": 2, "beta": 0.0}, "beta=0"),
    ],
)
def test_contradictions_are_told(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.Config(**settings)  # type: ignore[attr-defined]
