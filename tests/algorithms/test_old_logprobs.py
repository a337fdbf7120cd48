"""Whose log-probs are the old ones: the sampler's if they are known and exact, otherwise the trainer's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.algorithms import GRPO, GSPO, PPO, RLOO
from agilerl.compat.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.data import Completion, RolloutBatch, Trajectory, collate
from agilerl.data.batch import union
from agilerl.functional import log_ratio, pool_log_ratio
from agilerl.models.base import BaseModel
from agilerl.processes import ALONE
from agilerl.rollouts import GenerationRequest
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, lora, make_agents, sample
from tests.envs.scripted import Echo
from tests.tiny_models import PAD, qwen2, random_model

pytestmark = pytest.mark.model


def agent(kind: type[Any] = GRPO, model: Any = None, **settings: Any) -> Any:
    runtime = Runtime.for_model(random_model() if model is None else model, lora_config=lora(8), seed=5)
    rate = {"lr_actor": 1e-2} if kind is PPO else {"lr": 1e-2}
    usual = {"group_size": 4, "batch_size": 16, "beta": 0.0, "max_output_tokens": 9, "seed": 5, **rate}
    return kind(pad_token_id=PAD, runtime=runtime, lora_config=lora(8), **{**usual, **settings})


def adapter(it: Any) -> torch.Tensor:
    return it.runtime.store.theta[it.slot].clone()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {"update_epochs": 2}),
        (GRPO, {"batch_size": 4}),
        (RLOO, {"beta": 0.5}),  # one step, but the KL in its reward is that of the old log-probs
        (PPO, {"update_epochs": 2}),
    ],
)
def test_an_update_without_sampling_logprobs_computes_them(kind: type[Any], settings: dict[str, Any]) -> None:
    found = []
    for known in (True, False):
        it = agent(kind, **settings)
        before, rows = adapter(it), sample([it])[0]
        if not known:
            for row in rows:
                row.logprobs = None
        metrics = it.learn(collate(rows, PAD))
        found.append((adapter(it) - before, metrics))
    (exact, told), (computed, unaided) = found
    assert float((exact - computed).norm() / exact.norm()) < 1e-2  # Adam divides rounding by rounding
    for name in ("is_ratio/mean", "is_ratio/min", "is_ratio/max", "clip_ratio/region_mean", "loss"):
        assert unaided[name] == pytest.approx(told[name], abs=1e-4)


def test_collation_and_union_keep_what_is_unknown_unknown() -> None:
    rows = [Trajectory([2, 3], [4, 1], [True, True], logprobs, [1.0]) for logprobs in ([-0.5, -1.0], None)]
    assert collate(rows[:1], PAD).sampling_logps is not None
    batch = collate(rows, PAD)
    assert batch.sampling_logps is None
    assert batch.select(slice(0, 1)).sampling_logps is None
    assert union(ALONE, batch, PAD).sampling_logps is None


class Silent:
    """An engine that does not report log-probs."""

    exact = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def generate(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        groups = self.inner.generate(requests)
        return [[Completion(c.token_ids, None, c.finish_reason) for c in group] for group in groups]


def test_the_documented_loop_may_leave_them_out() -> None:
    """Ratios of the first window were exp(log-prob) where 0.0 stood for what was not known."""
    updates = []
    for how in ("given", "left out", "unknown to the engine"):
        runtime = Runtime.from_pretrained("embedded", seed=1)
        if how == "unknown to the engine":
            runtime.engine = Silent(runtime.engine)
        it = GRPO(
            runtime=runtime, group_size=4, batch_size=8, max_output_tokens=3, seed=1, update_epochs=2, lr=1e-5, beta=0.0
        )
        vec = SyncMultiTurnVecEnv(
            lambda tokenizer=runtime.tokenizer: TokenObservationWrapper(Echo(length=2), tokenizer, 2), 2, 4
        )
        prompts: Any = vec.reset(seed=3)
        while prompts:
            action = it.get_action(prompts, repeat_prompts=False)
            given = None if how == "left out" else action.sampling_logps
            prompts = vec.step(action.completion_ids, given)
        ids, masks, turn_ids, rewards, _, logps = vec.get_trajectories()
        assert (logps is not None) is (how == "given")
        assert (vec.batch().sampling_logps is not None) is (how == "given")
        rewards = [own + place for place, own in enumerate(rewards)]  # an echo pays the whole group the same
        updates.append(it.learn((ids, masks, rewards), turn_ids=turn_ids, sampling_logps=logps))
        vec.close()
    for metrics in updates:
        assert metrics["is_ratio/mean"] == pytest.approx(updates[0]["is_ratio/mean"], abs=1e-3)
        assert metrics["is_ratio/min"] > 0.9


# -- sampling that is not exact ---------------------------------------------------------------------------------------


def half(**settings: Any) -> Any:
    """GSPO on a base in bf16 that decodes to other log-probs than it is trained on."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = random_model(qwen2(**sizes), scale=0.3).to(torch.bfloat16)
    return agent(GSPO, model, **{"max_output_tokens": 24, "batch_size": 8, **settings})


