"""DPO: the losses, the shared reference, pairs that stay together, exactness, and that it separates preferences."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import ALGORITHMS, DPO
from agilerl.algorithms.dpo import PairCount
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.algorithms.learner import ReferenceLogprobs
from agilerl.algorithms.update import learn_together
from agilerl.data import LossInputs, MicroBatch, cut
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import PreferenceTask
from agilerl.errors import ConfigError
from agilerl.functional import PREFERENCE_LOSSES, MetricReducer
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.llm_envs import PreferenceGym
from agilerl.models.slots import Route
from agilerl.population import Population
from tests.algorithms.conftest import equal, lora, weights
from tests.algorithms.data_agents import agents_of, embedded_runtime, examples, moment, new_runtime

pytestmark = pytest.mark.model

SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "batch_size": 4, "beta": 0.1},
    {"lr": 3e-2, "batch_size": 3, "beta": 0.5, "loss_type": "ipo"},
    {"lr": 1e-4, "batch_size": 9, "loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.3), "update_epochs": 2},
)
OVER_PAIRS = ("bco_pair", "aot", "aot_pair")


def make(**changes: Any) -> DPO:
    return agents_of(DPO, ({"lr": 1e-3, "batch_size": 64},), **changes)[0]


def pairs(count: int = 8, seed: int = 0, longest: int = 9) -> Any:
    return examples(count, seed, pairs=True, longest=longest)


# -- the loss --------------------------------------------------------------------------------------------------------


def hand_inputs() -> LossInputs:
    """Two pairs; sums over completions: policy (-1, -3), (-2, -2.5), reference (-1.5, -2), (-2, -3)."""
    logp = torch.tensor(
        [[-0.5, -0.5, 9.0], [-1.0, -1.0, -1.0], [-2.0, 9.0, 9.0], [-2.0, -0.5, 9.0]], dtype=torch.double
    )
    ref = torch.tensor([[-1.0, -0.5, 7.0], [-1.0, -0.5, -0.5], [-2.0, 7.0, 7.0], [-1.5, -1.5, 7.0]], dtype=torch.double)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    count = PairCount(2, 3)
    return LossInputs(logp.requires_grad_(), mask, logp.detach(), torch.zeros_like(logp), count, ref_logp=ref)


def test_objective_by_hand() -> None:
    # Delta = (pi_c - ref_c) - (pi_r - ref_r): 0.5 + 1 = 1.5 and 0 - 0.5 = -0.5
    inputs, metrics = hand_inputs(), MetricReducer()
    loss = make(beta=0.2).objective(inputs, metrics)
    expected = (math.log1p(math.exp(-0.3)) + math.log1p(math.exp(0.1))) / 2
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    # d loss / d logp of a chosen token = -beta sigmoid(-beta Delta) / pairs
    slope = 0.2 / (1 + math.exp(0.3)) / 2
    assert inputs.logp.grad is not None
    assert inputs.logp.grad[0].tolist() == pytest.approx([-slope, -slope, 0])
    assert inputs.logp.grad[1].tolist() == pytest.approx([slope] * 3)
    found = metrics.result()
    wanted = {
        "rewards/chosen": 0.2 * (0.5 + 0) / 2, "rewards/rejected": 0.2 * (-1 + 0.5) / 2, "rewards/margins": 0.1,
        "rewards/accuracies": 0.5, "logps/chosen": -1.5, "logps/rejected": -2.75,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_mixtures_and_nll_add_up() -> None:
    def loss(**settings: Any) -> float:
        return make(**settings).objective(hand_inputs(), MetricReducer()).item()

    nll = (1 + 2) / 3  # of the chosen tokens
    assert loss(nll_alpha=0.5) == pytest.approx(loss() + 0.5 * nll)
    mixed = loss(loss_type=["sigmoid", "hinge", "sft"], loss_weights=[0.5, 2, 0.1])
    assert mixed == pytest.approx(0.5 * loss() + 2 * loss(loss_type="hinge") + 0.1 * nll)
    assert loss(loss_type=["sigmoid", "hinge"]) == pytest.approx(loss() + loss(loss_type="hinge"))
    mirrored = (math.log1p(math.exp(0.15)) + math.log1p(math.exp(-0.05))) / 2
    assert loss(label_smoothing=0.3) == pytest.approx(0.7 * loss() + 0.3 * mirrored)
    assert loss(loss_type="discopop", discopop_tau=1.0) != loss(loss_type="discopop")


def test_at_the_start_the_policy_is_the_reference() -> None:
    metrics = make().learn(pairs())
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["rewards/margins"] == metrics["rewards/chosen"] == metrics["rewards/accuracies"] == 0.0
    assert metrics["logps/chosen"] < 0
    assert not {"reward", "mean_kl", "frac_reward_zero_std"} & set(metrics)


@pytest.mark.parametrize("loss_type", [*PREFERENCE_LOSSES, ("sigmoid", "sft")])
def test_micro_batches_accumulate_the_same_gradient(loss_type: Any) -> None:
    results, smoothing = [], 0.1 if loss_type == "cdpo" else 0.0
    sizes = (None, 1, 2, 4) if loss_type == "sigmoid" else (None, 2)
    for micro in (None,) if loss_type in OVER_PAIRS else sizes:
        agent = make(
            loss_type=loss_type, label_smoothing=smoothing, micro_batch_size_per_gpu=micro, max_grad_norm=None, lr=1e-2
        )
        agent.learn(pairs(seed=4))  # away from the reference, where some gradients vanish
        agent.runtime.store.clear_moments(agent.slot)
        results.append((agent.learn(pairs(12, longest=30)), moment(agent)))
    assert results[0][1].abs().sum() > 0
    for metrics, gradient in results[1:]:
        assert torch.allclose(gradient, results[0][1], rtol=1e-3, atol=1e-6)
        for name in ("loss", "rewards/margins", "logps/rejected"):
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("loss_type", OVER_PAIRS)
def test_losses_over_pairs_see_the_whole_step(loss_type: str) -> None:
    agent = make(loss_type=loss_type, batch_size=300)
    batch = pairs(300, longest=60)
    rows = torch.arange(len(batch))
    assert [len(part) for part in cut(batch, rows, agent.micro_batch, flat=True).parts] == [600]
    assert max(len(part) for part in cut(batch, rows, make().micro_batch, flat=True).parts) < 600


def test_pairs_stay_together_and_batch_sizes_count_pairs() -> None:
    """Of every pair the second completion is one token longer, wherever shuffling put it."""
    seen: list[tuple[int, bool]] = []

    def spy(inputs: LossInputs) -> torch.Tensor:
        lengths = inputs.mask.sum(dim=1)
        seen.append((len(lengths), bool((lengths[0::2] + 1 == lengths[1::2]).all())))
        return inputs.logp.sum() * 0

    agent = make(loss=spy, batch_size=5, micro_batch_size_per_gpu=2, update_epochs=2)
    agent.learn(pairs(12))
    assert seen == [(4, True), (4, True), (2, True)] * 2 + [(4, True)] + [(4, True), (4, True), (2, True)] * 2 + [
        (4, True)
    ]
    agent = make(mini_batch_size=3)
    assert agent.window_rows == 6


# -- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_computed_once_for_the_whole_population() -> None:
    agents = agents_of(DPO, SETTINGS)
    known, batch = ReferenceLogprobs.of(agents[0].runtime), pairs(9)
    learn_together(agents, [batch] * 3)
    assert known.rows_computed == 18
    learn_together(agents, [batch] * 3)
    assert known.rows_computed == 18
    agents[0].learn(pairs(3, seed=9))
    assert known.rows_computed == 24


def test_known_logprobs_are_the_base_models_bits() -> None:
    agent = make(lr=1e-2)
    first, second = pairs(8, longest=40), pairs(8, seed=1)
    agent.learn(first)
    agent.reference_logprobs(second)
    for batch in (second, first.select(torch.tensor([4, 5, 0, 1]))):
        fresh = fixed_logprobs(agent.runtime, None, batch, 1.0, MicroBatch(len(batch)))
        assert torch.equal(agent.reference_logprobs(batch), torch.where(batch.action_mask, fresh, 0.0))
    assert ReferenceLogprobs.of(agent.runtime).rows_computed == 32


def test_a_reference_of_its_own_is_shared_with_those_who_have_the_same() -> None:
    agents = agents_of(DPO, ({"lr": 1e-2}, {"lr": 1e-2}, {"lr": 1e-2}), lora_config=lora(8))
    known, batch = ReferenceLogprobs.of(agents[0].runtime), pairs(6)
    agents[0].learn(pairs(6, seed=1))
    before = known.rows_computed
    base = agents[1].reference_logprobs(batch)
    trained = agents[0].runtime.store.adapter(agents[0].slot)
    for agent in agents[:2]:
        agent.set_reference(trained)
    own = [agent.reference_logprobs(batch) for agent in agents]
    assert torch.equal(own[0], own[1])
    assert torch.equal(own[2], base)
    assert not torch.allclose(own[0], base, atol=1e-4)
    assert known.rows_computed == before + 24  # the base's and the trained adapter's
    fresh = fixed_logprobs(agents[1].runtime, agents[1].reference_slot, batch, 1.0, MicroBatch(12))
    assert torch.equal(own[1], torch.where(batch.action_mask, fresh, 0.0))
    child = agents[0].clone(7)
    assert torch.equal(child.reference_logprobs(batch), own[0])
    assert known.rows_computed == before + 24


def test_old_rows_are_forgotten_beyond_the_limit() -> None:
    runtime = new_runtime()
    known, batch = ReferenceLogprobs(runtime, max_tokens=30), pairs(8)
    full = known.logprobs(batch, None, b"base", MicroBatch(16))
    assert torch.equal(known.logprobs(batch, None, b"base", MicroBatch(16)), full)
    assert known.rows_computed > 16
    assert torch.equal(known.logprobs(batch.select(slice(14, 16)), None, b"base", MicroBatch(2))[0], full[14])


@pytest.mark.parametrize(
    "settings", [{"loss_type": "simpo"}, {"loss_type": "cpo"}, {"loss_type": "orpo"}, {"reference_free": True}]
)
def test_losses_without_a_reference_do_not_compute_it(settings: dict[str, Any]) -> None:
    agent, batch = make(lr=1e-2, **settings), pairs(6)
    before, per_token = agent.logprobs(batch).double(), settings.get("loss_type") in ("simpo", "orpo")
    metrics = agent.learn(batch)
    assert ReferenceLogprobs.of(agent.runtime).rows_computed == 0
    sums = before.sum(-1) / (batch.action_mask.sum(-1) if per_token else 1)
    assert metrics["rewards/chosen"] == pytest.approx(0.1 * float(sums[0::2].mean()), rel=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(0.1 * float((sums[0::2] - sums[1::2]).mean()), rel=1e-3)
    after = agent.logprobs(batch).double().sum(-1) / (batch.action_mask.sum(-1) if per_token else 1)
    assert agent.score(batch).tolist() == (after[0::2] > after[1::2]).double().tolist()


def test_pairs_are_weighted_by_the_current_policy() -> None:
    """The weights are those of the policy at each step: they come from the head's own distributions."""
    agent, batch = make(lr=1e-2, use_weighting=True), pairs(6, longest=20)
    agent.learn(pairs(6, seed=3))
    base, mask = agent.runtime.base, batch.action_mask
    with agent.runtime.store.routed(Route((agent.slot,), (len(batch),))), torch.no_grad():
        logits = base.logits(base.hidden(batch.ids))[:, :-1].double()
    spread = -torch.logsumexp(2 * logits.log_softmax(-1), -1)
    said = agent.logprobs(batch).double()
    aligned = torch.where(mask, said + spread, 0.0).sum(-1) / mask.sum(-1)
    weights_by_hand = (aligned[0::2] + aligned[1::2]).exp()
    gain = torch.where(mask, said - agent.reference_logprobs(batch), 0.0).sum(-1)
    by_pair = -torch.nn.functional.logsigmoid(0.1 * (gain[0::2] - gain[1::2]))
    assert weights_by_hand.std() > 1e-3
    assert agent.learn(batch)["loss"] == pytest.approx(float((weights_by_hand * by_pair).mean()), rel=1e-4)


