"""GRPO's own objective and credit, switch by switch, against the golden numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.data import LossInputs, RolloutBatch
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

LINES = (Path(__file__).parents[1] / "functional" / "golden.txt").read_text().splitlines()
FIXTURE = json.loads(LINES[0])
GOLDEN = {key: json.loads(value) for key, _, value in (line.rpartition(" = ") for line in LINES[1:])}
MASK = torch.arange(5) < torch.tensor(FIXTURE["LEN"])[:, None]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, **settings: Any) -> GRPO:
    defaults = {"beta": 0.0, "max_output_tokens": 8}
    return GRPO(runtime=runtime, pad_token_id=PAD, **{**defaults, **settings})


def batch(rewards: list[float] = FIXTURE["R"]) -> RolloutBatch:
    return RolloutBatch(
        ids=torch.zeros(4, 6, dtype=torch.int64),
        lengths=torch.tensor(FIXTURE["LEN"]) + 1,
        action_mask=MASK,
        turn_ids=torch.where(MASK, 0, -1),
        rewards=torch.tensor(rewards)[:, None],
        groups=torch.tensor([0, 0, 1, 1]),
    )


def inputs(grpo: GRPO, sampled: bool = False) -> LossInputs:
    tensors = {name: torch.tensor(FIXTURE[name]).masked_fill(~MASK, 0.0) for name in ("LP", "OLD", "REF", "SMP")}
    return LossInputs(
        logp=tensors["LP"].requires_grad_(),
        mask=MASK,
        old_logp=tensors["OLD"],
        advantages=grpo.credit(batch()),
        denominator=grpo.window_denominator(MASK),
        ref_logp=tensors["REF"] if grpo.config.beta else None,
        sampling_logp=tensors["SMP"] if sampled else None,
        turn_ids=batch().turn_ids,
    )


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("grpo b=0", {}),
        ("bnpo/token-mean b=0 (dapo single micro-batch)", {"loss_norm": "token-mean"}),
        ("dr_grpo L=8 b=0 (std-scaled A)", {"loss_norm": "fixed-length"}),
        ("seq-mean-token-sum b=0", {"loss_norm": "seq-mean-token-sum"}),
        ("grpo b=.04 k3", {"beta": 0.04, "use_bias_correction_kl": False}),
        ("grpo b=.04 k3", {"beta": 0.04, "kl_estimator": "k3+", "use_bias_correction_kl": False}),
        ("grpo b=.04 k1 (tunix 'kl')", {"beta": 0.04, "kl_estimator": "k1", "use_bias_correction_kl": False}),
        ("grpo b=.04 k2", {"beta": 0.04, "kl_estimator": "k2", "use_bias_correction_kl": False}),
        ("grpo b=0", {"beta": 0.04, "kl_placement": "reward"}),
        ("grpo b=0", {"beta": 0.04, "kl_placement": "advantage"}),
        ("dapo clip-higher .2/.28", {"clip_coef": (0.8, 1.28), "loss_norm": "token-mean"}),
        ("grpo delta=1.3", {"delta": 1.3}),
        ("grpo dual-clip c=3 (inactive here)", {"dual_clip": 3.0}),
        ("grpo dual-clip c=1.2 (active)", {"dual_clip": 1.2}),
        ("gspo eps 3e-4/4e-4 (loss_type grpo, sequence)", {"loss_type": "gspo", "clip_coef": (1 - 3e-4, 1 + 4e-4)}),
        ("gspo eps .2 (sequence)", {"loss_type": "gspo"}),
        ("gspo eps .2 (sequence)", {"importance_sampling_level": "trajectory"}),
        ("gspo eps .2 (sequence)", {"importance_sampling_level": "turn", "advantage_granularity": "trajectory"}),
        ("cispo eps_high=5 token-mean", {"loss_type": "cispo", "loss_norm": "token-mean"}),
        ("cispo eps_high=1.2 token-mean", {"loss_type": "cispo", "loss_norm": "token-mean", "clip_max": 1.2}),
        (
            "cispo two-sided [.8,1.2] token-mean",
            {"loss_type": "cispo", "loss_norm": "token-mean", "clip_max": 1.2, "clip_min": 0.8},
        ),
        ("cispo two-sided [.8,1.2] seq-mean", {"loss_type": "cispo", "clip_max": 1.2, "clip_min": 0.8}),
        ("grpo + token TIS cap 2", {"sampled": True}),
        ("grpo + token TIS cap 1.02", {"sampled": True, "vllm_importance_sampling_cap": 1.02}),
        ("grpo b=0", {"sampled": True, "vllm_importance_sampling_correction": False}),
    ],
)
def test_objective_is_golden(runtime: Runtime, key: str, settings: dict) -> None:
    sampled = settings.pop("sampled", False)
    grpo = agent(runtime, **settings)
    loss = grpo.objective(inputs(grpo, sampled), MetricReducer())
    assert loss.item() == pytest.approx(GOLDEN[key], abs=2e-7)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("grad d(grpo b=.04 k3)/dlogp", {"beta": 0.04, "use_bias_correction_kl": False}),
        ("grad d(gspo eps .2)/dlogp", {"loss_type": "gspo"}),
        (
            "grad d(cispo eps_high=5, token-mean)/dlogp (weight detached)",
            {"loss_type": "cispo", "loss_norm": "token-mean"},
        ),
    ],
)
def test_gradient_is_golden(runtime: Runtime, key: str, settings: dict) -> None:
    grpo = agent(runtime, **settings)
    x = inputs(grpo)
    grpo.objective(x, MetricReducer()).backward()
    assert torch.allclose(x.logp.grad, torch.tensor(GOLDEN[key]), atol=2e-7)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("adv_trl_eps1e-4", {}),
        ("adv_eps1e-6 (tunix/verl)", {"adv_eps": 1e-6}),
        ("adv_eps1e-8 (agilerl)", {"adv_eps": 1e-8}),
        ("adv_mean_only (drgrpo/harmony)", {"adv_norm": "mean_only"}),
        ("adv_rloo", {"adv_norm": "rloo"}),
        ("adv_batch_std", {"adv_norm": "batch_std"}),
    ],
)
def test_advantages_are_golden(runtime: Runtime, key: str, settings: dict) -> None:
    credit = agent(runtime, **settings).credit(batch())
    assert torch.allclose(credit, torch.where(MASK, torch.tensor(GOLDEN[key])[:, None], 0.0), atol=1e-6)


def test_presets_are_one_switch(runtime: Runtime) -> None:
    dr, dapo = (
        make(runtime=runtime, pad_token_id=PAD, max_output_tokens=8).config for make in (GRPO.dr_grpo, GRPO.dapo)
    )
    assert (dr.adv_norm, dr.loss_norm, dr.beta) == ("mean_only", "fixed-length", 0.0)
    assert (dapo.clip_range, dapo.loss_norm, dapo.beta) == ((0.8, 1.28), "token-mean", 0.0)


def test_kl_in_the_reward_and_in_the_advantage(runtime: Runtime) -> None:
    kl = torch.where(MASK, 0.5, 0.0)
    plain = agent(runtime, adv_norm="mean_only").credit(batch())
    # Reward: row i loses beta * 0.5 * len_i; lengths 5, 3 and 4, 2 shift the groups' means by 2 and 1.5 tokens.
    in_reward = agent(runtime, adv_norm="mean_only", beta=0.1, kl_placement="reward").credit(batch(), kl)
    shift = torch.tensor([-0.05, 0.05, -0.05, 0.05])[:, None]
    assert torch.allclose(in_reward, torch.where(MASK, plain + shift, 0.0), atol=1e-6)
    in_advantage = agent(runtime, adv_norm="mean_only", beta=0.1, kl_placement="advantage").credit(batch(), kl)
    assert torch.allclose(in_advantage, torch.where(MASK, plain - 0.05, 0.0), atol=1e-6)
    # Shaping with a constant KL changes nothing: every token is at its row's mean.
    shaped = agent(runtime, adv_norm="mean_only", beta=0.1, use_kl_advantage_shaping=True).credit(batch(), kl)
    assert torch.allclose(shaped, plain, atol=1e-6)


def test_credit_options(runtime: Runtime) -> None:
    clipped = agent(runtime, adv_clip_range=0.1).credit(batch())
    assert clipped.abs().max() == pytest.approx(0.1)
    white = agent(runtime, whiten_advantages=True).credit(batch())[MASK]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white.var()) == pytest.approx(1.0, abs=1e-4)


def turns_batch(rewards: list[list[float]]) -> RolloutBatch:
    """Rows of two turns: the first two tokens, and what follows them."""
    turns = torch.where(MASK, (torch.arange(5) >= 2).long(), -1)
    return replace(batch(), turn_ids=turns, rewards=torch.tensor(rewards))


@pytest.mark.parametrize("norm", ["mean_std", "mean_only", "batch_std"])
def test_whitening_gives_equal_rewards_no_advantage(runtime: Runtime, norm: str) -> None:
    it = agent(runtime, whiten_advantages=True, adv_norm=norm)
    # Group 0 has lengths 5 and 3, so its mean over tokens is not 0, and shifting by it would move group 1.
    advantages = it.credit(batch([1.0, 0.0, 0.5, 0.5]))
    assert not advantages[2:].any()
    moving = advantages[:2][MASK[:2]]
    assert float(moving.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(moving.var()) == pytest.approx(1.0, abs=1e-4)
    assert not it.credit(batch([0.7] * 4)).any()
    # What has no gradient is not computed.
    assert it.prepare(batch([1.0, 0.0, 0.5, 0.5])).idle.tolist() == [False, False, True, True]
    by_turn = agent(runtime, whiten_advantages=True, adv_norm=norm, advantage_granularity="turn")
    data = turns_batch([[1.0, 0.5], [0.0, 0.5], [0.5, 0.0], [0.5, 3.0]])
    advantages = by_turn.credit(data)
    told = torch.tensor([0, 0, 1, 1])[:, None] == data.turn_ids
    assert not advantages[~told].any()
    assert float(advantages[told].var()) == pytest.approx(1.0, abs=1e-4)


def test_whitening_does_not_inflate_the_kl_of_equal_rewards(runtime: Runtime) -> None:
    kl = torch.where(MASK, 0.5, 0.0)
    settings = {"adv_norm": "mean_only", "whiten_advantages": True, "beta": 0.1, "kl_placement": "advantage"}
    advantages = agent(runtime, **settings).credit(batch([1.0, 0.0, 0.5, 0.5]), kl)
    # Tokens of group 0 have 0.5 - 0.05 five times and -0.5 - 0.05 three times: variance 15/56 + ... by torch.
    spread = torch.tensor([0.45] * 5 + [-0.55] * 3).std()
    assert torch.allclose(advantages[2:][MASK[2:]], -0.05 / spread, atol=1e-5)
    equal = agent(runtime, **settings).credit(batch([0.5] * 4), kl)
    assert torch.allclose(equal[MASK], torch.tensor(-0.05))


def test_ungraded_rows_are_left_out_and_zero_advantages_filtered(runtime: Runtime) -> None:
    grpo = agent(runtime, filter_zero_adv=True)
    kept = grpo.prepare(batch([1.0, 0.0, 0.5, 0.5]))
    assert len(kept.batch) == 2
    ungraded = agent(runtime).prepare(batch([1.0, 0.0, float("nan"), 0.5]))
    assert len(ungraded.batch) == 3
    assert ungraded.idle is not None
    assert ungraded.idle.tolist() == [False, False, True]  # alone in its group now
