"""What agents learn from each other: the elite's policy, and completions that others have sampled."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.sharing import Lesson, Sharing, borrowable, load_teacher, with_borrowed, with_teacher
from agilerl.algorithms.update import learn_together
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.envs.datasets import DatasetTask
from agilerl.errors import CheckpointError, ConfigError
from agilerl.functional import (
    borrowed_advantages,
    broadcast_rows,
    distillation_advantages,
    group_advantages,
    mismatch_weights,
)
from agilerl.population import Population
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, sample, weights
from tests.algorithms.data_agents import embedded_runtime
from tests.tiny_models import PAD, random_model

TOKENS = 5


def distribution(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- mathematics, in fp64 over every completion there is --------------------------------------------------------------


def test_the_expected_gradient_of_distillation_is_that_of_the_kl() -> None:
    logits = distribution(0).requires_grad_()
    teacher = distribution(1).log_softmax(0)
    logp = logits.log_softmax(0)
    found = []
    for token in range(TOKENS):  # beside another row, which may be anything
        rows, mask = torch.tensor([[token, 0], [3, 1]]), torch.tensor([[True, False], [True, True]])
        both = distillation_advantages(logp[rows], teacher[rows], mask, 0.3)
        assert not both.requires_grad
        assert both[0, 1] == 0
        found.append(both[0, 0])
    advantages = torch.stack(found)
    (policy,) = torch.autograd.grad((logp.exp().detach() * advantages * logp).sum(), logits, retain_graph=True)
    (kl,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)
    assert torch.allclose(policy, -0.3 * kl, atol=1e-15)
    alone = distillation_advantages(logp[:1, None], teacher[:1, None], torch.ones(1, 1, dtype=torch.bool), 1.0)
    assert torch.allclose(alone[0, 0], teacher[0] - logp[0])


def test_the_expected_gradient_of_borrowed_completions_is_that_of_ones_own() -> None:
    """Completions of two tokens; the weight is the ratio of the whole completion, and nothing is cut."""
    logits, sampler = distribution(0).requires_grad_(), distribution(1).log_softmax(0)
    reward = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOKENS))
    logp, theirs = logits.log_softmax(0)[pairs], sampler[pairs]
    rewards, mask = reward[pairs].sum(1), torch.ones(len(pairs), 2, dtype=torch.bool)
    groups, own = torch.zeros(len(pairs), dtype=torch.int64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    by_row = borrowed_advantages(rewards, groups, own, torch.zeros(3, dtype=torch.int64), norm="mean_only")
    ratios = mismatch_weights(logp.detach(), theirs, mask, "seq_truncate", 1e9)

    def gradient(chance: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        total = (chance.detach() * (broadcast_rows(by_row, mask) * factor * logp).sum(1)).sum()
        (found,) = torch.autograd.grad(total, logits, retain_graph=True)
        return found

    expected = gradient(logp.sum(1).exp(), torch.ones_like(logp))
    assert torch.allclose(gradient(theirs.sum(1).exp(), ratios), expected, atol=1e-14)
    # The baseline does not move it: it cannot, as long as it does not depend on the row.
    plain = (logp.sum(1).exp().detach() * rewards * logp.sum(1)).sum()
    (without,) = torch.autograd.grad(plain, logits, retain_graph=True)
    assert torch.allclose(expected, without, atol=1e-14)
    cut = mismatch_weights(logp.detach(), theirs, mask, "seq_truncate", 1.0)
    assert not torch.allclose(gradient(theirs.sum(1).exp(), cut), expected, atol=1e-3)  # what the cap costs


@pytest.mark.parametrize("norm", ["mean_std", "mean_only", "batch_std", "mean"])
def test_a_borrowed_row_is_measured_as_ones_own_is(norm: Any) -> None:
    own, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    expected = group_advantages(own, groups, norm=norm)
    found = borrowed_advantages(own, groups, own, groups, norm=norm)
    assert torch.allclose(found, expected, atol=1e-12)


def test_where_all_of_ones_own_earned_the_same() -> None:
    own, groups = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    found = borrowed_advantages(torch.tensor([1.0, 0.0]), groups[:2], own, groups)
    spread = torch.tensor([0.0, 0, 0, 0, 1, 0]).std()
    assert torch.allclose(found, torch.tensor([1.0, 0.0]) / (spread + 1e-4))
    assert borrowed_advantages(torch.tensor([0.0]), groups[:1], own, groups).tolist() == [0.0]
    assert borrowed_advantages(torch.tensor([1.0]), groups[:1], own, groups, norm="mean").tolist() == [0.0]


def test_without_a_grade_or_a_group_there_is_no_advantage() -> None:
    own, groups = torch.tensor([1.0, 0.0, np.nan]), torch.tensor([0, 0, 7])
    rewards, theirs = torch.tensor([np.nan, 1.0, 1.0]), torch.tensor([0, 5, 7])
    assert borrowed_advantages(rewards, theirs, own, groups).tolist() == [0.0, 0.0, 0.0]
    assert borrowed_advantages(rewards[:0], theirs[:0], own, groups).tolist() == []
    assert borrowed_advantages(rewards, theirs, own[:0], groups[:0]).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"own_rewards \[B\].*own_groups"):
        borrowed_advantages(rewards, theirs, own, groups[:2])


# -- which completions are lent ---------------------------------------------------------------------------------------


def row(prompt: int, text: int, reward: float, group: int = 0, **changes: Any) -> Trajectory:
    return Trajectory([1, prompt], [text], [True], [-1.0], [reward], group=group, row={"answer": prompt}, **changes)


def test_others_lend_in_turn_and_to_the_group_of_the_prompt() -> None:
    own = [row(5, 1, 0.0, group=3), row(5, 2, 0.0, group=3), row(6, 1, 1.0, group=4), row(6, 2, 0.0, group=4)]
    one = [row(5, 11, 1.0), row(5, 12, 0.0), row(6, 13, 0.0, group=1)]
    two = [row(5, 21, 0.0, group=8), row(9, 22, 1.0)]
    found = borrowable(own, [one, two], 2, "flat")
    assert [(t.group, t.token_ids) for t in found] == [(3, [11]), (3, [21])]
    found = borrowable(own, [one, two], 3, "all")
    assert [(t.group, t.token_ids) for t in found] == [(3, [11]), (3, [21]), (3, [12]), (4, [13])]


def test_what_is_not_lent() -> None:
    own = [row(5, 1, 0.0), row(5, 2, 0.0)]
    others = [row(5, 3, float("nan")), replace(row(5, 4, 1.0), logprobs=None), row(5, 5, 1.0, finish_reason="error")]
    assert borrowable(own, [others], 8, "all") == []
    other_question = [replace(row(5, 6, 1.0), row={"answer": 77})]
    assert borrowable(own, [other_question], 8, "all") == []


# -- on agents --------------------------------------------------------------------------------------------------------


def prepared(agents: list[GRPO]) -> tuple[RolloutBatch, RolloutBatch]:
    """The batch of the first agent, and what the second lends it, of the same prompts."""
    first, second = sample(agents[:2])
    lent = borrowable(first, [second], 3, "all")
    return collate(first, PAD), collate(lent, PAD)


def pair(**changes: Any) -> list[GRPO]:
    settings = {"temperature": 1.0, "group_size": 4, "batch_size": 64, "beta": 0.0, "lr": 1e-3, "update_epochs": 1}
    return make_agents(3, **{**settings, **changes})


@pytest.mark.model
def test_ones_own_rows_stay_what_they_are() -> None:
    agents = pair(batch_size=8)
    own, lent = prepared(agents)
    alone = agents[0].prepare(own)
    found = with_borrowed(agents[0], alone, own, lent, 2.0)
    count = len(alone)
    assert len(found) > count
    assert torch.equal(found.advantages[:count, : alone.advantages.shape[1]], alone.advantages)
    assert torch.equal(found.batch.ids[:count, : own.ids.shape[1]], own.ids)
    assert found.old_logp is not None
    assert alone.old_logp is not None
    assert torch.equal(found.old_logp[:count, : alone.old_logp.shape[1]], alone.old_logp)
    now = agents[0].logprobs(found.batch.select(slice(count, None)))
    assert torch.allclose(found.old_logp[count:, : now.shape[1]], now, atol=1e-6)  # its own, not the sampler's


@pytest.mark.model
def test_a_twins_completions_weigh_one() -> None:
    agents = pair()
    own, lent = prepared(agents)  # adapters that have learned nothing are all the base
    found = with_borrowed(agents[0], agents[0].prepare(own), own, lent, 2.0)
    assert found.metrics["sharing/weight"] == pytest.approx(1.0, abs=1e-4)
    both = lent.select(torch.arange(len(lent)))
    by_row = borrowed_advantages(both.returns, both.groups, own.returns, own.groups)
    kept = by_row[by_row != 0]
    assert torch.allclose(found.advantages[len(own) :].abs().amax(1), kept.abs(), rtol=1e-3)


@pytest.mark.model
def test_without_a_grade_of_ones_own_nothing_is_borrowed() -> None:
    agents = pair()
    own, lent = prepared(agents)
    own = replace(own, rewards=torch.full_like(own.rewards, torch.nan))
    alone = agents[0].prepare(own)
    assert with_borrowed(agents[0], alone, own, lent, 2.0) is alone


@pytest.mark.model
def test_an_agents_update_is_the_same_whoever_shares_the_batch() -> None:
    """Its lesson is part of what it learns from; who else is computed beside it is not."""

    def lessons() -> tuple[list[GRPO], list[RolloutBatch], list[Lesson]]:
        agents = pair(batch_size=8)
        for agent in agents:
            agent.learn(batch_of(agent))
        rollouts = sample(agents)
        batches = [collate(own, PAD) for own in rollouts]
        given = []
        for i, own in enumerate(rollouts):
            rows = borrowable(own, [r for k, r in enumerate(rollouts) if k != i], 3, "all")
            given.append(Lesson(collate(rows, PAD), 2.0, agents[0].slot if i else None, 0.3))
        return agents, batches, given

    agents, batches, given = lessons()
    learn_together(agents, batches, lessons=given)
    together = [weights(agent) for agent in agents]
    for i in (2, 1, 0):  # the teacher last: it is the policy before this update that teaches
        agents, batches, given = lessons()
        learn_together([agents[i]], [batches[i]], lessons=[given[i]])
        assert equal(weights(agents[i]), together[i])
    plain, batches, _ = lessons()
    learn_together(plain, batches)
    assert not any(equal(weights(agent), bits) for agent, bits in zip(plain, together))


@pytest.mark.model
def test_an_agent_without_a_success_of_its_own_learns_from_those_of_others() -> None:
    agents = pair(lr=1e-2)
    own, lent = prepared(agents)
    own.rewards[:] = 0.0  # every group is flat
    good = lent.ids[torch.arange(len(lent)), lent.lengths - 1] % 2 == 0
    lent.rewards[:] = good.float()[:, None]
    agent, rows = agents[0], lent.select(good)
    before = agent.logprobs(rows).sum()
    alone = agents[2]
    learn_together([alone], [own])
    for _ in range(5):
        metrics = learn_together([agent], [own], lessons=[Lesson(lent)])[0]
    assert metrics["sharing/rows"] > 0
    assert metrics["reward"] == 0  # of its own completions
    assert agent.logprobs(rows).sum() > before + 1
    assert alone.runtime.store.exp_avg[alone.slot].abs().sum() == 0  # without a lesson nothing moves


@pytest.mark.model
def test_a_student_comes_near_its_teacher() -> None:
    agents = pair(lr=1e-2, group_size=16)
    teacher, student = agents[:2]
    store = teacher.runtime.store
    g = torch.Generator().manual_seed(1)
    factors = [(a, 0.3 * torch.randn(b.shape, generator=g)) for a, b in store.adapter(teacher.slot)]
    store.load_adapter(teacher.slot, factors)
    fixed, gaps = weights(teacher), []
    for _ in range(25):
        student.position = 0  # the same prompts again
        batch = batch_of(student, prompts=2)
        batch.rewards[:] = 0.0  # there is nothing else to learn from
        tokens = student.tokens["trained"]
        metrics = learn_together([student], [batch], lessons=[Lesson(teacher=teacher.slot, weight=1.0)])[0]
        gaps.append(metrics["sharing/teacher_kl"])
        assert student.tokens["trained"] - tokens == 2 * int(batch.lengths.sum())  # the teacher's forward counts
    assert np.mean(gaps[-5:]) < 0.75 * np.mean(gaps[:5])
    assert equal(weights(teacher), fixed)


@pytest.mark.model
def test_idle_rows_are_taught_too() -> None:
    agents = pair()
    batch = batch_of(agents[0])
    batch.rewards[:] = 1.0
    plain = agents[0].prepare(batch)
    assert plain.idle is not None
    assert plain.idle.all()
    store = agents[1].runtime.store
    store.load_adapter(agents[1].slot, [(a, b + 0.1) for a, b in store.adapter(agents[1].slot)])
    taught = with_teacher(agents[0], plain, agents[1].slot, 0.5)
    assert taught.idle is not None
    assert not taught.idle.any()


@pytest.mark.model
@pytest.mark.parametrize("folder", ["agent", pytest.param("agent/actor", marks=pytest.mark.nightly)])
def test_a_saved_adapter_teaches_every_agent_of_a_population(tmp_path: Path, folder: str) -> None:
    """Its slot holds the policy that was saved; students come near it, alone as in company."""

    def population(places: tuple[int, ...] = (0, 1)) -> Population:
        runtime = embedded_runtime()
        agents = [
            GRPO(runtime=runtime, index=i, seed=5, lr=1e-2, beta=0.0, group_size=24, max_output_tokens=4, batch_size=96)
            for i in places
        ]
        rows = [{"question": str(i), "answer": "0"} for i in range(4)]
        task = DatasetTask(rows, rows, reward_fn=lambda completion, answer, question: 0.0)
        return Population(
            agents, task, prompts_per_step=4, sharing=Sharing(distillation=1.0, teacher=tmp_path / folder)
        )

    runtime = embedded_runtime()
    teacher = GRPO(runtime=runtime, seed=5)
    g = torch.Generator().manual_seed(1)
    factors = [(a, 0.3 * torch.randn(b.shape, generator=g)) for a, b in runtime.store.adapter(teacher.slot)]
    runtime.store.load_adapter(teacher.slot, factors)
    teacher.save_checkpoint(tmp_path / "agent")
    both, found = population(), []
    for _ in range(20):
        found.append([m["sharing/teacher_kl"] for m in both.learn(both.rollout()).values()])
    gaps = np.array(found)
    assert (gaps[-4:].mean(0) < 0.75 * gaps[:4].mean(0)).all()
    for place in (0, 1):
        alone = population((place,))
        for _ in range(20):
            alone.learn(alone.rollout())
        assert equal(weights(alone.agents[0]), weights(both.agents[place]))
    slot = both._teaching.teacher
    assert slot is not None
    for own, saved in zip(both.runtime.store.adapter(slot), factors):
        assert torch.equal(own[0], saved[0])
        assert torch.equal(own[1], saved[1])
    used = both.runtime.store.used
    store = both.runtime.store
    del both
    gc.collect()
    assert store.used < used


@pytest.mark.model
def test_a_teacher_must_fit(tmp_path: Path) -> None:
    (agent,) = make_agents(1)
    with pytest.raises(CheckpointError, match="adapter_config"):
        load_teacher(agent.runtime, tmp_path)
    wide = GRPO(runtime=Runtime.for_model(random_model(), lora_config=lora(16), seed=5), pad_token_id=PAD)
    wide.save_checkpoint(tmp_path / "wide")
    with pytest.raises(ConfigError, match="rank 16"):
        load_teacher(agent.runtime, tmp_path / "wide")


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta": 0.1}, r"found that beta=0.1 holds the KL"),
        ({"whiten_advantages": True}, r"whiten_advantages=True"),
        ({"advantage_granularity": "turn"}, r"advantages go by turn"),
    ],
)
@pytest.mark.model
def test_agents_that_cannot_borrow(changes: dict[str, Any], words: str) -> None:
    agents = pair(**changes)
    own, lent = prepared(agents)
    with pytest.raises(ConfigError, match=words):
        with_borrowed(agents[0], agents[0].prepare(own), own, lent, 2.0)


@pytest.mark.parametrize("wrong", [{"distillation": -1}, {"experience": -1}, {"experience_cap": 0}])
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sharing(**wrong)


def test_a_teacher_needs_a_weight() -> None:
    with pytest.raises(ConfigError, match="distillation is 0"):
        Sharing(teacher="somewhere")


def test_off_is_false() -> None:
    assert not Sharing()
    assert Sharing(distillation=0.1)
    assert Sharing(experience=1)
