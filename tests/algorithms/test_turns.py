"""Ratios and advantages by token, turn and trajectory: two independent axes, on episodes of several turns."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, GSPO, REINFORCE, RLOO
from agilerl.data import LossInputs, RolloutBatch, Trajectory, collate
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.rollouts import GenerationRequest
from agilerl.runtime import Runtime
from agilerl.streams import stream
from tests.algorithms.conftest import equal, lora, weights
from tests.tiny_models import PAD, VOCABULARY, random_model

pytestmark = pytest.mark.model

# Turns of each row with their numbers of tokens; two groups of three. Not every row plays every turn.
TURNS = [[3, 2], [1, 4], [2], [2, 1, 3], [4, 2, 1], [1, 1]]


def combinations() -> list[tuple[type[GRPO], str | None, str]]:
    levels = ("token", "turn", "trajectory")
    units = ("trajectory", "turn")
    return [
        *((cls, level, unit) for cls in (GRPO, CISPO) for level, unit in product(levels, units)),
        *((cls, None, unit) for cls in (GSPO, RLOO) for unit in units),
        *((REINFORCE, level, unit) for level, unit in product(levels, ("token", *units))),
    ]


def agent(cls: type[GRPO], level: str | None, unit: str, runtime: Runtime | None = None, **settings: Any) -> GRPO:
    defaults = {"beta": 0.0, "batch_size": 3, "lr": 1e-2, "max_output_tokens": 9, "clip_coef": 0.2, "seed": 3}
    runtime = runtime or Runtime.for_model(random_model(), lora_config=lora(4), seed=3)
    level_of = {} if level is None else {"importance_sampling_level": level}
    return cls(
        runtime=runtime,
        pad_token_id=PAD,
        lora_config=lora(4),
        advantage_granularity=unit,
        **{**defaults, **level_of, **settings},
    )


def episodes() -> list[Trajectory]:
    """Episodes with two environment tokens between the turns."""
    found = []
    for i, turns in enumerate(TURNS):
        rng = stream(9, "episode", i)
        ids: list[int] = []
        mask: list[bool] = []
        turn_ids: list[int] = []
        for k, length in enumerate(turns):
            between = 2 if k else 0
            ids += rng.integers(2, VOCABULARY, between + length).tolist()
            mask += [False] * between + [True] * length
            turn_ids += [-1] * between + [k] * length
        logprobs = [float(x) if m else 0.0 for x, m in zip(-rng.uniform(3, 5, len(ids)), mask)]
        rewards = rng.uniform(0, 1, len(turns)).tolist()
        found.append(Trajectory([5, 6, 7], ids, mask, logprobs, rewards, group=i // 3, turn_ids=turn_ids))
    return found


def batch() -> RolloutBatch:
    return collate(episodes(), PAD)


def loss_inputs(it: GRPO, data: RolloutBatch) -> LossInputs:
    generator = torch.Generator().manual_seed(4)
    assert data.sampling_logps is not None
    noise = 0.3 * torch.randn(data.action_mask.shape, generator=generator)
    logp = torch.where(data.action_mask, data.sampling_logps + noise, 0.0).requires_grad_()
    return LossInputs(
        logp=logp,
        mask=data.action_mask,
        old_logp=data.sampling_logps,
        advantages=it.credit(data),
        denominator=it.window_denominator(data.action_mask),
        turn_ids=data.turn_ids,
    )


def slow_advantages(unit: str) -> list[list[float]]:
    """Group-relative advantages of each action token, from lists of numbers."""
    rows = episodes()

    def scaled(mine: float, all_of_them: list[float]) -> float:
        mean = sum(all_of_them) / len(all_of_them)
        if len(all_of_them) < 2:
            return 0.0
        std = math.sqrt(sum((x - mean) ** 2 for x in all_of_them) / (len(all_of_them) - 1))
        return (mine - mean) / (std + 1e-4)

    found = []
    for row in rows:
        group = [r for r in rows if r.group == row.group]
        whole = scaled(sum(row.rewards), [sum(r.rewards) for r in group])
        by_turn = []
        for k, reward in enumerate(row.rewards):
            others = [r.rewards[k] for r in group if k < len(r.rewards)]
            by_turn.append(scaled(reward, others) if len(others) > 1 else whole)
        found.append([whole if unit == "trajectory" else by_turn[k] for k in row.turn_ids if k >= 0])
    return found


def slow_loss(level: str, unit: str, x: LossInputs) -> float:
    """GRPO's loss, token by token."""
    total = 0.0
    for i, advantages in enumerate(slow_advantages(unit)):
        places = x.mask[i].nonzero()[:, 0].tolist()
        difference = {p: float(x.logp[i, p].detach() - x.old_logp[i, p]) for p in places}
        row = 0.0
        for p, a in zip(places, advantages):
            same = {
                "token": [p],
                "turn": [q for q in places if x.turn_ids[i, q] == x.turn_ids[i, p]],
                "trajectory": places,
            }[level]
            ratio = math.exp(sum(difference[q] for q in same) / len(same))
            row -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        total += row / len(places)
    return total / len(TURNS)


@pytest.mark.parametrize(("level", "unit"), product(("token", "turn", "trajectory"), ("trajectory", "turn")))
def test_every_combination_is_what_loops_over_numbers_give(level: str, unit: str) -> None:
    grpo, data = agent(GRPO, level, unit), batch()
    x = loss_inputs(grpo, data)
    assert grpo.objective(x, MetricReducer()).item() == pytest.approx(slow_loss(level, unit, x), abs=1e-5)


