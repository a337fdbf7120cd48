"""What all clipped policy gradients share: bounds, the places of the KL, foreign engines, references, bad settings."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agilerl.algorithms import CISPO, DPO, GRPO, GSPO, PPO, REINFORCE, RLOO, SFT, LLMAlgorithm, PolicyLoss
from agilerl.algorithms.forward import AgentRows, fixed_logprobs, forward
from agilerl.algorithms.learner import ReferenceLogprobs
from agilerl.algorithms.objective import PolicyParts, policy_terms
from agilerl.algorithms.update import learn_together
from agilerl.data import LossInputs, MicroBatch, RolloutBatch, collate
from agilerl.errors import CheckpointError, ConfigError
from agilerl.functional import MetricReducer, kl_estimate, mismatch_weights, off_policy_tokens
from agilerl.runtime import Runtime
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, sample, weights
from tests.algorithms.data_agents import examples
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model
POLICIES = (GRPO, GSPO, CISPO, RLOO, REINFORCE, PPO)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model(), lora_config=lora(8), seed=5)


def agent(cls: type[LLMAlgorithm], runtime: Runtime | None = None, **settings: Any) -> Any:
    runtime = runtime or Runtime.for_model(random_model(), lora_config=lora(8), seed=5)
    rates = {"lr_actor": 1e-2, "lr_critic": 1e-2} if cls is PPO else {"lr": 1e-2}
    common = {"group_size": 4, "batch_size": 16, "max_output_tokens": 9, "seed": 5, "beta": 0.05}
    return cls(runtime=runtime, pad_token_id=PAD, **{**common, **rates, **settings})


def loss_inputs(it: Any, seed: int = 0) -> LossInputs:
    """Two rows of an agent ahead of the policy that sampled, and away from its reference."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(4) < torch.tensor([[4], [3]])
    noise = [torch.where(mask, 0.4 * torch.randn(2, 4, generator=draw), 0.0) for _ in range(4)]
    logp = torch.where(mask, -1.0 + noise[0], 0.0).requires_grad_()
    values = torch.zeros(2, 4).requires_grad_() if isinstance(it, PPO) else None
    return LossInputs(
        logp=logp,
        mask=mask,
        old_logp=torch.where(mask, -1.0, 0.0),
        advantages=torch.where(mask, 2 * noise[1], 0.0),
        denominator=it.window_denominator(mask),
        ref_logp=torch.where(mask, -1.0 + noise[2], 0.0),
        sampling_logp=torch.where(mask, -1.0 + 2 * noise[3], 0.0),
        turn_ids=torch.where(mask, 0, -1),
        values=values,
        old_values=None if values is None else values.detach(),
        returns=None if values is None else values.detach(),
    )


def loss_of(it: Any, x: LossInputs) -> Tensor:
    return it.objective(x, MetricReducer())


# -- PPO has what the others have ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_the_kl_enters_where_it_is_placed(cls: type) -> None:
    """As a loss, off the reward, off the advantage, or spread within a completion: once each, and in its own place."""
    it = agent(cls, update_epochs=2, beta=0.5, whiten_advantages=False)
    it.learn(batch_of(it))
    batch, found = batch_of(it), {}
    mask = batch.action_mask
    off = {"kl_placement": "loss", "use_kl_advantage_shaping": False, "adv_clip_range": None}
    settings: dict[str, dict[str, Any]] = {
        "loss": {},
        "reward": {"kl_placement": "reward"},
        "advantage": {"kl_placement": "advantage"},
        "shaping": {"use_kl_advantage_shaping": True},
        "clamped": {"kl_placement": "advantage", "adv_clip_range": 0.1},
    }
    for name, own in settings.items():
        it.set_hyperparameters({**off, **own})
        found[name] = it.prepare(batch).advantages
    kl = 0.5 * kl_estimate(
        batch.sampling_logps, fixed_logprobs(it.runtime, None, batch, 1.0, MicroBatch(16)), mask=mask
    )
    assert kl.sum() > 0.01
    assert torch.allclose(found["advantage"], found["loss"] - kl, atol=1e-5)
    mean = kl.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    assert torch.allclose(found["shaping"], torch.where(mask, found["loss"] + mean - kl, 0.0), atol=1e-5)
    assert torch.equal(found["clamped"], found["advantage"].clamp(-0.1, 0.1))
    assert not torch.allclose(found["reward"], found["loss"], atol=1e-3)
    assert not torch.allclose(found["reward"], found["advantage"], atol=1e-3)