# -- exactness and copies --------------------------------------------------------------------------------------------


# -- environments and populations ------------------------------------------------------------------------------------

ROWS = [{"question": str(i), "answer": str((i + 3) % 10), "rejected": str((i + 7) % 10)} for i in range(6)]


def preferences() -> PreferenceTask:
    return PreferenceTask(
        DatasetTask(ROWS, ROWS, reward_fn=lambda completion, answer, question: float(completion == answer))
    )


def test_a_population_separates_preferences() -> None:
    genes = HyperparameterConfig(lr=RLParameter(1e-5, 1e-1), beta=RLParameter(0.05, 0.5))
    agents = DPO.population(
        2, runtime=embedded_runtime(), hp_config=genes, lr=3e-3, batch_size=6, max_output_tokens=3, seed=1
    )
    population, margins = Population(agents, preferences(), prompts_per_step=6), []
    for _ in range(25):
        metrics = population.learn(population.draw())
        margins.append(metrics[0]["rewards/margins"])
    assert margins[0] == 0.0
    assert metrics[0]["rewards/accuracies"] == 1.0
    assert margins[5] < margins[12] < margins[-1]
    assert margins[-1] > 0.5
    assert metrics[0]["logps/chosen"] > metrics[0]["logps/rejected"]
    assert [a.steps for a in agents] == [300, 300]


