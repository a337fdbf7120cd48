"""DAPO: one switch; dynamic sampling that refills the batch; length punished in tokens; truncated rows left out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, REINFORCE, GRPOConfig
from agilerl.algorithms.credit import shaped_rewards
from agilerl.data import RolloutBatch
from agilerl.envs.core import Row, Split
from agilerl.errors import ConfigError
from agilerl.population import Population
from agilerl.rollouts.engine import Rollout
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, equal, weights
from tests.algorithms.data_agents import embedded_runtime
from tests.algorithms.test_grpo_golden import MASK, batch
from tests.probes import ConstantTarget
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

PROMPTS = 6


class SomeFlat(ConstantTarget):
    """Every completion of some prompts earns the same; the others are paid by the parity of what they say."""

    def __init__(self, flat: str = "13579") -> None:
        super().__init__()
        self.flat = flat

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return 1.0 if row["question"] in self.flat else float(sum(map(ord, completion)) % 2)


class CountedRows(SomeFlat):
    """Remembers which training rows were asked for."""

    def __init__(self, flat: str = "13579") -> None:
        super().__init__(flat)
        self.asked: list[int] = []

    def row(self, split: Split, index: int) -> Row:
        if split == "train":
            self.asked.append(index)
        return super().row(split, index)


def make_agents(*settings: dict[str, Any]) -> list[GRPO]:
    runtime = embedded_runtime(scale=1.0)
    defaults = {"lr": 1e-2, "group_size": 8, "batch_size": 16, "beta": 0.0, "max_output_tokens": 3, "seed": 1}
    return [GRPO(runtime=runtime, index=i, **{**defaults, **own}) for i, own in enumerate(settings)]


def population(*settings: dict[str, Any], task: ConstantTarget | None = None) -> Population:
    return Population(make_agents(*settings), task or SomeFlat(), prompts_per_step=PROMPTS)


def groups(rollout: Rollout, index: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for t in rollout.batch(index):
        found.setdefault(t.group, []).append(t.episode_return)
    return found


# -- one switch ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def test_one_switch(runtime: Runtime) -> None:
    config = GRPO.dapo(runtime=runtime, pad_token_id=PAD, max_output_tokens=20).config
    assert (config.clip_range, config.loss_norm, config.beta) == ((0.8, 1.28), "token-mean", 0.0)
    assert (config.dynamic_sampling, config.overlong_cache_tokens, config.mask_truncated) == (True, 4, False)
    own = GRPO.dapo(runtime=runtime, pad_token_id=PAD, max_output_tokens=20, overlong_cache_tokens=7, beta=0.1).config
    assert (own.overlong_cache_tokens, own.beta) == (7, 0.1)
    given = GRPO.dapo(runtime=runtime, pad_token_id=PAD, config=GRPOConfig(max_output_tokens=10)).config
    assert given.overlong_cache_tokens == 2
    without = GRPO.dapo(runtime=runtime, pad_token_id=PAD, overlong_cache_tokens=None).config
    assert without.overlong_cache_tokens is None


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (GRPO.dapo, {}, r"GRPO.dapo .* max_output_tokens, found None"),
        (GRPO, {"overlong_cache_tokens": 5}, "overlong_cache_tokens=5 .*max_output_tokens .*found None"),
        (GRPO, {"overlong_cache_tokens": 5, "max_output_tokens": 4}, r"max_output_tokens .* found 4"),
        (REINFORCE, {"dynamic_sampling": True}, "REINFORCE .* dynamic_sampling"),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, make: Any, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(runtime=runtime, pad_token_id=PAD, **settings)


# -- dynamic sampling ------------------------------------------------------------------------------------------------


def test_the_batch_is_refilled() -> None:
    task = CountedRows()
    pop = population({"dynamic_sampling": True, "max_sampling_rounds": 20}, task=task)
    (agent,) = pop.agents
    for _ in range(2):
        position, asked = agent.position, len(task.asked)
        rollout = pop.rollout()
        kept = groups(rollout, 0)
        assert len(kept) == PROMPTS
        assert all(len(returns) == 8 and len(set(returns)) == 2 for returns in kept.values())
        sampled = len({t.group for t in rollout.trajectories[0]})
        assert sampled == PROMPTS + len(rollout.dropped[0]) > PROMPTS
        # The further prompts are the next ones of the stream: none is skipped and none comes twice.
        assert agent.position == position + sampled
        assert task.asked[asked:] == list(range(position, position + sampled))
        assert len(rollout.trajectories[0]) == sampled * 8
        metrics = pop.learn(rollout)[0]
        assert metrics["groups/kept"] == PROMPTS
        assert metrics["groups/dropped"] == metrics["groups/resampled"] == sampled - PROMPTS
        # What is reported of rewards is true of all samples, not only of those that were kept.
        everything = [t.episode_return for t in rollout.trajectories[0]]
        assert metrics["reward"] == pytest.approx(sum(everything) / len(everything))
        assert metrics["frac_reward_zero_std"] == pytest.approx(len(rollout.dropped[0]) / sampled)


def test_it_gives_up_after_its_rounds() -> None:
    pop = population({"dynamic_sampling": True, "max_sampling_rounds": 2})
    rollout = pop.rollout()
    kept = groups(rollout, 0)
    assert 0 < len(kept) < PROMPTS
    metrics = pop.learn(rollout)[0]
    assert metrics["groups/kept"] == len(kept)
    assert metrics["groups/kept"] + metrics["groups/dropped"] == PROMPTS + metrics["groups/resampled"]


def test_a_batch_without_any_variance_changes_nothing() -> None:
    pop = population({"dynamic_sampling": True, "max_sampling_rounds": 3}, task=SomeFlat("0123456789"))
    (agent,) = pop.agents
    before = weights(agent)
    metrics = pop.learn(pop.rollout())[0]
    assert equal(weights(agent), before)
    assert agent.position == 3 * PROMPTS
    assert (metrics["groups/kept"], metrics["groups/dropped"], metrics["reward"]) == (0, 3 * PROMPTS, 1.0)
    assert metrics["loss"] == 0.0


def test_who_does_not_ask_for_it_samples_once() -> None:
    pop = population({}, {"dynamic_sampling": True, "max_sampling_rounds": 20})
    rollout = pop.rollout()
    assert len(rollout.trajectories[0]) == len(rollout.batch(0)) == PROMPTS * 8
    assert pop.agents[0].position == PROMPTS < pop.agents[1].position
    metrics = pop.learn(rollout)
    assert not any(name.startswith("groups/") for name in metrics[0])
    assert metrics[1]["groups/kept"] == PROMPTS


def test_agents_sample_together_what_they_would_sample_alone() -> None:
    settings: list[dict[str, Any]] = [
        {"dynamic_sampling": True, "max_sampling_rounds": 20},
        {"group_size": 4},
        {"dynamic_sampling": True, "group_size": 3, "temperature": 0.8, "overlong_cache_tokens": 2},
    ]
    together = population(*settings)
    expected = []
    for _ in range(2):
        rollout = together.rollout()
        together.learn(rollout)
        expected.append({i: [t.token_ids for t in own] for i, own in rollout.trajectories.items()})
    for i in range(3):
        agents = make_agents(*settings)
        alone = Population([agents[i]], SomeFlat(), prompts_per_step=PROMPTS)
        for step in range(2):
            rollout = alone.rollout()
            alone.learn(rollout)
            assert [t.token_ids for t in rollout.trajectories[i]] == expected[step][i]
        assert equal(weights(agents[i]), weights(together.agents[i]))
        assert agents[i].position == together.agents[i].position


# -- length ----------------------------------------------------------------------------------------------------------


def agent(runtime: Runtime, **settings: Any) -> GRPO:
    defaults = {"beta": 0.0, "max_output_tokens": 5, "adv_norm": "mean_only"}
    return GRPO(runtime=runtime, pad_token_id=PAD, **{**defaults, **settings})


def test_the_punishment_is_in_tokens(runtime: Runtime) -> None:
    """Lengths 5, 3, 4, 2; limit 5, cache 2: nothing up to 3 tokens, -1/2 at 4, -1 at 5."""
    it = agent(runtime, overlong_cache_tokens=2)
    rewards = shaped_rewards(it.config, batch(), None, it.kl_coef)
    assert torch.allclose(rewards[:, 0], torch.tensor([1.0 - 1.0, 0.0, 0.5 - 0.5, 0.2]))
    credit = it.credit(batch())
    expected = torch.tensor([0.0, 0.0, -0.1, 0.1])[:, None]
    assert torch.allclose(credit, torch.where(MASK, expected, 0.0), atol=1e-7)


def test_every_turn_is_punished_for_its_own_length(runtime: Runtime) -> None:
    turn_ids = torch.tensor([[0, 0, 0, -1, 1, 1, -1, 2, 2, 2, 2], [0, 0, 0, 0, -1, 1, -1, -1, -1, -1, -1]])
    data = RolloutBatch(
        ids=torch.zeros(2, 12, dtype=torch.int64),
        lengths=torch.tensor([12, 7]),
        action_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rewards=torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, float("nan")]]),
        groups=torch.tensor([0, 0]),
    )
    it = agent(runtime, overlong_cache_tokens=2)
    expected = torch.tensor([[1.0, 1.0, 0.5], [-0.5, 0.0, float("nan")]])
    assert torch.allclose(shaped_rewards(it.config, data, None, it.kl_coef), expected, equal_nan=True)
    whole = replace(data, rewards=data.rewards.nansum(dim=1, keepdim=True))
    assert torch.allclose(shaped_rewards(it.config, whole, None, it.kl_coef), torch.tensor([[2.5], [-0.5]]))


def test_without_an_action_token_nothing_is_punished(runtime: Runtime) -> None:
    nothing = torch.zeros_like(MASK)
    data = replace(batch(), action_mask=nothing, turn_ids=torch.full_like(batch().turn_ids, -1))
    it = agent(runtime, overlong_cache_tokens=2)
    assert torch.equal(shaped_rewards(it.config, data, None, it.kl_coef), data.rewards)
    assert it.credit(data).abs().sum() == 0


def test_truncated_completions_are_left_out_but_count_in_the_baseline(runtime: Runtime) -> None:
    data = replace(batch(), truncated=torch.tensor([True, False, False, False]))
    plain, masked = agent(runtime).prepare(data), agent(runtime, mask_truncated=True).prepare(data)
    assert len(plain.batch) == 4
    assert len(masked.batch) == 3
    assert torch.equal(masked.advantages, plain.advantages[1:, : masked.advantages.shape[1]])


def test_leaving_out_the_longest_rows_cuts_everything_alike() -> None:
    """Rows of 40 and 12 tokens: without the long ones the batch is padded to less."""
    (it,) = make_agents({"mask_truncated": True, "beta": 0.1, "update_epochs": 2, "max_output_tokens": 40})
    data = batch_of(it)
    long = data.lengths > 32
    assert 0 < int(long.sum()) < len(data)
    experience = it.prepare(replace(data, truncated=long))
    width = experience.batch.action_mask.shape[1]
    assert width == 31
    assert experience.old_logp is not None
    assert experience.ref_logp is not None
    assert {x.shape[1] for x in (experience.advantages, experience.old_logp, experience.ref_logp)} == {width}
    metrics = it.learn(replace(data, truncated=long))
    assert metrics["skipped_steps"] == 0