def test_ppo_adapts_the_weight_of_its_kl(tmp_path: Path) -> None:
    it = agent(PPO, kl_target=1e-4, kl_horizon=64)
    metrics = it.learn(batch_of(it))
    assert it.kl_scale == pytest.approx(0.95)  # at the start the KL is 0: the error is cut at -0.2, 16 of 64 samples
    assert metrics["kl_coef"] == pytest.approx(0.05 * 0.95)
    it.save_checkpoint(tmp_path / "a")
    assert PPO.load(tmp_path / "a", runtime=it.runtime).kl_scale == it.clone().kl_scale == it.kl_scale


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, PolicyLoss(kl="k3")),
        ({"kl_clamp_value": 1e-3, "beta": 1.0}, PolicyLoss(kl="k3")),
        ({"entropy_coef": 0.1, "dual_clip": 1.05}, PolicyLoss(kl="k3")),
        ({"beta": 0.0, "delta": 1.25}, PolicyLoss()),
        ({"advantage_granularity": "turn"}, PolicyLoss(ratio="turn", kl="k3")),
        ({"advantage_granularity": "turn", "turn_ratio_pooling": "mean"}, PolicyLoss(ratio="turn", kl="k3")),
    ],
)
def test_policy_loss_is_the_policy_part_of_ppo(settings: dict[str, Any], loss: PolicyLoss) -> None:
    """Weights, denominators and names are PPO's own; the value loss reaches another slot."""
    it = agent(PPO, update_epochs=2, batch_size=16, max_grad_norm=None, **settings)
    batch = batch_of(it)
    it.learn(batch)
    gradients = []
    for own in (None, loss):
        it.accumulate(batch, own)
        gradients.append(it.runtime.store.grad[it.slot].clone())
        it.runtime.store.grad.zero_()
    assert gradients[0].abs().max() > 1e-4
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


# -- a foreign engine ------------------------------------------------------------------------------------------------

MODES = ("token_truncate", "token_mask", "seq_truncate", "seq_mask")