def mean_log_ratios(it: Any, batch: RolloutBatch, old: torch.Tensor) -> torch.Tensor:
    mask = batch.action_mask
    return pool_log_ratio(log_ratio(it.logprobs(batch), old, mask), mask, "trajectory")[mask]


def test_a_base_in_bf16_begins_each_update_with_ratios_of_one() -> None:
    # A rate far too small to move anything, so every window is like the first; and windows of all rows, because with
    # other rows in a pass 16 bits may round to other numbers.
    it = half(lr=1e-12, batch_size=16, update_epochs=2)
    batch = batch_of(it)
    assert batch.sampling_logps is not None
    assert not it.runtime.base.decodes_exactly
    # By how much the forward of decoding rounds to other numbers depends on the processor: here it does by 0.1.
    batch = replace(batch, sampling_logps=torch.where(batch.action_mask, batch.sampling_logps - 0.1, 0.0))
    low, high = (abs(bound - 1) for bound in it.config.clip_range)
    assert float(mean_log_ratios(it, batch, batch.sampling_logps).abs().max()) > max(low, high)
    metrics = it.learn(batch)
    assert metrics["is_ratio/min"] == metrics["is_ratio/max"] == 1.0
    assert metrics["clip_ratio/region_mean"] == 0.0
    # The sampler is our own, so nothing weighs its tokens.
    assert "sampling/sampling_logp_difference/mean" not in metrics


def test_the_first_window_is_exact_whatever_was_computed() -> None:
    """Bits of a forward in 16 bits depend on what shares it, so even recomputed ones may differ by rounding."""
    it = half(lr=1e-12, update_epochs=2)
    seen: list[torch.Tensor] = []

    def loss(inputs: Any) -> torch.Tensor:
        seen.append((inputs.logp.detach() - inputs.old_logp)[inputs.mask])
        return (inputs.logp * inputs.advantages).sum()

    it.loss = loss
    it.learn(batch_of(it))
    assert len(seen) >= 4
    assert not seen[0].any()


def test_fp32_takes_the_samplers_own() -> None:
    for it in make_agents():
        assert it.runtime.base.decodes_exactly
        batch = batch_of(it)
        assert batch.sampling_logps is not None
        shifted = replace(batch, sampling_logps=torch.where(batch.action_mask, batch.sampling_logps - 0.1, 0.0))
        it.set_hyperparameters({"batch_size": 4})
        experience = it.prepare(shifted)
        assert experience.old_logp is not None
        assert torch.equal(experience.old_logp, shifted.sampling_logps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_which_bases_decode_exactly(dtype: torch.dtype) -> None:
    base = BaseModel(model := random_model().to(dtype), model.get_decoder(), "x")
    assert base.decodes_exactly is (dtype in (torch.float32, torch.float64))
    base.options = base.options.model_copy(update={"torch_compiler": "default"})
    assert not base.decodes_exactly


def test_one_layer_in_16_bits_is_enough() -> None:
    model = random_model()
    model.model.layers[0].mlp.to(torch.bfloat16)
    assert not BaseModel(model, model.get_decoder(), "x").decodes_exactly


# -- the same batch again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["batch", "tuple"])
def test_learning_again_compares_with_the_policy_that_sampled(form: str) -> None:
    it = agent(lr=3e-2)
    batch = batch_of(it)
    assert batch.sampling_logps is not None
    rows = [batch.sampling_logps[i][batch.action_mask[i]] for i in range(len(batch))]
    experiences: Any = (batch.ids, batch.action_mask, batch.returns) if form == "tuple" else batch
    given = {"sampling_logps": rows} if form == "tuple" else {}
    first = it.learn(experiences, **given)
    assert first["is_ratio/min"] == first["is_ratio/max"] == 1.0
    moved = (it.logprobs(batch) - batch.sampling_logps)[batch.action_mask].exp()
    second = it.learn(experiences, **given)
    assert second["is_ratio/min"] == pytest.approx(float(moved.min()), rel=1e-4)
    assert second["is_ratio/max"] == pytest.approx(float(moved.max()), rel=1e-4)
    assert second["is_ratio/max"] > 1.01
    assert np.isfinite(second["loss"])
    third = it.learn(batch_of(it))
    assert third["is_ratio/min"] == third["is_ratio/max"] == 1.0