def test_the_documented_loop_learns_and_tests() -> None:
    runtime = embedded_runtime()
    rows = [{"prompt": r["question"], "chosen": r["answer"], "rejected": r["rejected"]} for r in ROWS]
    env = PreferenceGym(rows, rows, runtime.tokenizer, data_batch_size_per_gpu=6)
    agent = DPO(runtime=runtime, lr=3e-3, batch_size=6)
    assert agent.test(env).tolist() == [0.0] * 6  # nothing gained on the reference yet
    batch = env.reset()
    for _ in range(10):
        agent.learn(batch)
        batch = env.step()
    assert agent.test(env).tolist() == [1.0] * 6
    assert agent.fitness == [0.0, 1.0]


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_defaults_and_names() -> None:
    assert ALGORITHMS["DPO"] is DPO
    config = DPO.Config()
    assert (config.beta, config.nll_alpha, config.loss_type, config.lr) == (0.1, 0.0, "sigmoid", 5e-6)
    for name in PREFERENCE_LOSSES:
        nll = {"sft": 1.0} if name in ("cpo", "orpo") else {}
        assert make(loss_type=name, label_smoothing=0.1 if name == "cdpo" else 0.0).config.losses == {name: 1.0} | nll
    assert make(loss_type="orpo").config.nll_alpha == 1.0  # so that it is in run.json, and a gene starts from it
    assert make(loss_type="orpo", nll_alpha=0.0).config.losses == {"orpo": 1.0}
    assert make(loss_type=("cpo", "sft"), loss_weights=(1.0, 0.3)).config.losses == {"cpo": 1.0, "sft": 0.3}
    assert make(loss_type="cpo").clone().config.losses == {"cpo": 1.0, "sft": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]}, "expected 2 numbers, found 1"),
        ({"loss_weights": [1.0, 2.0]}, "expected 1 numbers, found 2"),
        ({"loss_type": ["hinge", "hinge"]}, "names a loss twice"),
        ({"loss_type": "sft"}, "loss_type='sft' alone"),
        ({"loss_type": ["sigmoid", "sft"], "nll_alpha": 0.1}, "nll_alpha=0.1 both"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 .*loss_type='hinge'"),
        ({"loss_type": "cdpo"}, r"loss_type='cdpo' .*label_smoothing"),
        ({"loss_type": "aot", "micro_batch_size_per_gpu": 2}, "split; found micro_batch_size_per_gpu=2"),
        ({"loss_type": "aot", "use_weighting": True}, "use_weighting weighs"),
        ({"loss_type": "orpo", "ld_alpha": 0.5}, "ld_alpha=0.5 weighs"),
    ],
)
def test_contradictions_are_told_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_rows_that_are_no_pairs_are_refused() -> None:
    batch = pairs(3)
    bare = replace(batch, action_mask=batch.action_mask.clone())
    bare.action_mask[2] = False
    for bad, settings, message in (
        (examples(4), {}, r"rows, chosen and rejected .* found 4 rows"),
        (batch.select(slice(0, 5)), {}, "found 5 rows"),
        (bare, {}, r"found .* token; leave"),
        (bare, {"nll_alpha": 0.5}, "nll_alpha=0.5 learns"),
    ):
        agent = make(**settings)
        before = weights(agent)
        with pytest.raises(ConfigError, match=message):
            agent.learn(bad)
        assert equal(weights(agent), before)
    agent = make(nll_alpha=0.1)
    with pytest.raises(ConfigError, match=r"denominator 3\.0.*pairs"):
        agent.accumulate(batch, denominator=3.0)
    agent.accumulate(batch, denominator=agent.window_denominator(batch.action_mask))
