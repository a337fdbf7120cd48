"""SFT -> DPO -> GRPO from checkpoints: the actor of a stage is where the next one starts, and its reference."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import DPO, GRPO, SFT
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, lora
from tests.algorithms.data_agents import examples, new_runtime
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


def pairs(seed: int = 0) -> Any:
    return examples(8, seed, pairs=True)


def test_the_chain_of_stages_hands_the_policy_on(tmp_path: Path) -> None:
    """SFT -> DPO -> GRPO: the actor of a stage is where the next one starts, and its reference."""
    runtime = new_runtime()
    settings: dict[str, Any] = {"runtime": runtime, "pad_token_id": PAD, "lora_config": lora(8), "lr": 1e-2}
    sft = SFT(**settings)
    sft.learn(examples(16))
    sft.save_checkpoint(tmp_path / "sft")
    dpo = DPO(**settings, index=1)
    dpo.load_checkpoint(tmp_path / "sft")
    assert equal_adapters(runtime, dpo.slot, sft.slot)
    assert equal_adapters(runtime, dpo.reference_slot, sft.slot)
    first, second = dpo.learn(pairs()), dpo.learn(pairs())
    assert first["rewards/margins"] == first["rewards/chosen"] == 0.0
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert second["rewards/margins"] > 0
    dpo.save_checkpoint(tmp_path / "dpo")
    grpo = GRPO(**settings, index=2, beta=0.1, group_size=4, max_output_tokens=6)
    grpo.load_checkpoint(tmp_path / "dpo")
    for slot in (grpo.slot, grpo.reference_slot):
        assert equal_adapters(runtime, slot, dpo.slot)
    assert grpo.learn(batch_of(grpo))["kl"] == 0.0
    assert grpo.learn(batch_of(grpo))["kl"] > 0


def test_a_checkpoint_of_the_same_algorithm_brings_its_own_reference(tmp_path: Path) -> None:
    runtime = new_runtime()
    settings: dict[str, Any] = {"runtime": runtime, "pad_token_id": PAD, "lora_config": lora(8), "lr": 1e-2}
    first = DPO(**settings)
    first.learn(pairs())
    first.set_reference_policy(1)
    moved = runtime.store.adapter(first.slot)
    first.learn(pairs(seed=2))
    first.save_checkpoint(tmp_path / "dpo")
    resumed, restarted, fixed = (DPO(**settings, index=i) for i in (1, 2, 3))
    resumed.load_checkpoint(tmp_path / "dpo")
    assert equal_factors(runtime.store.adapter(resumed.reference_slot), moved)
    restarted.load_checkpoint(tmp_path / "dpo", overwrite_reference_adapter=True)
    assert equal_adapters(runtime, restarted.reference_slot, first.slot)
    # Who says that the reference is the base model keeps it through a change of stage.
    SFT(**settings, index=4).save_checkpoint(tmp_path / "sft")
    fixed.set_hyperparameters({"use_separate_reference_adapter": False})
    fixed.load_checkpoint(tmp_path / "sft")
    assert fixed.reference_slot is None
    learner = SFT(**settings, index=5)
    learner.load_checkpoint(tmp_path / "dpo")
    assert equal_adapters(runtime, learner.slot, first.slot)


def equal_factors(one: Any, other: Any) -> bool:
    return all(torch.equal(x, y) for p, q in zip(one, other, strict=True) for x, y in zip(p, q))


def equal_adapters(runtime: Runtime, one: int | None, other: int | None) -> bool:
    assert one is not None
    assert other is not None
    return equal_factors(runtime.store.adapter(one), runtime.store.adapter(other))
