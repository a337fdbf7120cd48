"""Preference and supervised losses against TRL's trainers: values, gradients and metrics of their own loss methods."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agilerl.algorithms import DPO, LLMAlgorithm
from agilerl.data import LossInputs
from agilerl.functional import (
    MetricReducer,
    PreferenceOptions,
    aggregate,
    dft,
    normaliser,
    preference_loss,
    preference_metrics,
    preference_scores,
    sft,
)
from tests.oracle import trl_stubs
from tests.oracle.random_tensors import Tensors, random_tensors

dpo_trainer = trl_stubs.module("trainer.dpo_trainer")
sft_trainer = trl_stubs.module("trainer.sft_trainer")

BETA = 0.3
MENU: list[tuple[dict[str, float], dict[str, Any], dict[str, float] | None]] = [
    *(({name: 1.0}, {}, None) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down")),
    ({"discopop": 1.0}, {}, None),
    ({"discopop": 1.0}, {"discopop_tau": 0.5}, None),
    ({"robust": 1.0}, {"label_smoothing": 0.1}, None),
    ({"exo_pair": 1.0}, {"label_smoothing": 0.01}, None),
    ({"aot": 1.0}, {}, None),
    ({"aot": 1.0}, {"label_smoothing": 0.1}, None),
    # TRL names the variant by what it does not need; ours by what it sorts.
    ({"aot_pair": 1.0}, {"label_smoothing": 0.1}, {"aot_unpaired": 1.0}),
    # TRL subtracts no baseline from the rewards; ours does, unless it is given one.
    ({"bco_pair": 1.0}, {"reward_baseline": 0.0}, None),
    ({"sft": 1.0}, {}, None),
    ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, {"reward_baseline": 0.0}, None),
    # nll_alpha of 1 was the original's default: it is this mixture.
    ({"sigmoid": 1.0, "sft": 1.0}, {}, None),
]


def trl_loss(x: Tensors, leaf: torch.Tensor, losses: dict[str, float], options: dict[str, Any]) -> tuple[Any, Any]:
    """TRL's batch holds the chosen rows, then the rejected ones; position 0 is the prompt."""
    alpha, collision = options.get("ld_alpha"), options.get("collision")
    halves = [part.sum(1) for part in x.mask.chunk(2)]
    common = torch.minimum(*halves).repeat(2)[:, None]
    tail = torch.where(torch.arange(x.mask.shape[1]) < common, 1.0, 1.0 if alpha is None else alpha)
    ref_chosen, ref_rejected = (x.ref * x.mask * tail).sum(1).chunk(2)  # precomputed there as well
    prompt = torch.zeros(len(x.mask), 1, dtype=torch.int64)
    stub = trl_stubs.trainer(
        beta=BETA,
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        label_smoothing=options.get("label_smoothing", 0.0),
        args=SimpleNamespace(discopop_tau=options.get("discopop_tau", 0.05)),
        ld_alpha=alpha,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=collision is not None,
    )
    batch = {
        "input_ids": torch.zeros(len(x.mask), x.mask.shape[1] + 1, dtype=torch.int64),
        "attention_mask": torch.ones(len(x.mask), x.mask.shape[1] + 1, dtype=torch.int64),
        "completion_mask": torch.cat([prompt, x.mask.long()], dim=1),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    model = trl_stubs.language_model(leaf, x.entropy, x.mask, collision)
    loss = dpo_trainer.DPOTrainer._compute_loss(stub, model, batch, False)
    return loss, {name: values[-1] for name, values in stub._metrics["eval"].items()}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("losses", "options", "renamed"), MENU)
