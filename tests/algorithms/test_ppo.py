"""PPO: golden credit and value loss, the critic's gradients, two learning rates, turns, sick critics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.algorithms import ALGORITHMS, LLMPPO, PPO
from agilerl.algorithms.forward import fixed_values
from agilerl.data import LossInputs, MicroBatch, RolloutBatch, Trajectory, collate
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.hpo.mutation import Change, Mutation
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from tests.algorithms.ppo_agents import batch_of, bits, equal, make_agents, turn_batch
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


# -- settings --------------------------------------------------------------------------------------------------------


def test_documented_names_and_defaults() -> None:
    found = PPO.defaults()
    expected = {
        "lr_critic": 5e-5, "vf_coef": 0.5, "gamma": 1.0, "gae_lambda": 1.0, "turn_level_clip": True,
        "advantage_granularity": "auto", "turn_ratio_pooling": "sum", "turn_value_reduction": "final_value",
        "whiten_advantages": True, "group_size": 1, "lr_actor": 1e-5, "critic_warmup_steps": 0,
    }  # fmt: skip
    assert {n: found[n] for n in expected} == expected
    assert not {"lr", "adv_norm", "filter_zero_adv"} & set(found)
    assert LLMPPO is PPO is ALGORITHMS["PPO"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turn_level_clip": False, "turn_ratio_pooling": "mean"}, "contradicts turn_level_clip=False"),
        ({"advantage_granularity": "token", "turn_value_reduction": "mean"}, "advantages are those of tokens"),
        ({"turn_level_clip": False, "turn_value_reduction": "mean"}, "use advantage_granularity='turn'"),
    ],
)
def test_contradictions_are_told_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_agents(1, **arguments)
    (agent,) = make_agents(1)
    with pytest.raises(ConfigError, match=message):
        agent.set_hyperparameters(arguments)


def test_two_learning_rates_each_moves_its_own_slot() -> None:
    (agent,) = make_agents(1, batch_size=64)
    assert agent.get_lr_names() == ["lr_actor", "lr_critic"]
    assert [s.lr for s in agent.optimizer_settings().values()] == [1e-3, 1e-2]
    assert list(agent.optimizer_settings()) == [agent.slot, agent.critic_slot]
    batch, moved = batch_of(agent), {}
    for name in ("none", "lr_actor", "lr_critic"):
        (agent,) = make_agents(1, batch_size=64, hp_config=HyperparameterConfig(lr_actor=RLParameter(1e-5, 1e-1)))
        if name != "none":
            agent.apply_mutation(Mutation(0, "hyperparameters", (Change(name, getattr(agent, name), 5e-3),)))
        agent.learn(batch)
        moved[name] = bits(agent)
    actor, critic = slice(0, 4), slice(4, 8)
    assert equal(moved["lr_actor"][critic], moved["none"][critic])
    assert equal(moved["lr_critic"][actor], moved["none"][actor])
    assert not equal(moved["lr_actor"][actor], moved["none"][actor])
    assert not equal(moved["lr_critic"][critic], moved["none"][critic])


# -- golden numbers --------------------------------------------------------------------------------------------------

V = [0.1, 0.2, 0.15, 0.3, 0.25]
GOLDEN = {
    (1.0, 0.95): [0.75588594, 0.69040625, 0.779375, 0.6625, 0.75],
    (1.0, 1.0): [0.9, 0.8, 0.85, 0.7, 0.75],
    (0.99, 0.95): [0.72272498, 0.66424772, 0.76102894, 0.652875, 0.75],
}
WHITE = [0.5765839, -0.75974151, 1.05595441, -1.32925906, 0.45646226]  # of gamma 1, lambda 0.95


def five_tokens(gaps: bool) -> tuple[RolloutBatch, torch.Tensor, torch.Tensor]:
    """The golden row of five action tokens and a reward of 1; ``gaps``: environment tokens in between."""
    mask = [True, True, False, False, True, True, False, True] if gaps else [True] * 5
    t = Trajectory([5, 9], list(range(10, 10 + len(mask))), mask, [0.0] * len(mask), [1.0])
    batch = collate([t], PAD)
    values = torch.full(batch.action_mask.shape, 7.7).masked_scatter(batch.action_mask, torch.tensor(V))
    return batch, values, batch.action_mask


def test_the_entropy_bonus_is_subtracted_from_every_token() -> None:
    (agent,) = make_agents(1, entropy_coef=0.1)
    mask = torch.tensor([[True, False, True]])
    entropy = torch.tensor([[1.0, 9.0, 3.0]], requires_grad=True)
    loss = agent.objective(loss_inputs(torch.zeros(1, 3), mask, entropy=entropy), MetricReducer())
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * (1 + 3) / 2)
    assert entropy.grad.tolist() == [pytest.approx([-0.05, 0.0, -0.05])]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), GOLDEN)
def test_golden_gae_skips_environment_tokens(gamma: float, lam: float, gaps: bool) -> None:
    (agent,) = make_agents(1, gamma=gamma, gae_lambda=lam, whiten_advantages=False)
    batch, values, mask = five_tokens(gaps)
    advantages, kept, returns = agent.credit(batch, values)
    assert advantages[mask].tolist() == pytest.approx(GOLDEN[gamma, lam], abs=1e-6)
    assert returns[mask].tolist() == pytest.approx([a + v for a, v in zip(GOLDEN[gamma, lam], V)], abs=1e-6)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()
    assert kept[mask].tolist() == pytest.approx(V)


def test_golden_whitening() -> None:
    (agent,) = make_agents(1, gae_lambda=0.95)
    batch, values, mask = five_tokens(gaps=True)
    advantages, _, returns = agent.credit(batch, values)
    assert advantages[mask].tolist() == pytest.approx(WHITE, abs=1e-5)
    assert returns[mask].tolist() == pytest.approx([a + v for a, v in zip(GOLDEN[1.0, 0.95], V)], abs=1e-6)


def loss_inputs(logp: torch.Tensor, mask: torch.Tensor, **changes: Any) -> LossInputs:
    zeros = torch.zeros_like(logp.detach())
    turns = torch.full(mask.shape, -1)
    values = {"old_logp": logp.detach(), "advantages": zeros, "turn_ids": turns, "values": zeros, "old_values": zeros}
    return LossInputs(
        **{"logp": logp, "mask": mask, "denominator": float(mask.sum()), "returns": zeros, **values, **changes}
    )


@pytest.mark.parametrize("vf_coef", [1.0, 0.5])
def test_golden_value_loss(vf_coef: float) -> None:
    (agent,) = make_agents(1, vf_coef=vf_coef)
    mask = torch.ones(1, 5, dtype=torch.bool)
    new = torch.tensor([[0.4, 0.1, 0.5, 0.3, 0.0]], requires_grad=True)
    targets = torch.tensor([[a + v for a, v in zip(GOLDEN[1.0, 0.95], V)]])
    metrics = MetricReducer()
    inputs = loss_inputs(torch.zeros(1, 5), mask, values=new, old_values=torch.tensor([V]), returns=targets)
    loss = agent.objective(inputs, metrics)
    loss.backward()
    assert loss.item() == pytest.approx(vf_coef * 0.27083329, abs=1e-7)
    assert metrics.result()["value_loss"] == pytest.approx(0.27083329, abs=1e-7)
    # 0.4 lies outside [-0.1, 0.3] and 0.5 outside [-0.05, 0.35], both towards the target: their gradient stops.
    assert metrics.result()["vf_clipfrac"] == pytest.approx(2 / 5)
    assert (new.grad[0] == 0).tolist() == [True, False, True, False, False]


def test_golden_clipped_surrogate_is_the_mean_over_tokens() -> None:
    """The fixture of the shared golden file: token-mean, clip 0.2, advantages of the group."""
    (agent,) = make_agents(1, beta=0.0)
    rows = range(4)
    logp = torch.tensor([[-0.5 - 0.1 * ((3 * i + 2 * t) % 7) for t in range(5)] for i in rows])
    old = logp - torch.tensor([[0.1 * (((5 * i + 3 * t) % 9) - 4) for t in range(5)] for i in rows])
    mask = torch.arange(5) < torch.tensor([5, 3, 4, 2])[:, None]
    advantages = torch.tensor([0.7070068, -0.7070068, 0.7067736, -0.7067736])[:, None].expand(4, 5)
    metrics = MetricReducer()
    loss = agent.objective(loss_inputs(logp, mask, old_logp=old, advantages=advantages), metrics)
    assert float(loss) == pytest.approx(-0.13101213, abs=1e-6)
    ratio = (logp - old)[mask]
    assert metrics.result()["approx_kl"] == pytest.approx(float((ratio.exp() - 1 - ratio).mean()), abs=1e-6)


def test_prepare_reads_the_critic_itself() -> None:
    (agent,) = make_agents(1)
    batch = batch_of(agent)
    e = agent.prepare(batch)
    mask = batch.action_mask
    values = fixed_values(agent.runtime, agent.critic_slot, batch, MicroBatch(3))
    assert values[mask].std() > 0.01
    assert torch.allclose(e.old_values, values, atol=1e-5)
    # gamma = lambda = 1: every token's target is the reward of the episode.
    assert torch.allclose(e.returns[mask], batch.rewards.expand(mask.shape)[mask], atol=1e-5)
    raw = (batch.rewards - values)[mask]
    assert torch.allclose(e.advantages[mask], (raw - raw.mean()) / raw.std(), atol=1e-3)
    left = 1 - raw.var(unbiased=False) / e.returns[mask].var(unbiased=False)
    assert e.metrics["explained_variance"] == pytest.approx(float(left), abs=1e-4)


# -- turns -----------------------------------------------------------------------------------------------------------


def two_turns(rewards: list[float]) -> tuple[RolloutBatch, torch.Tensor]:
    """One row: turn 0 of two tokens, an environment token, turn 1 of one token."""
    t = Trajectory([5], [6, 7, 8, 9], [True, True, False, True], [0.0] * 4, rewards, turn_ids=[0, 0, -1, 1])
    batch = collate([t], PAD)
    values = torch.zeros(batch.action_mask.shape)
    values[0, :4] = torch.tensor([0.2, 0.4, 9.9, 0.5])
    return batch, values


@pytest.mark.parametrize(
    ("settings", "advantages", "returns"),
    [
        # Turn 1: 1 - 0.5 = 0.5. Turn 0: 0.3 + 0.9 * 0.5 - 0.4 + 0.9 * 0.8 * 0.5 = 0.71.
        ({}, [0.71, 0.71, 0, 0.5], [1.11, 1.11, 0, 1.0]),
        # Its value is the mean 0.3: 0.3 + 0.45 - 0.3 + 0.36 = 0.81, and 0.81 + 0.3 = 1.11.
        ({"turn_value_reduction": "mean"}, [0.81, 0.81, 0, 0.5], [1.11, 1.11, 0, 1.0]),
        # Tokens: 0.5; 0.3 + 0.45 - 0.4 + 0.72 * 0.5 = 0.71; 0 + 0.9 * 0.4 - 0.2 + 0.72 * 0.71 = 0.6712.
        ({"advantage_granularity": "token"}, [0.6712, 0.71, 0, 0.5], [0.8712, 1.11, 0, 1.0]),
        ({"turn_level_clip": False}, [0.6712, 0.71, 0, 0.5], [0.8712, 1.11, 0, 1.0]),
    ],
)
def test_credit_by_turn_and_by_token(settings: dict[str, Any], advantages: list[float], returns: list[float]) -> None:
    (agent,) = make_agents(1, gamma=0.9, gae_lambda=0.8, whiten_advantages=False, **settings)
    batch, values = two_turns([0.3, 1.0])
    found, _, targets = agent.credit(batch, values)
    assert found[0, :4].tolist() == pytest.approx(advantages, abs=1e-6)
    assert targets[0, :4].tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_kl_in_the_reward(level: str) -> None:
    (agent,) = make_agents(1, beta=0.1, kl_placement="reward", advantage_granularity=level, whiten_advantages=False)
    batch, values = two_turns([0.0, 1.0])
    kl = torch.zeros(values.shape)
    kl[0, :4] = torch.tensor([1.0, 2.0, 50.0, 3.0])
    _, _, returns = agent.credit(batch, torch.zeros_like(values), kl)
    # The rewards to come: 1 - 0.3 at the end, less 0.2 and 0.1 for the first two tokens; the environment's KL is none.
    expected = [0.4, 0.4, 0, 0.7] if level == "turn" else [0.4, 0.5, 0, 0.7]
    assert returns[0, :4].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_only_reward_of_an_episode_belongs_to_its_last_turn() -> None:
    (agent,) = make_agents(1)
    batch, _ = two_turns([0.5])
    assert agent.prepare(batch).batch.rewards.tolist() == [[0.0, 0.5]]
    three = replace(batch, turn_ids=torch.where(batch.turn_ids == 1, 2, batch.turn_ids), rewards=torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"3 turns.* 2 columns"):
        agent.prepare(three)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_turn_s_ratio_is_pooled(pooling: str) -> None:
    (agent,) = make_agents(1, turn_ratio_pooling=pooling, beta=0.0)
    turns = torch.tensor([[0, 0, -1, 1]])
    old = torch.tensor([[-0.01, -0.05, -9.0, -0.03]])  # log-ratios 0.01, 0.05, -, 0.03
    inputs = loss_inputs(torch.zeros(1, 4), turns >= 0, old_logp=old, turn_ids=turns, advantages=torch.ones(1, 4))
    metrics = MetricReducer()
    loss = agent.objective(inputs, metrics)
    first = 0.06 if pooling == "sum" else 0.03
    assert float(loss) == pytest.approx(-(2 * np.exp(first) + np.exp(0.03)) / 3, abs=1e-6)
    assert metrics.result()["is_ratio/max"] == pytest.approx(np.exp(first), abs=1e-6)


def test_single_turns_are_clipped_by_token_unless_the_user_insists() -> None:
    for granularity, by_turn in (("auto", False), ("token", False), ("turn", True)):
        (agent,) = make_agents(1, advantage_granularity=granularity)
        turn_ids = agent.prepare(batch_of(agent)).batch.turn_ids
        assert bool((turn_ids >= 0).any()) is by_turn
        assert bool((agent.prepare(turn_batch(agent)).batch.turn_ids >= 0).any())


def test_turns_of_one_token_are_tokens() -> None:
    outcomes = []
    for level in ("turn", "token"):
        (agent,) = make_agents(1, gae_lambda=0.9, advantage_granularity=level, turn_level_clip=level == "turn")
        batch = turn_batch(agent)
        first = torch.nn.functional.pad(batch.turn_ids, (1, 0), value=-1)[:, :-1] != batch.turn_ids
        mask = batch.action_mask & first
        batch = replace(batch, action_mask=mask, turn_ids=torch.where(mask, batch.turn_ids, -1))
        outcomes.append((agent.learn(batch), agent.runtime.store.exp_avg.clone()))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], abs=1e-6)
    assert torch.allclose(outcomes[0][1], outcomes[1][1], atol=1e-7)


@pytest.mark.parametrize("several", [False, True])
def test_micro_batches_accumulate_the_same_gradient_and_metrics(several: bool) -> None:
    results = []
    for micro in (None, 1, 2, 4):
        changes = {"batch_size": 16, "beta": 0.1, "micro_batch_size_per_gpu": micro, "max_grad_norm": None}
        (agent,) = make_agents(1, **changes)
        metrics = agent.learn(turn_batch(agent, 8) if several else batch_of(agent))
        store = agent.runtime.store
        results.append((store.exp_avg[[agent.slot, agent.critic_slot]].clone(), metrics))
    gradient, expected = results[0]
    assert (gradient.abs().sum(dim=1) > 0).all()
    for other, metrics in results[1:]:
        assert torch.allclose(other, gradient, rtol=1e-3, atol=1e-6)
        for name in ("loss", "value_loss", "vf_clipfrac", "explained_variance", "approx_kl", "kl", "policy_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(("reduction", "first"), [("final_value", 0.4), ("mean", 0.3)])
def test_the_value_of_a_turn_is_what_meets_its_return(reduction: str, first: float) -> None:
    (agent,) = make_agents(1, turn_value_reduction=reduction, vf_coef=1.0, vf_clip_coef=None)
    turns = torch.tensor([[0, 0, -1, 1]])
    values = torch.tensor([[0.2, 0.4, 9.9, 0.5]], requires_grad=True)
    returns = torch.tensor([[1.0, 1.0, 0.0, 2.0]])
    loss = agent.objective(
        loss_inputs(torch.zeros(1, 4), turns >= 0, values=values, returns=returns, turn_ids=turns), MetricReducer()
    )
    loss.backward()
    # The first turn's error counts once for each of its two tokens, the second's 1.5^2 / 2 once.
    assert loss.item() == pytest.approx((2 * (1 - first) ** 2 + 1.5**2) / 2 / 3, abs=1e-6)
    per_turn = -2 * (1 - first) / 3
    expected = [per_turn / 2, per_turn / 2] if reduction == "mean" else [0.0, per_turn]
    assert values.grad[0].tolist() == pytest.approx([*expected, 0.0, -1.5 / 3], abs=1e-6)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_kl_is_counted_once(placement: str) -> None:
    (agent,) = make_agents(1, beta=0.1, kl_placement=placement, kl_estimator="k2")
    mask, metrics = torch.ones(1, 2, dtype=torch.bool), MetricReducer()
    logp = torch.tensor([[-1.0, -2.0]])
    loss = agent.objective(loss_inputs(logp, mask, ref_logp=logp - torch.tensor([[1.0, 3.0]])), metrics)
    assert metrics.result()["kl"] == pytest.approx((0.5 + 4.5) / 2)
    assert float(loss) == pytest.approx(0.25 if placement == "loss" else 0.0)
