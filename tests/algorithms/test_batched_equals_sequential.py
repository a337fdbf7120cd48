"""One batch for all agents gives each the bits it would have had alone (fp32, CPU, one thread)."""

import pytest
import torch

from agilerl.algorithms.update import learn_together
from agilerl.data import collate
from tests.algorithms.conftest import batch_of, equal, make_agents, sample, weights
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


def train_together(rounds: int = 3) -> tuple[list, list]:
    agents, tokens = make_agents(), []
    for _ in range(rounds):
        rollouts = sample(agents)
        tokens.append([[t.token_ids for t in own] for own in rollouts])
        learn_together(agents, [collate(own, PAD) for own in rollouts])
    return [weights(a) for a in agents], tokens


def test_tokens_and_adapters_are_bit_identical() -> None:
    expected, tokens = train_together()
    for own in range(3):
        agents = make_agents()
        alone = []
        for _ in range(3):
            (rollout,) = sample([agents[own]])
            alone.append([t.token_ids for t in rollout])
            learn_together([agents[own]], [collate(rollout, PAD)])
        assert alone == [step[own] for step in tokens]
        assert equal(weights(agents[own]), expected[own])
        untouched = [i for i in range(3) if i != own]
        assert all(float(agents[own].runtime.store.steps[agents[i].slot]) == 0 for i in untouched)


def test_the_agents_really_differ_and_really_move() -> None:
    start = [weights(a) for a in make_agents()]
    expected, _ = train_together(1)
    for before, after in zip(start, expected):
        assert not equal(before, after)
    assert float(expected[0][-1]) == 2  # 16 rows by 8
    assert float(expected[1][-1]) == 3  # 12 rows by 4
    assert float(expected[2][-1]) == 2  # 20 rows by 20, two epochs


@pytest.mark.parametrize("max_tokens", [1, 600, 10**6])
def test_packing_changes_nothing(max_tokens: int) -> None:
    expected, _ = train_together(1)
    agents = make_agents()
    agents[0].runtime.max_tokens = max_tokens
    batches = [collate(own, PAD) for own in sample(agents)]
    metrics = learn_together(agents, batches)
    for own in range(3):
        assert equal(weights(agents[own]), expected[own])
        assert make_agents()[own].learn(batches[own]) == metrics[own]


def test_order_of_agents_changes_nothing() -> None:
    expected, _ = train_together(1)
    agents = make_agents()
    rollouts = sample(agents)
    learn_together(agents[::-1], [collate(own, PAD) for own in rollouts[::-1]])
    for agent, bits in zip(agents, expected):
        assert equal(weights(agent), bits)


@pytest.mark.parametrize("where", ["adapter", "reward", "advantage"])
def test_a_nan_in_one_agent_leaves_the_others_bits(where: str) -> None:
    expected, _ = train_together(1)
    agents = make_agents()
    batches = [collate(own, PAD) for own in sample(agents)]
    sick = agents[1]
    if where == "adapter":
        sick.runtime.store.factors[0][1][sick.slot, 3, 2] = float("nan")
    elif where == "reward":
        batches[1].rewards[0, 0] = float("inf")
    else:
        credit = sick.credit
        sick.credit = lambda *a: credit(*a) * float("nan")  # type: ignore[method-assign]
    before = weights(sick)
    metrics = learn_together(agents, batches)
    for i in (0, 2):
        assert equal(weights(agents[i]), expected[i])
        assert metrics[i]["skipped_steps"] == 0
    if where == "reward":
        return  # a reward that is not finite is no grade: the row is left out, the agent goes on
    after = weights(sick)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, after))
    assert metrics[1]["skipped_steps"] == 3


def test_micro_batches_accumulate_the_same_gradient() -> None:
    for norm in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"):
        results = []
        for micro in (None, 1, 2, 4):
            (agent,) = make_agents(1, loss_norm=norm, micro_batch_size_per_gpu=micro, batch_size=16, beta=0.1)
            metrics = agent.learn(batch_of(agent))
            results.append((agent.runtime.store.exp_avg[agent.slot].clone(), metrics))
        reference, expected = results[0]
        for gradient, metrics in results[1:]:
            assert torch.allclose(gradient, reference, rtol=1e-4, atol=1e-7), norm
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6), norm


def test_idle_rows_are_skipped_exactly() -> None:
    """Rows without advantage are not computed at beta 0; computing them changes no gradient."""
    outcomes = []
    for skip in (True, False):
        (agent,) = make_agents(1, batch_size=16)
        batch = batch_of(agent)
        batch.rewards[:8] = 0.5  # two groups that all scored alike
        if not skip:
            prepare = agent.prepare

            def compute_all(b, prepare=prepare):
                experience = prepare(b)
                return type(experience)(**{**vars(experience), "idle": None})

            agent.prepare = compute_all  # type: ignore[method-assign]
        agent.learn(batch)
        outcomes.append(agent.runtime.store.exp_avg[agent.slot].clone())
    assert outcomes[0].abs().sum() > 0
    assert torch.allclose(outcomes[0], outcomes[1], rtol=1e-4, atol=1e-8)