def test_preference_losses(
    losses: dict[str, float], options: dict[str, Any], renamed: dict[str, float] | None, seed: int
) -> None:
    x = random_tensors(seed)
    leaf = x.leaf
    scores = preference_scores(*(tuple(t.chunk(2)) for t in (leaf, x.ref, x.mask)))
    pairs, tokens = len(x.mask) // 2, float(x.mask.chunk(2)[0].sum())
    loss = preference_loss(
        scores, losses, BETA, pairs=pairs, chosen_tokens=tokens, options=PreferenceOptions(**options)
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    other_leaf = x.leaf
    other, metrics = trl_loss(x, other_leaf, renamed or losses, options)
    (expected,) = torch.autograd.grad(other, other_leaf)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    own = {name: float(values.mean()) for name, values in preference_metrics(scores, BETA).items()}
    assert own == pytest.approx({name: metrics[name] for name in own}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        ({}, {"sigmoid": 1.0}),
        ({"ld_alpha": 0.3}, {"sigmoid": 1.0}),
        ({"ld_alpha": 0.0, "nll_alpha": 0.5}, {"sigmoid": 1.0, "sft": 0.5}),
        ({"ld_alpha": 0.7, "loss_type": "apo_zero"}, {"apo_zero": 1.0}),
        ({"use_weighting": True}, {"sigmoid": 1.0}),
        ({"use_weighting": True, "loss_type": "apo_zero", "ld_alpha": 0.5}, {"apo_zero": 1.0}),
        ({"reference_free": True}, {"sigmoid": 1.0}),
        ({"loss_type": "ipo"}, {"ipo": 1.0}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"robust": 1.0}),
        ({"loss_type": "aot"}, {"aot": 1.0}),
        ({"nll_alpha": 0.5}, {"sigmoid": 1.0, "sft": 0.5}),
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [0.7, 0.3]}, {"sigmoid": 0.7, "hinge": 0.3}),
    ],
)
def test_dpo_is_trls(make: Callable[..., LLMAlgorithm], settings: dict[str, Any], losses: dict[str, float]) -> None:
    """The algorithm itself: its rows alternate, chosen and rejected, where TRL's come in two halves."""
    x = random_tensors(4)
    collision = torch.where(x.mask, x.entropy * 0.7, 0.0) if settings.get("use_weighting") else None
    pairs = torch.arange(len(x.mask)).view(2, -1).T.flatten()
    agent, leaf, metrics = make(DPO, beta=BETA, **settings), x.leaf, MetricReducer()
    inputs = LossInputs(
        logp=leaf[pairs],
        mask=x.mask[pairs],
        old_logp=x.old[pairs],
        advantages=torch.zeros(x.mask.shape),
        denominator=agent.window_denominator(x.mask[pairs]),
        ref_logp=None if settings.get("reference_free") else x.ref[pairs],
        collision=None if collision is None else collision[pairs],
    )
    loss = agent.objective(inputs, metrics)
    (gradient,) = torch.autograd.grad(loss, leaf)
    other_leaf = x.leaf
    if settings.get("reference_free"):
        x.ref = torch.zeros_like(x.ref)
    options = {"label_smoothing": settings.get("label_smoothing", 0.0), "ld_alpha": settings.get("ld_alpha")}
    options["collision"] = collision
    other, other_metrics = trl_loss(x, other_leaf, losses, options)
    (expected,) = torch.autograd.grad(other, other_leaf)
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    own = {name: value for name, value in metrics.result().items() if name != "loss"}
    assert {"rewards/accuracies", "logps/chosen"} <= set(own)
    assert own == pytest.approx({name: other_metrics[name] for name in own}, rel=1e-5, abs=1e-6)


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"loss_type": "cpo"}, {"loss_type": "sigmoid"}),
        ({"loss_type": "cpo", "label_smoothing": 0.1, "nll_alpha": 0.4}, {"loss_type": "sigmoid"}),
        ({"loss_type": "simpo"}, {"loss_type": "simpo"}),
        ({"loss_type": "simpo", "simpo_gamma": 1.4, "nll_alpha": 0.2}, {"loss_type": "simpo", "simpo_gamma": 1.4}),
        ({"loss_type": "orpo"}, {}),
        ({"loss_type": "orpo", "nll_alpha": 0.0}, {}),
    ],
)
def test_losses_without_a_reference(
    make: Callable[..., LLMAlgorithm], settings: dict[str, Any], theirs: dict[str, Any], seed: int
) -> None:
    """The preference terms are those of TRL's CPO and ORPO trainers; the cross-entropy is over completions here."""
    cpo_trainer = trl_stubs.module("experimental.cpo.cpo_trainer")
    orpo_trainer = trl_stubs.module("experimental.orpo.orpo_trainer")
    x = random_tensors(seed)
    pairs = torch.arange(len(x.mask)).view(2, -1).T.flatten()
    agent, leaf, metrics = make(DPO, beta=BETA, **settings), x.leaf, MetricReducer()
    inputs = LossInputs(
        leaf[pairs], x.mask[pairs], x.old, torch.zeros(x.mask.shape), agent.window_denominator(x.mask[pairs])
    )
    loss = agent.objective(inputs, metrics)
    (gradient,) = torch.autograd.grad(loss, leaf)
    other_leaf, mean = x.leaf, settings["loss_type"] != "cpo"
    sums = (other_leaf * x.mask).sum(1)
    chosen, rejected = (sums / x.mask.sum(1) if mean else sums).chunk(2)
    smoothing = {"label_smoothing": settings.get("label_smoothing", 0.0)}
    stub = trl_stubs.trainer(**{"beta": BETA, "alpha": 0.0, "simpo_gamma": 0.5} | theirs | smoothing)
    if settings["loss_type"] == "orpo":
        ratio, rewards, *_ = orpo_trainer.ORPOTrainer.odds_ratio_loss(stub, chosen, rejected)
        other = -ratio.mean()
    else:
        by_pair, rewards, _ = cpo_trainer.CPOTrainer.cpo_loss(stub, chosen, rejected)
        other = by_pair.mean()
    first = x.mask.chunk(2)[0]
    nll = settings.get("nll_alpha", 0.0 if settings["loss_type"] == "simpo" else 1.0)
    other = other - nll * other_leaf.chunk(2)[0][first].mean()
    (expected,) = torch.autograd.grad(other, other_leaf)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert metrics.result()["rewards/chosen"] == pytest.approx(float(rewards.mean()), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("window_tokens", [None, 200])
@pytest.mark.parametrize("name", ["nll", "dft"])
def test_supervised_losses(name: str, window_tokens: int | None, seed: int) -> None:
    """Both divide by the tokens of the optimizer window: those of the batch where it is the whole window."""
    x = random_tensors(seed)
    leaf = x.leaf
    per_token = (sft if name == "nll" else dft)(leaf, mask=x.mask)
    loss = aggregate(per_token, x.mask, "token-mean", window_tokens or normaliser(x.mask, "token-mean"))
    (gradient,) = torch.autograd.grad(loss, leaf)
    other_leaf = x.leaf
    stub = trl_stubs.trainer(
        args=SimpleNamespace(loss_type=name, average_tokens_across_devices=True),
        compute_loss_func=None,
        label_smoother=None,
        get_tp_size=lambda: 1,
    )
    model = trl_stubs.language_model(other_leaf, x.entropy, x.mask)
    batch = {"attention_mask": x.mask.long()}
    other = sft_trainer.SFTTrainer.compute_loss(stub, model, batch, num_items_in_batch=window_tokens)
    (expected,) = torch.autograd.grad(other, other_leaf)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