@pytest.mark.parametrize("cap", [1.05, 2.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_the_correction_weighs_the_policy_term_alone(runtime: Runtime, cls: type, mode: str, cap: float) -> None:
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_cap": cap}
    it, off = agent(cls, runtime, **settings), agent(cls, runtime, vllm_importance_sampling_correction=False)
    x = loss_inputs(it)
    bare = replace(x, ref_logp=None)
    parts = {
        name: loss_of(a, y) for name, a, y in (("w", it, bare), ("1", off, bare), ("w+kl", it, x), ("1+kl", off, x))
    }
    assert torch.allclose(parts["w+kl"] - parts["w"], parts["1+kl"] - parts["1"], atol=1e-7)
    weights = mismatch_weights(x.old_logp, x.sampling_logp, x.mask, mode, cap)
    rows = [replace(bare, advantages=bare.advantages * weights, sampling_logp=None)]
    assert torch.allclose(loss_of(off, rows[0]), parts["w"], atol=1e-6)  # the surrogate is linear in A of one sign
    assert not torch.allclose(parts["w"], parts["1"], atol=1e-4)


@pytest.mark.parametrize("cls", POLICIES)
def test_one_on_policy_step_needs_no_second_forward(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sampled: the old policy of a single step is the present one."""
    it = agent(cls, beta=0.0)
    batch = batch_of(it)
    passes = count_rows(monkeypatch)
    it.learn(batch)
    alone = len(passes)
    shifted = replace(batch, sampling_logps=torch.where(batch.action_mask, batch.sampling_logps - 0.1, 0.0))
    it.runtime.engine.exact = False
    passes.clear()
    metrics = it.learn(shifted)
    assert len(passes) == alone
    assert metrics["sampling/sampling_logp_difference/mean"] > 0
    assert metrics["is_ratio/max"] == 1.0
    passes.clear()
    it.update_epochs = 2
    it.learn(shifted)
    assert len(passes) == alone + 2  # a second epoch, and the log-probs before the first


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass through the base from here on."""
    seen: list[int] = []

    def counted(runtime: Runtime, parts: Sequence[AgentRows], **kwargs: Any) -> Any:
        seen.append(sum(len(part.batch) for part in parts))
        return forward(runtime, parts, **kwargs)

    for module in ("forward", "update"):  # passes without gradient, and those of training
        monkeypatch.setattr(f"agilerl.algorithms.{module}.forward", counted)
    return seen


# -- the reference ---------------------------------------------------------------------------------------------------


def test_equal_completions_share_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one agent or of several, at one temperature: a row goes through the reference once."""
    agents = make_agents(3, beta=0.05, temperature=1.0, update_epochs=1, batch_size=64, group_size=4)
    batch = collate(sample([agents[0]])[0], PAD)
    twice = RolloutBatch(
        **{
            name: None if value is None else torch.cat([value, value])
            for name, value in ((n, getattr(batch, n)) for n in batch.__dataclass_fields__)
        }
    )
    different = len({tuple(row) for row in batch.ids.tolist()})
    known = ReferenceLogprobs.of(agents[0].runtime)
    passes = count_rows(monkeypatch)
    learn_together(agents, [twice, batch, batch])
    assert known.rows_computed == different
    assert sum(passes) == different + 4 * len(batch)
    before = known.rows_computed
    agents[1].temperature = 0.7
    learn_together(agents[1:], [batch, batch])
    assert known.rows_computed == before + different  # another temperature is another distribution
    agents[2].set_reference_policy(1)
    learn_together(agents[2:], [batch])
    assert known.rows_computed == before + 2 * different  # as another policy is


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_shared_logprobs_are_the_references_bits(cls: type) -> None:
    it = agent(cls, temperature=0.8)
    batch = batch_of(it)
    for _ in range(2):
        it.learn(batch)
        fresh = fixed_logprobs(it.runtime, it.reference_slot, batch, 0.8, MicroBatch(3))
        assert torch.equal(it.prepare(batch).ref_logp, torch.where(batch.action_mask, fresh, 0.0))
        it.set_reference_policy(1)


def test_a_reference_is_computed_once_for_a_dataset_whatever_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime.for_model(random_model(), lora_config=lora(8), seed=5)
    runtime.store.reserve(3)
    agents = [DPO(runtime=runtime, pad_token_id=PAD, index=i, lr=1e-3 * (i + 1), batch_size=4) for i in range(3)]
    batches = [examples(4, seed, pairs=True) for seed in range(5)]  # a dataset of 20 pairs
    passes = count_rows(monkeypatch)
    for _ in range(3):
        for batch in batches:
            learn_together(agents, [batch] * 3)
    trained = 3 * 3 * 5 * 8  # epochs, agents, batches, rows
    assert sum(passes) == trained + 5 * 8


def test_a_reference_that_cannot_move_says_so_once(runtime: Runtime) -> None:
    it = agent(GRPO, runtime, use_separate_reference_adapter=False)
    with pytest.warns(UserWarning, match="use_separate_reference_adapter"):
        it.set_reference_policy(1)
    it.set_reference_policy(2)  # warnings are errors: a second one would fail
    assert it.reference_slot is None
    assert it.reference_tracker == 2


# -- checkpoints of others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "asked"), [(SFT, DPO), (DPO, GRPO), (GRPO, PPO), (PPO, GRPO)])
def test_an_agent_is_not_built_from_another_algorithms_checkpoint(
    runtime: Runtime, saved: Any, asked: Any, tmp_path: Path
) -> None:
    saved(runtime=runtime, pad_token_id=PAD).save_checkpoint(tmp_path / "a")
    expected = f"expected the checkpoint of a {asked.__name__} agent, found {saved.__name__}'s; build it with"
    with pytest.raises(CheckpointError, match=expected):
        asked.load(tmp_path / "a", runtime=runtime)
    lacks = pytest.warns(UserWarning, match="has no critic") if (saved, asked) == (GRPO, PPO) else nullcontext()
    with lacks:
        asked(runtime=runtime, pad_token_id=PAD).load_checkpoint(tmp_path / "a")


# -- what contradicts itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "settings", "message"),
    [
        (
            POLICIES[:2] + POLICIES[3:],
            {"delta": 1.1, "clip_coef": 0.2},
            "^delta=.*clip_coef",
        ),
        ((GRPO, PPO), {"delta": 4.0, "dual_clip": 3.0}, "both cap a loss; drop one"),
        (POLICIES, {"use_kl_advantage_shaping": True, "beta": 0.0}, r"beta=0 .* beta"),
        (
            POLICIES,
            {"use_kl_advantage_shaping": True, "kl_placement": "advantage"},
            r"contradicts kl_placement='advantage'",
        ),
        (
            POLICIES,
            {"kl_target": 0.1, "beta": 0.0},
            r"KL's weight, but beta=0",
        ),
        (
            (GRPO,),
            {"loss_type": "cispo", "dual_clip": 3.0},
            "loss_type='cispo' .* dual_clip;",
        ),
        (
            (GRPO,),
            {"loss_type": "cispo", "clip_coef": 0.2, "clip_max": 3.0},
            r"both bounds .*, found clip_max",
        ),
        ((GRPO, CISPO), {"clip_min": 6.0}, r"clip_min=6.0 .* clip_max=5.0"),
    ],
)
def test_contradictions_are_told_in_a_sentence(
    runtime: Runtime, classes: tuple[type, ...], settings: dict[str, Any], message: str
) -> None:
    for cls in classes:
        with pytest.raises(ConfigError, match=message):
            agent(cls, runtime, **settings)
        it = agent(cls, runtime)
        before = it.config
        with pytest.raises(ConfigError, match=message):
            it.set_hyperparameters(settings)
        assert it.config == before


def test_clip_coef_is_both_bounds_of_cispos_weight_wherever_it_is_given(runtime: Runtime) -> None:
    assert agent(GRPO, runtime, loss_type="cispo").config.weight_range == (0.0, 5.0)
    for it in (agent(GRPO, runtime, loss_type="cispo", clip_coef=0.2), agent(CISPO, runtime, clip_coef=0.2)):
        assert (it.config.weight_range, it.config.clip_range) == ((0.8, 1.2), (0.8, 1.2))
    assert agent(GRPO, runtime, clip_coef=0.2).config.weight_range == (0.0, 5.0)  # for PolicyLoss(surrogate="cispo")


@pytest.mark.parametrize(
    "setting",
    [{"top_p": 0.91}, {"top_k": 19}, {"min_p": 0.11}, {"repetition_penalty": 1.13}, {"min_output_tokens": 3}],
)
def test_sampling_from_a_part_of_the_vocabulary_is_warned_of(runtime: Runtime, setting: dict[str, float]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.warns(UserWarning, match=f"^{name}={value} "):
        it = agent(GRPO, runtime, **setting)
    it.clone().set_hyperparameters({"lr": 1e-3})  # warnings are errors: a second one would fail


STACKED = (torch.ones(6, 4, dtype=torch.int64), torch.ones(6, 3, dtype=torch.bool), torch.arange(6.0))


@pytest.mark.parametrize(
    ("cls", "settings", "turn_ids", "message"),
    [
        (GRPO, {"importance_sampling_level": "turn"}, None, r"is 'turn', .* turn_ids"),
        (GRPO, {"advantage_granularity": "turn"}, None, r"is 'turn', .* turn_ids"),
        (REINFORCE, {"advantage_granularity": "turn"}, None, r"is 'turn', .* turn_ids"),
        (PPO, {"advantage_granularity": "turn"}, None, r"is 'turn', .* turn_ids"),
        (GRPO, {"group_size": 4}, None, "group_size=4 consecutive rows, found 6 rows"),
        (
            GRPO,
            {},
            torch.zeros(6, 5, dtype=torch.int64),
            "wide as masks, .*, found 5",
        ),
        (GRPO, {}, torch.zeros(2, 3, dtype=torch.int64), r"expected turn_ids for 6 rows, found .* 2"),
    ],
)
def test_experiences_that_do_not_fit_the_settings(
    runtime: Runtime, cls: type, settings: dict[str, Any], turn_ids: Tensor | None, message: str
) -> None:
    it = agent(cls, runtime, **{"group_size": 3, **settings})
    before = weights(it)
    with pytest.raises(ConfigError, match=message):
        it.learn(STACKED, turn_ids=turn_ids)
    assert equal(weights(it), before)


def expected_kl_gradients(estimator: str, corrected: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient that the loss has in expectation over an older policy's tokens, and that of KL(pi || ref)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    old, ref = (torch.randn(5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))
    logp, old, ref = logits.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    mask = torch.ones(5, 1, dtype=torch.bool)
    inputs = LossInputs(
        logp=logp[:, None],
        mask=mask,
        old_logp=old[:, None],
        advantages=torch.zeros(5, 1, dtype=torch.float64),
        denominator=1.0,
        ref_logp=ref[:, None],
        turn_ids=torch.zeros(5, 1, dtype=torch.int64),
    )
    parts = PolicyParts(
        ratio="token",
        surrogate="clipped",
        aggregation="token-mean",
        kl=estimator,
        kl_weight=1.0,
        kl_corrected=corrected,
    )
    expectation = (old.exp() * policy_terms(inputs, parts).loss[:, 0]).sum()
    kl = (logp.exp() * (logp - ref)).sum()
    return *torch.autograd.grad(expectation, logits, retain_graph=True), *torch.autograd.grad(kl, logits)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_a_corrected_kl_has_the_gradient_of_the_kl_off_policy(estimator: str) -> None:
    gradient, exact = expected_kl_gradients(estimator, corrected=True)
    torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-14)
    gradient, exact = expected_kl_gradients(estimator, corrected=False)
    assert (gradient - exact).abs().max() > 0.05


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_far_from_the_policy_that_sampled_are_not_trained_on(sampled: bool) -> None:
    it = agent(GRPO, off_policy_token_mask_bounds=(0.7, 1.3), beta=0.0)
    x = replace(loss_inputs(it), advantages=torch.ones(2, 4), ref_logp=None)
    x = x if sampled else replace(x, sampling_logp=None)
    behaviour = x.old_logp if x.sampling_logp is None else x.sampling_logp
    ratio = (x.logp - behaviour).exp()
    outside = ((ratio < 0.7) | (ratio > 1.3)) & x.mask
    assert 0 < outside.sum() < x.mask.sum()
    metrics = MetricReducer()
    it.objective(x, metrics).backward()
    assert x.logp.grad is not None
    assert torch.equal(x.logp.grad == 0, outside | ~x.mask | (x.logp > x.old_logp + math.log(1.2)))
    assert metrics.result()["off_policy_tokens"] == pytest.approx((outside.sum() / x.mask.sum()).item())


def test_a_drifted_completion_does_not_train_its_negative_tokens() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    logp = torch.tensor([[-1.2] * 4, [-0.9] * 4, [-1.2] * 4])
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -1.0], [-1.0] * 4, [1.0] * 4])
    stale = off_policy_tokens(logp, torch.full((3, 4), -1.0), advantages, mask, threshold=0.1)
    assert stale.tolist() == [[True, False, True, True], [False] * 4, [False] * 4]


@pytest.mark.parametrize(("mode", "expected"), [("token_truncate", [0.5, 1.0, 2.0]), ("token_mask", [0.0, 1.0, 0.0])])
def test_mismatch_weights_keep_to_a_band(mode: Any, expected: list[float]) -> None:
    old = torch.tensor([[-2.0, -1.0, -0.1]])
    weights = mismatch_weights(old, torch.tensor([[-1.0, -1.0, -1.0]]), old < 0, mode, cap=2.0, floor=0.5)
    assert weights[0].tolist() == pytest.approx(expected)


def test_a_band_needs_bounds_in_order() -> None:
    with pytest.raises(ConfigError, match=r"vllm_importance_sampling_clip_min=2 must be below .*_cap=2; lower it"):
        agent(GRPO, vllm_importance_sampling_clip_min=2.0)
    with pytest.raises(ConfigError, match="off_policy_token_mask_bounds"):
        agent(GRPO, off_policy_token_mask_bounds=(1.2, 1.5))