@pytest.mark.parametrize(("cls", "level", "unit"), combinations())
def test_every_valid_combination_trains(cls: type[GRPO], level: str | None, unit: str) -> None:
    it, data = agent(cls, level, unit, kl_placement="loss"), batch()
    before = weights(it)
    metrics = it.learn(data)
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["skipped_steps"] == 0
    assert metrics["reward"] == pytest.approx(float(data.returns.mean()), abs=1e-6)
    assert not equal(weights(it), before)
    x = loss_inputs(it, data)
    it.objective(x, MetricReducer()).backward()
    assert (x.logp.grad[~data.action_mask] == 0).all()


def test_the_combinations_differ() -> None:
    runtime, data = Runtime.for_model(random_model(), lora_config=lora(4), seed=3), batch()
    losses: dict[Any, float] = {}
    for cls, level, unit in combinations():
        it = agent(cls, level, unit, runtime, loss_norm="seq-mean-token-mean")
        losses[cls, level, unit] = round(it.objective(loss_inputs(it, data), MetricReducer()).item(), 7)
    twins = {(GRPO, "trajectory", u): (GSPO, None, u) for u in ("trajectory", "turn")}
    for one, other in twins.items():
        assert losses.pop(one) == losses[other]
    assert len(set(losses.values())) == len(losses)


def test_auto_follows_the_ratio() -> None:
    runtime = Runtime.for_model(random_model())
    for level, unit in (("token", "trajectory"), ("turn", "turn"), ("trajectory", "trajectory")):
        assert agent(GRPO, level, "auto", runtime).config.advantage_level == unit
    assert [agent(REINFORCE, x, "auto", runtime).config.advantage_level for x in ("token", "turn")] == ["token", "turn"]


# -- the documented call ---------------------------------------------------------------------------------------------


def documented(data: RolloutBatch) -> tuple[tuple[Any, Any, Any], torch.Tensor]:
    return (data.ids, data.action_mask, data.rewards), data.turn_ids


@pytest.mark.parametrize(("level", "unit"), product(("token", "turn"), ("trajectory", "turn")))
def test_learn_takes_turn_ids_and_rewards_of_each_turn(level: str, unit: str) -> None:
    data = batch()
    results = []
    for direct in (True, False):
        it = agent(GRPO, level, unit, group_size=3, update_epochs=2)
        if direct:
            it.learn(replace(data, truncated=None, sampling_logps=None))
        else:
            experiences, turn_ids = documented(data)
            it.learn(experiences, turn_ids=turn_ids)
        results.append(weights(it))
    assert equal(*results)


@pytest.mark.parametrize("cls", [GRPO, REINFORCE])
def test_credit_by_turn_needs_a_reward_for_each_turn(cls: type[GRPO]) -> None:
    it, data = agent(cls, "token", "turn", group_size=3), batch()
    with pytest.raises(ConfigError, match=r"3 turns.* for 1"):
        it.learn((data.ids, data.action_mask, data.rewards.nansum(dim=1)), turn_ids=data.turn_ids)


def test_one_reward_for_several_turns_serves_trajectories() -> None:
    data = batch()
    whole = replace(data, rewards=data.rewards.nansum(dim=1, keepdim=True))
    it = agent(GRPO, "turn", "trajectory")
    assert torch.allclose(it.credit(whole), it.credit(data), atol=1e-6)
    # The KL of all turns is taken off it, wherever there is a place for it.
    kl = torch.where(data.action_mask, torch.arange(data.action_mask.shape[1]) * 0.1, 0.0)
    it = agent(GRPO, "turn", "trajectory", beta=0.1, kl_placement="reward")
    assert torch.allclose(it.credit(whole, kl), it.credit(data, kl), atol=1e-6)
    reinforce = agent(REINFORCE, "token", "token", gamma=0.9)
    first = reinforce.credit(whole)[0][data.action_mask[0]]
    assert (first.diff() > 0).all()  # one reward, at the very end


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "level", "unit"), [(GRPO, "turn", "turn"), (REINFORCE, "turn", "turn")])
def test_each_turn_learns_its_own_lesson(cls: type[GRPO], level: str, unit: str) -> None:
    """Two turns of one token: the first is paid for low numbers, the second, after a foreign token, for high."""
    it = agent(cls, level, unit, lr=2e-2, batch_size=64, group_size=64, max_output_tokens=1)
    rewards: list[float] = []
    for _ in range(12):
        (first,) = sample(it, [[5, 6]])
        prompts = [[5, 6, *c.token_ids, 4] for c in first]
        second = [group[0] for group in sample(it, prompts, samples=1)]
        episodes = [
            Trajectory(
                [5, 6],
                [*a.token_ids, 4, *b.token_ids],
                [True, False, True],
                [*a.logprobs, 0.0, *b.logprobs],
                [float(a.token_ids[0] < 16), float(b.token_ids[0] >= 48)],
                turn_ids=[0, -1, 1],
            )
            for a, b in zip(first, second)
        ]
        rewards.append(sum(t.episode_return for t in episodes) / len(episodes))
        it.learn(collate(episodes, PAD))
    assert rewards[0] < 0.8
    assert rewards[-1] > 1.8


def sample(it: GRPO, prompts: list[list[int]], samples: int = 64) -> list[list[Any]]:
    requests = [
        GenerationRequest(it.slot, ids, samples, it.sampling(len(ids)), key=(it.rollouts, n))
        for n, ids in enumerate(prompts)
    ]
    it.rollouts += 1
    return it.runtime.engine.generate(requests)
