"""REINFORCE: returns by token, turn or trajectory, normalised over the batch; REINFORCE++ and its baseline."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, LLMREINFORCE, REINFORCE
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer, masked_whiten, reinforce_plus_plus, reinforce_plus_plus_baseline
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import FIXTURE, GOLDEN, MASK, batch, inputs
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, make: Any = REINFORCE, **settings: Any) -> REINFORCE:
    return make(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


def turns_batch() -> RolloutBatch:
    """Two rows: turns of 2 and 1 tokens with one of the environment between, and one turn of 3."""
    turn_ids = torch.tensor([[0, 0, -1, 1, -1], [0, 0, 0, -1, -1]])
    return RolloutBatch(
        ids=torch.zeros(2, 6, dtype=torch.int64),
        lengths=torch.tensor([5, 4]),
        action_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rewards=torch.tensor([[1.0, 3.0], [2.0, float("nan")]]),
        groups=torch.tensor([0, 0]),
    )


def test_documented_defaults(runtime: Runtime) -> None:
    config = REINFORCE(runtime=runtime, pad_token_id=PAD).config
    assert (config.beta, config.gamma, config.clip_coef) == (0.0, 1.0, 0.2)
    assert (config.ratio_level, config.advantage_level) == ("token", "token")
    assert LLMREINFORCE is REINFORCE


def test_token_returns_are_golden_and_whitened(runtime: Runtime) -> None:
    row = batch().select(slice(0, 1))
    row = replace(row, rewards=torch.tensor([[1.0]]), groups=torch.tensor([0]))
    credit = agent(runtime, gamma=0.9).credit(row)
    expected = torch.tensor([GOLDEN["token_returns gamma=.9 reward at last"]])
    assert torch.allclose(credit, masked_whiten(expected, row.action_mask), atol=1e-5)
    # Undiscounted, all tokens of a single row have the same return, and nothing is left after centring.
    assert torch.equal(agent(runtime).credit(row), torch.zeros(1, 5))


@pytest.mark.parametrize(
    ("level", "gamma", "returns"),
    [
        # The reward of a turn stands at its last action; environment tokens neither pay nor discount.
        ("token", 1.0, [[4, 4, 0, 3, 0], [2, 2, 2, 0, 0]]),
        ("token", 0.5, [[0.5 + 0.25 * 3, 1 + 0.5 * 3, 0, 3, 0], [0.5, 1, 2, 0, 0]]),
        ("turn", 1.0, [[4, 3], [2]]),
        ("turn", 0.5, [[1 + 0.5 * 3, 3], [2]]),
        ("trajectory", 1.0, [[4], [2]]),
    ],
)
def test_returns_at_every_level(runtime: Runtime, level: str, gamma: float, returns: list) -> None:
    data = turns_batch()
    credit = agent(runtime, advantage_granularity=level, gamma=gamma).credit(data)
    if level == "token":
        expected = masked_whiten(torch.tensor(returns, dtype=torch.float32), data.action_mask)
    else:
        # Whitened over units, not over tokens: a long turn weighs as much as a short one.
        cells = torch.tensor([float(value) for row in returns for value in row])
        white = iter((cells - cells.mean()) * torch.rsqrt(cells.var() + 1e-8))
        by_unit = [[next(white) for _ in row] for row in returns]
        expected = torch.zeros(2, 5)
        for i, j in data.action_mask.nonzero().tolist():
            expected[i, j] = by_unit[i][int(data.turn_ids[i, j]) if level == "turn" else 0]
    assert torch.allclose(credit, expected, atol=1e-5)
    assert (credit[~data.action_mask] == 0).all()


def test_the_kl_is_taken_off_where_it_arises(runtime: Runtime) -> None:
    data, kl = turns_batch(), torch.tensor([[1.0, 0.0, 9.0, 2.0, 9.0], [0.0, 0.0, 3.0, 9.0, 9.0]])
    settings = {"beta": 0.1, "kl_placement": "reward"}
    raw = torch.tensor([[3.7, 3.8, 0, 2.8, 0], [1.7, 1.7, 1.7, 0, 0]])  # returns of r - 0.1 kl
    token = agent(runtime, **settings).credit(data, torch.where(data.action_mask, kl, 0.0))
    assert torch.allclose(token, masked_whiten(raw, data.action_mask), atol=1e-5)
    turn = agent(runtime, advantage_granularity="turn", **settings).credit(data, torch.where(data.action_mask, kl, 0.0))
    cells = torch.tensor([3.7, 2.8, 1.7])
    white = (cells - cells.mean()) / cells.std()
    assert torch.allclose(turn[[0, 0, 1], [0, 3, 0]], white, atol=1e-4)


def test_reinforce_plus_plus_and_its_baseline(runtime: Runtime) -> None:
    data, rewards, kl = batch(), torch.tensor(FIXTURE["R"]), torch.where(MASK, torch.arange(5) * 0.1, 0.0)
    plain = agent(runtime, REINFORCE.plus_plus, beta=0.5)
    assert (plain.config.kl_placement, plain.config.kl_estimator) == ("reward", "k1")
    assert torch.equal(plain.credit(data, kl), reinforce_plus_plus(rewards, MASK, penalty=0.5 * kl))
    base = agent(runtime, REINFORCE.plus_plus_baseline)
    assert torch.equal(base.credit(data), reinforce_plus_plus_baseline(rewards, data.groups, MASK))
    # Centred rewards are +-0.5 and +-0.15 on 5, 3, 4 and 2 tokens: mean 1.3 / 14, the larger ones further out.
    by_row = base.credit(data)[:, 0]
    assert by_row[0] > by_row[2] > 0 > by_row[3] > by_row[1]
    # With several turns there is one reward, at the last action of all.
    turned = agent(runtime, REINFORCE.plus_plus, gamma=0.5).credit(turns_batch())
    raw = torch.tensor([[1.0, 2.0, 0, 4.0, 0], [0.5, 1.0, 2.0, 0, 0]])
    assert torch.allclose(turned, masked_whiten(raw, turns_batch().action_mask), atol=1e-5)


def test_the_objective_is_the_clipped_surrogate(runtime: Runtime) -> None:
    own, grpo = agent(runtime), GRPO(runtime=runtime, pad_token_id=PAD, beta=0.0)
    x = inputs(own)
    assert torch.equal(own.objective(x, MetricReducer()), grpo.objective(x, MetricReducer()))
    pooled = agent(runtime, importance_sampling_level="trajectory", ratio_pooling="sum")
    mean = agent(runtime, importance_sampling_level="trajectory")
    assert not torch.equal(pooled.objective(x, MetricReducer()), mean.objective(x, MetricReducer()))


def test_ungraded_rows_teach_nothing(runtime: Runtime) -> None:
    reinforce = agent(runtime)
    kept = reinforce.prepare(batch([1.0, 0.0, float("nan"), 0.5]))
    assert len(kept.batch) == 3
    assert torch.isfinite(kept.advantages).all()
    assert len(reinforce.prepare(batch([1.0, 0.0, float("inf"), 0.5])).batch) == 3
    assert len(reinforce.prepare(batch([float("nan")] * 4)).batch) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adv_norm": "mean_std"}, r"REINFORCE .* GRPO\(adv_norm='mean_std'\)"),
        (
            {"advantage_estimator": "reinforce++", "advantage_granularity": "turn"},
            r"token, found .* turn",
        ),
        (
            {"advantage_estimator": "reinforce++", "importance_sampling_level": "trajectory"},
            r"found .* trajectory; use advantage_granularity='token'",
        ),
        ({"advantage_estimator": "reinforce++-baseline", "group_size": 1}, "subtracts the mean of the group"),
        ({"gamma": 0.9, "advantage_granularity": "trajectory"}, "gamma=0.9"),
    ],
)
def test_contradictions_are_refused(runtime: Runtime, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent(runtime, **settings)


def test_no_group_is_needed(runtime: Runtime) -> None:
    assert agent(runtime, group_size=1).config.group_size == 1
