"""Updates of batches at the edges against loops over numbers in fp64: no token, no grade, one row, holes, extremes."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.algorithms import ALGORITHMS, GRPO, PPO
from agilerl.data import Trajectory, collate
from agilerl.runtime import Runtime
from tests.algorithms.conftest import lora
from tests.tiny_models import EOS, PAD, VOCABULARY, random_model

pytestmark = pytest.mark.model

CLIP, LONGEST = 0.2, 7
POLICY = [name for name, cls in ALGORITHMS.items() if "group_size" in cls.Config.model_fields]


def row(tokens: int, reward: float, mask: list[bool] | None = None, group: int = 0) -> Trajectory:
    ids = np.random.default_rng([tokens, group]).integers(2, VOCABULARY, tokens).tolist()
    return Trajectory([5, 6, PAD, 7 + group], ids, mask or [True] * tokens, None, [reward], group=group)


T, F = True, False
BATCHES = {
    "plain": [row(3, 1.0), row(2, 0.0), row(5, 0.5, group=1), row(1, -2.0, group=1)],
    "holes": [row(5, 1.0, [T, F, F, T, T]), row(4, 0.0, [F, T, T, F]), row(3, 3.0, [T, F, T])],
    "a row without a token": [row(3, 1.0), row(3, 0.0, [F] * 3), row(2, 0.7)],
    "a row without a grade": [row(3, 1.0), row(2, math.nan), row(4, 0.0), row(1, 5.0)],
    "an infinite grade": [row(3, 1.0), row(2, math.inf), row(4, 0.0), row(1, 5.0)],
    "groups of 1 and 3": [row(3, 1.0), row(2, 0.0, group=1), row(4, 1.0, group=1), row(2, 1.0, group=1)],
    "equal beside unequal": [row(3, 1.0), row(2, 1.0), row(4, 0.0, group=1), row(2, 1.0, group=1)],
    "a large mean": [row(3, 1e6 + 1), row(2, 1e6), row(4, 1e6 + 2)],
    "a small spread": [row(3, 1e-5), row(2, 0.0), row(4, 2e-5)],
    "one token each": [row(1, 1.0), row(1, 0.0)],
}
SETTINGS = [
    ("mean_std", "token", "seq-mean-token-mean", 1.0),
    ("mean_only", "trajectory", "token-mean", 1.0),
    ("batch_std", "token", "fixed-length", 1.0),
    ("rloo", "trajectory", "seq-mean-token-mean", 1.0),
    ("mean_std", "token", "token-mean", 0.3),
]


@pytest.fixture(scope="module")
def worlds() -> tuple[Runtime, Any]:
    model = random_model()
    exact = copy.deepcopy(model).double()
    return Runtime.for_model(model, lora_config=lora(8), seed=5), exact


def agent_of(runtime: Runtime, kind: Any = GRPO, **settings: Any) -> Any:
    rate = {"lr_actor": 1e-12} if kind is PPO else {"lr": 1e-12}  # nothing moves, so all passes have one loss
    usual = {"group_size": 2, "batch_size": 64, "beta": 0.0, "max_output_tokens": LONGEST, "seed": 5}
    return kind(pad_token_id=PAD, runtime=runtime, lora_config=lora(8), **{**usual, **rate, **settings})


def logprobs(model: Any, one: Trajectory, temperature: float) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([one.prompt_ids + one.token_ids])).logits[0] / temperature
    places = range(len(one.prompt_ids) - 1, len(one.prompt_ids) - 1 + len(one.token_ids))
    return logits.log_softmax(-1)[list(places), one.token_ids].numpy()


def advantages(rows: list[Trajectory], norm: str) -> list[float]:
    found = []
    every = np.array([one.rewards[0] for one in rows])
    for one in rows:
        group = np.array([other.rewards[0] for other in rows if other.group == one.group])
        if len(group) < 2 or group.std(ddof=1) < 1e-6:
            found.append(0.0)
            continue
        scale = {"mean_std": group.std(ddof=1) + 1e-4, "batch_std": every.std(ddof=1) + 1e-4, "mean_only": 1.0}
        found.append((one.rewards[0] - group.mean()) / scale.get(norm, 1 - 1 / len(group)))
    return found


@pytest.mark.parametrize("name", BATCHES)
def test_the_loss_is_that_of_loops_over_numbers(name: str, worlds: tuple[Runtime, Any]) -> None:
    runtime, exact = worlds
    noise = np.random.default_rng(0)
    for norm, level, loss_norm, temperature in SETTINGS:
        rows, losses = copy.deepcopy(BATCHES[name]), []
        graded = [one for one in rows if math.isfinite(one.rewards[0])]
        gains = iter(advantages(graded, norm))
        for one in rows:
            mask = np.array(one.action_mask)
            now = logprobs(exact, one, temperature)
            moved = np.where(mask, noise.normal(0, 0.15, len(mask)), 0.0)
            one.logprobs = np.where(mask, now - moved, 0.0).tolist()
            if one not in graded:
                continue
            ratio = np.exp(moved.sum() / max(mask.sum(), 1) if level == "trajectory" else moved) * np.ones(len(mask))
            gain = next(gains)
            losses.append(-np.minimum(ratio * gain, ratio.clip(1 - CLIP, 1 + CLIP) * gain)[mask])
        total = sum(float(loss.sum()) for loss in losses)
        wanted = {
            "seq-mean-token-mean": sum(float(loss.mean()) for loss in losses if len(loss)) / len(losses),
            "token-mean": total / sum(map(len, losses)),
            "fixed-length": total / (len(losses) * LONGEST),
        }[loss_norm]
        chosen = {"adv_norm": norm, "importance_sampling_level": level, "loss_norm": loss_norm}
        agent = agent_of(runtime, update_epochs=2, temperature=temperature, **chosen)
        found = agent.learn(collate(rows, PAD))["loss"]
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5), (norm, level, loss_norm)
        agent.clean_up()


@pytest.mark.parametrize("name", POLICY)
def test_what_teaches_nothing_moves_nothing_and_makes_nobody_sick(name: str, worlds: tuple[Runtime, Any]) -> None:
    runtime, kind = worlds[0], ALGORITHMS[name]
    rate = {"lr_actor": 1e-2, "lr_critic": 1e-2} if kind is PPO else {"lr": 1e-2}
    for case in ("nan", "inf", "no token", "no row"):
        agent = agent_of(runtime, kind, **rate)
        mask = [False] * 3 if case == "no token" else None
        rows = [row(3, {"nan": math.nan, "inf": math.inf}.get(case, float(k)), mask, group=k // 2) for k in range(4)]
        before = runtime.store.theta[agent.slot].clone()
        agent.learn(collate([] if case == "no row" else rows, PAD))
        assert torch.equal(runtime.store.theta[agent.slot], before), case
        assert (agent.sick, agent.skipped_steps) == ("", 0), case
        agent.clean_up()


@pytest.mark.parametrize("name", POLICY)
def test_extremes_stay_finite(name: str, worlds: tuple[Runtime, Any]) -> None:
    runtime, kind = worlds[0], ALGORITHMS[name]
    ends = [Trajectory([5, 6], [EOS], [True], None, [float(k % 2)], group=k // 2) for k in range(4)]
    huge = [row(3, reward, group=k // 2) for k, reward in enumerate((1e38, -1e38, 3e38, 0.0))]
    for rows, settings in (
        (ends, {"beta": 0.01}),
        (huge, {}),
        (ends, {"temperature": 1e-30, "beta": 0.01}),
        (ends, {"temperature": 1e30, "beta": 0.01}),
    ):
        agent = agent_of(runtime, kind, **settings)
        metrics = agent.learn(collate(rows, PAD))
        # Squares and differences of such rewards are beyond fp32: then the step is skipped.
        assert math.isfinite(metrics["loss"]) or (rows is huge and agent.skipped_steps == 1)
        assert torch.isfinite(runtime.store.theta[agent.slot]).all()
        agent.clean_up()
