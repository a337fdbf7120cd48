"""Own losses: three ways to say the same loss give the same gradient, which learns, clones and evolves as ever."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agilerl.algorithms import ALGORITHMS, GRPO, PPO
from agilerl.algorithms.custom_loss import PolicyLoss
from agilerl.algorithms.update import learn_together
from agilerl.data import LossInputs, collate
from agilerl.errors import CheckpointError
from agilerl.functional import aggregate, kl_estimate
from agilerl.hpo.mutation import Change, Mutation
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, sample, weights
from tests.algorithms.off_policy import SETTINGS, by_hand, tangents, trained
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


def gradient(agent: GRPO, *calls: Callable[[], Any]) -> Tensor:
    """Return the gradient that some calls accumulate, and clear it."""
    agent.runtime.store.grad.zero_()
    for call in calls:
        call()
    found = agent.runtime.store.grad[agent.slot].clone()
    agent.runtime.store.grad.zero_()
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-3
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1)


# -- equal gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [None, 3])
def test_four_ways_to_say_grpo_give_one_gradient(micro: int | None) -> None:
    agent, batch = trained(micro_batch_size_per_gpu=micro)
    native = gradient(agent, lambda: agent.accumulate(batch))
    assert_same(gradient(agent, lambda: agent.accumulate(batch, PolicyLoss(kl="k3"))), native)
    assert_same(gradient(agent, lambda: agent.accumulate(batch, by_hand)), native)
    assert_same(gradient(agent, lambda: agent.accumulate_tangents(batch, tangents(agent, batch))), native)


@pytest.mark.parametrize(("size", "prompts"), [(1, 4), (5, 4), (8, 14)])
def test_splitting_over_several_calls_gives_the_same_gradient(size: int, prompts: int) -> None:
    agent, batch = trained(prompts, batch_size=4 * prompts)
    native = gradient(agent, lambda: agent.accumulate(batch))
    experience, slopes = agent.prepare(batch), tangents(agent, batch)
    whole = agent.window_denominator(batch.action_mask)
    parts = torch.arange(len(batch)).split(size)
    widths = {experience.select(rows).advantages.shape[1] for rows in parts}
    assert widths == ({31} if prompts == 4 else {31, 63})  # short rows lose their padding
    for loss in (None, PolicyLoss(kl="k3"), by_hand):
        calls = [partial(agent.accumulate, experience.select(rows), loss, denominator=whole) for rows in parts]
        assert_same(gradient(agent, *calls), native)
    pieces = [batch.select(rows) for rows in parts]
    calls = [
        partial(agent.accumulate_tangents, piece, slopes[rows, : piece.action_mask.shape[1]])
        for rows, piece in zip(parts, pieces)
    ]
    assert_same(gradient(agent, *calls), native)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"loss_type": "gspo"}, PolicyLoss(ratio="trajectory", kl="k3")),
        ({"loss_type": "cispo", "clip_max": 1.02}, PolicyLoss(surrogate="cispo", kl="k3")),
        ({"kl_estimator": "k2", "loss_norm": "token-mean"}, PolicyLoss(kl="k2")),
        ({"loss_norm": "token-mean"}, PolicyLoss(kl="k3", aggregation="token-mean")),
        ({"loss_norm": "fixed-length", "dual_clip": 1.1}, PolicyLoss(kl="k3", aggregation="fixed-length")),
        ({"importance_sampling_level": "turn", "delta": 1.4}, PolicyLoss(ratio="turn", kl="k3")),
        ({"entropy_coef": 0.1}, PolicyLoss(kl="k3")),
        ({"kl_clamp_value": 1e-3, "beta": 1.0}, PolicyLoss(kl="k3")),
        (
            {"use_bias_correction_kl": False},
            PolicyLoss(
                ratio=lambda inputs: (inputs.logp - inputs.old_logp).exp(),
                surrogate=lambda ratio, advantages, logp: (
                    -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                ),
                kl=lambda logp, ref: kl_estimate(logp, ref, "k3"),
                aggregation=lambda loss, mask, denominator: aggregate(loss, mask, "seq-mean-token-mean", denominator),
            ),
        ),
    ],
)
def test_policy_loss_is_the_native_loss_part_by_part(settings: dict, loss: PolicyLoss) -> None:
    agent, batch = trained(**settings)
    native = gradient(agent, lambda: agent.accumulate(batch))
    assert_same(gradient(agent, lambda: agent.accumulate(batch, loss)), native)


def test_reinforce_surrogate_is_the_policy_gradient_on_policy() -> None:
    agent, _ = trained(beta=0.0)
    agent.update_epochs = 1
    batch = batch_of(agent)
    native = gradient(agent, lambda: agent.accumulate(batch))
    assert_same(gradient(agent, lambda: agent.accumulate(batch, PolicyLoss(surrogate="reinforce"))), native)


def test_tangents_in_closed_form() -> None:
    """REINFORCE: d/dlogp of -A logp / (|o| B) needs no autograd at all."""
    agent, _ = trained(beta=0.0)
    batch = batch_of(agent)
    agent.update_epochs = 1
    experience = agent.prepare(batch)
    lengths = batch.action_mask.sum(dim=1, keepdim=True)
    closed = -experience.advantages / lengths / len(batch)
    native = gradient(agent, lambda: agent.accumulate(batch))
    assert_same(gradient(agent, lambda: agent.accumulate_tangents(batch, closed)), native)


def test_what_stands_off_the_mask_does_not_matter() -> None:
    agent, batch = trained()
    slopes = tangents(agent, batch)
    expected = gradient(agent, lambda: agent.accumulate_tangents(batch, slopes))
    noisy = torch.where(batch.action_mask, slopes, float("nan"))
    assert torch.equal(gradient(agent, lambda: agent.accumulate_tangents(batch, noisy)), expected)
    assert agent.gradient_is_finite


# -- learn is made of the primitives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [None, by_hand, PolicyLoss(kl="k3")])
def test_learn_is_accumulate_and_optim_step(loss: Any) -> None:
    agent, batch = trained(loss=loss, micro_batch_size_per_gpu=4)
    agent.update_epochs = 1
    twin = agent.clone()
    learned = twin.learn(batch)
    told = agent.accumulate(batch)
    stepped = agent.optim_step()
    assert stepped["grad_norm"] == pytest.approx(learned["grad_norm"], rel=1e-5)
    assert told["loss"] == pytest.approx(learned["loss"], abs=1e-6)
    assert (agent.steps, agent.updates, agent.tokens) == (twin.steps, twin.updates, twin.tokens)
    for a, b in zip(weights(agent), weights(twin)):
        # One row order is another order of fp32 additions; Adam turns that into a share of the step.
        assert torch.allclose(a, b, atol=2e-4)
    assert (stepped["skipped_steps"], stepped["num_tokens"]) == (0.0, learned["num_tokens"])


def test_gradients_wait_for_their_own_step() -> None:
    agents = make_agents(2, **SETTINGS)
    first, second = agents
    batches = [collate(own, PAD) for own in sample(agents)]
    first.accumulate(batches[0])
    second.accumulate(batches[1])
    store = first.runtime.store
    waiting = store.grad[second.slot].clone()
    first.optim_step()
    assert not store.grad[first.slot].any()
    assert torch.equal(store.grad[second.slot], waiting)
    first.learn(batches[0])
    assert torch.equal(store.grad[second.slot], waiting)
    before = weights(second)
    second.optim_step()
    assert not equal(weights(second), before)


def test_learn_forgets_what_was_pending() -> None:
    agent, batch = trained()
    twin = agent.clone()
    agent.accumulate_tangents(batch, torch.full(batch.action_mask.shape, float("nan")))
    assert not agent.gradient_is_finite
    address = agent.runtime.store.grad.data_ptr()
    agent.learn(batch)
    twin.learn(batch)
    assert equal(weights(agent), weights(twin))
    assert agent.runtime.store.grad.data_ptr() == address, "cleared in place: the layers hold views of it"


def test_own_losses_of_a_population_train_together_as_alone() -> None:
    losses = [by_hand, None, PolicyLoss(ratio="trajectory", kl="k3", aggregation="token-mean")]

    def build() -> list[GRPO]:
        agents = make_agents(3, beta=0.05)
        for agent, loss in zip(agents, losses):
            agent.loss = loss
        return agents

    agents = build()
    batches = [collate(own, PAD) for own in sample(agents)]
    together = learn_together(agents, batches)
    for i in range(3):
        alone = build()[i]
        assert alone.learn(batches[i]) == together[i]
        assert equal(weights(alone), weights(agents[i]))


def test_every_row_reaches_an_own_loss() -> None:
    """The native loss skips rows without advantage; an own loss may have a use for them."""
    (agent,) = make_agents(1, **{**SETTINGS, "beta": 0.0})
    batch = batch_of(agent)
    batch.rewards.fill_(1.0)
    assert not gradient(agent, lambda: agent.accumulate(batch)).any()

    def imitate(inputs: LossInputs) -> Tensor:
        return -inputs.logp.sum() / inputs.denominator

    assert gradient(agent, lambda: agent.accumulate(batch, imitate)).any()
    agent.loss = imitate
    assert agent.learn(batch)["loss"] > 0


# -- hyperparameters, metrics -----------------------------------------------------------------------------------------


def test_hyperparameters_reach_the_loss_by_name_and_evolve() -> None:
    seen = []

    def spy(inputs: LossInputs, lr: float, clip_range: tuple, kl_coef: float, scale: float = 3.0) -> Tensor:
        seen.append((lr, clip_range, kl_coef, scale))
        return inputs.logp.sum() / inputs.denominator

    (agent,) = make_agents(1, loss=spy, **SETTINGS)
    batch = batch_of(agent)
    agent.accumulate(batch)
    agent.apply_mutation(Mutation(0, "hyperparameters", (Change("lr", 3e-2, 1e-3), Change("clip_coef", 0.2, 0.1))))
    agent.accumulate(batch, partial(spy, scale=4.0))
    agent.accumulate(batch, partial(spy, lr=7.0))
    assert seen == [(3e-2, (0.8, 1.2), 0.05, 3.0), (1e-3, (0.9, 1.1), 0.05, 4.0), (7.0, (0.9, 1.1), 0.05, 3.0)]


@pytest.mark.parametrize("micro", [1, 3, 5, 16])
def test_metrics_of_an_own_loss_are_exact_under_any_split(micro: int) -> None:
    def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Any]]:
        rows = inputs.mask.sum(dim=1).double()
        named = {
            "own/token": inputs.logp,
            "own/row": rows,
            "own/row/max": rows,
            "own/number": float(rows.mean()),
            "own/total/sum": rows.sum(),
            "entropy": inputs.logp,
        }
        return inputs.logp.sum() / inputs.denominator, named

    (agent,) = make_agents(1, **{**SETTINGS, "micro_batch_size_per_gpu": micro})
    batch = batch_of(agent)
    lengths, logp = batch.action_mask.sum(dim=1).double(), agent.logprobs(batch).double()
    metrics = agent.accumulate(batch, loss)
    mean = float(logp.sum() / lengths.sum())
    expected = {
        "own/token": mean,
        "own/row": float(lengths.mean()),
        "own/row/max": float(lengths.max()),
        "own/number": float(lengths.mean()),
        "own/total/sum": float(lengths.sum()),
        "entropy": mean,
        "loss": float(logp.sum() / len(batch)),
        "is_ratio/mean": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert {"kl", "advantages/mean"} <= set(metrics)
    assert "clip_ratio/region_mean" not in metrics


def test_policy_loss_reports_what_the_native_loss_reports() -> None:
    agent, batch = trained()
    native, parts = agent.accumulate(batch), agent.accumulate(batch, PolicyLoss(kl="k3"))
    assert parts == pytest.approx(native, rel=1e-6, abs=1e-8)
    assert native["clip_ratio/region_mean"] > 0


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [by_hand, PolicyLoss(kl="k3", aggregation="token-mean")])
def test_clone_keeps_the_loss_and_a_checkpoint_asks_for_it(loss: Any, tmp_path: Path) -> None:
    agent, batch = trained(loss=loss)
    clone = agent.clone()
    assert clone.loss is loss
    agent.save_checkpoint(tmp_path / "a")
    name = "by_hand" if loss is by_hand else "PolicyLoss"
    with pytest.raises(CheckpointError, match=rf"{name}.*load\(path, loss=...\)"):
        GRPO.load(tmp_path / "a", runtime=agent.runtime)
    loaded = GRPO.load(tmp_path / "a", runtime=agent.runtime, loss=loss)
    for other in (clone, loaded):
        other.learn(batch)
    agent.learn(batch)
    assert equal(weights(clone), weights(agent))
    assert equal(weights(loaded), weights(agent))
    plain = GRPO(runtime=agent.runtime, pad_token_id=PAD, lora_config=lora(8))
    plain.load_checkpoint(tmp_path / "a")
    assert plain.loss is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_algorithm_takes_an_own_loss(name: str) -> None:
    """Under a loss of one's own all algorithms do the same: here, make the batch likelier."""
    (grpo,) = make_agents(1)
    batch = batch_of(grpo)
    batch = replace(batch, desirable=batch.groups % 2 == 0)  # labels, for those that want them

    def imitate(inputs: LossInputs) -> Tensor:
        return aggregate(-inputs.logp, inputs.mask, "seq-mean-token-mean", 16.0)

    settings: dict[str, Any] = {"lora_config": lora(8), "batch_size": 16, "seed": grpo.config.seed}
    agent = ALGORITHMS[name](runtime=grpo.runtime, pad_token_id=PAD, loss=imitate, **settings)
    grpo.temperature = getattr(agent, "temperature", 1.0)
    native = gradient(grpo, lambda: grpo.accumulate(batch, imitate))
    store = agent.runtime.store
    agent.accumulate(batch)
    assert_same(store.grad[agent.slot].clone(), native)
    before, likely = store.theta[agent.slot].clone(), agent.logprobs(batch).sum()
    assert agent.optim_step()["skipped_steps"] == 0
    assert not torch.equal(store.theta[agent.slot], before)
    assert agent.logprobs(batch).sum() > likely


def test_an_own_loss_trains_a_critic_as_well() -> None:
    (grpo,) = make_agents(1)

    def squared(inputs: LossInputs) -> Tensor:
        return aggregate((inputs.values - 1).square() - inputs.logp, inputs.mask, "token-mean", inputs.denominator)

    ppo = PPO(runtime=grpo.runtime, pad_token_id=PAD, loss=squared, lora_config=lora(8), batch_size=16)
    slots = (ppo.slot, ppo.critic_slot)
    before = [ppo.runtime.store.theta[slot].clone() for slot in slots]
    assert ppo.learn(batch_of(grpo))["skipped_steps"] == 0
    assert not any(torch.equal(ppo.runtime.store.theta[slot], old) for slot, old in zip(slots, before))
