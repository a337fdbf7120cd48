"""KTO: loss and gradient as the formula, the reference point, labels and pairs, exactness, and what learning does."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import KTO
from agilerl.algorithms.kto import mismatched
from agilerl.data import LossInputs, RolloutBatch
from agilerl.envs.datasets import CuratedTask, DatasetTask
from agilerl.envs.examples import UnpairedTask
from agilerl.errors import ConfigError, EnvError
from agilerl.functional import MetricReducer
from agilerl.llm_envs import PreferenceGym, UnpairedGym
from tests.algorithms.data_agents import agents_of, embedded_runtime, examples, moment
from tests.tiny_models import PAD

pytestmark = pytest.mark.model


def make(**changes: Any) -> KTO:
    return agents_of(KTO, ({"lr": 1e-3, "batch_size": 64},), **changes)[0]


def answers(count: int = 8, seed: int = 0, longest: int = 9) -> RolloutBatch:
    labels = torch.arange(count) % 3 != 0
    return replace(examples(count, seed, longest=longest), desirable=labels)


def kto_oracle(
    policy: list[float], reference: list[float], good: list[bool], z: float, beta: float, weights: tuple[float, float]
) -> tuple[float, list[float]]:
    """Return the mean loss and its derivative by each summed log-prob, in plain Python (arXiv 2402.01306)."""
    losses, slopes = [], []
    for p, r, is_good in zip(policy, reference, good):
        side = 1 if is_good else -1
        value = 1 / (1 + math.exp(-beta * side * (p - r - z)))
        weight = weights[0] if is_good else weights[1]
        losses.append(weight * (1 - value))
        slopes.append(-weight * beta * side * value * (1 - value) / len(policy))
    return sum(losses) / len(losses), slopes


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_value_and_gradient_are_those_of_the_formula(loss_type: str) -> None:
    draws = torch.Generator().manual_seed(3)
    logp = (-3 * torch.rand((5, 7), generator=draws, dtype=torch.double)).requires_grad_()
    ref = -3 * torch.rand((5, 7), generator=draws, dtype=torch.double)
    mask = torch.arange(7) < torch.tensor([[7], [1], [4], [6], [2]])
    good, z = torch.tensor([True, False, False, True, True]), 0.7
    inputs = LossInputs(
        logp, mask, logp.detach(), torch.zeros_like(ref), 5.0, ref_logp=ref, desirable=good,
        reference_point=torch.full((5,), z, dtype=torch.double),
    )  # fmt: skip
    agent = make(beta=0.4, desirable_weight=1.3, undesirable_weight=0.6, loss_type=loss_type)
    metrics = MetricReducer()
    loss = agent.objective(inputs, metrics)
    loss.backward()
    policy, reference = ([sum(row[m].tolist()) for row, m in zip(x.detach(), mask)] for x in (logp, ref))
    value, slopes = kto_oracle(policy, reference, good.tolist(), z if loss_type == "kto" else 0.0, 0.4, (1.3, 0.6))
    assert loss.item() == pytest.approx(value)
    assert logp.grad is not None
    for row, slope, own in zip(logp.grad, slopes, mask):
        assert row.tolist() == pytest.approx(torch.where(own, slope, 0.0).tolist())
    found, gains = metrics.result(), [0.4 * (p - r) for p, r in zip(policy, reference)]
    assert found["rewards/chosen"] == pytest.approx((gains[0] + gains[3] + gains[4]) / 3)
    assert found["rewards/rejected"] == pytest.approx((gains[1] + gains[2]) / 2)
    assert found["logps/rejected"] == pytest.approx((policy[1] + policy[2]) / 2)


def test_an_update_is_that_of_the_formula_with_the_reference_point_of_other_completions() -> None:
    agent, batch = make(lr=1e-2, beta=0.3, max_grad_norm=None), answers(9)
    agent.learn(answers(9, seed=1))  # away from the reference
    others = mismatched(batch, PAD, agent.context_length)
    gap = agent.logprobs(others).double() - agent.reference_logprobs(others).double()
    z = max(0.0, float(torch.where(others.action_mask, gap, 0.0).sum(-1).mean()))
    mask = batch.action_mask
    own, ref = (
        torch.where(mask, x.double(), 0.0).sum(-1) for x in (agent.logprobs(batch), agent.reference_logprobs(batch))
    )
    assert batch.desirable is not None
    value, slopes = kto_oracle(own.tolist(), ref.tolist(), batch.desirable.tolist(), z, 0.3, (1.0, 1.0))
    twin = agent.clone(5)
    twin.runtime.store.clear_moments(twin.slot)
    twin.accumulate_tangents(batch, torch.where(mask, torch.tensor(slopes)[:, None], 0.0))
    twin.optim_step()
    agent.runtime.store.clear_moments(agent.slot)
    before = agent.tokens["trained"]
    metrics = agent.learn(batch)
    assert metrics["loss"] == pytest.approx(value, rel=1e-5)
    # Sums of log-probs in fp32: processors differ in the seventh digit of the sum, not of this small difference.
    assert metrics["reference_point"] == pytest.approx(z, rel=1e-5, abs=1e-6)
    assert torch.allclose(moment(agent), moment(twin), rtol=1e-3, atol=1e-7)
    assert agent.tokens["trained"] - before == int(batch.lengths.sum() + others.lengths.sum())


def test_the_reference_point_is_never_negative_and_counts() -> None:
    found = []
    for seed in range(6):
        agent = make(lr=3e-2, desirable_weight=float(seed % 2), undesirable_weight=float(1 - seed % 2))
        agent.learn(answers(12, seed))
        found.append(agent.prepare(answers(12, 50 + seed)).metrics["reference_point"])
    assert min(found) == 0.0
    assert max(found) > 0.0
    assert "reference_point" not in make().prepare(answers(0)).metrics


def test_at_the_start_the_policy_is_the_reference() -> None:
    metrics = make(desirable_weight=0.5).learn(answers(9))
    assert metrics["loss"] == pytest.approx(0.5 * (3 + 0.5 * 6) / 9)
    assert metrics["reference_point"] == metrics["rewards/chosen"] == metrics["rewards/accuracies"] == 0.0
    assert not {"reward", "mean_kl", "frac_reward_zero_std"} & set(metrics)


def test_other_completions_follow_prompts_that_are_not_theirs() -> None:
    batch = examples(4, pairs=True)  # rows 0 and 1 share a prompt, and so on
    others = mismatched(batch, PAD, 64)
    start = (batch.action_mask.int().argmax(1) + 1).tolist()
    for row in range(8):
        donor = (row // 2 * 2 + 2) % 8
        prompt = batch.ids[row, : start[row]].tolist()
        completion = batch.ids[donor, start[donor] : batch.lengths[donor]].tolist()
        assert others.ids[row, : others.lengths[row]].tolist() == prompt + completion
        assert int(others.action_mask[row].sum()) == len(completion)
    cut = mismatched(batch, PAD, max(start) + 1)
    assert int(cut.lengths.max()) <= max(start) + 1
    assert len(mismatched(batch.select(slice(0, 2)), PAD, 64)) == 0


# -- exactness --------------------------------------------------------------------------------------------------------


def test_good_completions_become_likelier_and_bad_ones_less_so() -> None:
    agent, batch = make(lr=1e-2), answers(16)
    before = agent.logprobs(batch).sum(-1)
    for _ in range(8):
        agent.learn(batch)
    gain = agent.logprobs(batch).sum(-1) - before
    assert batch.desirable is not None
    assert gain[batch.desirable].mean() > 0 > gain[~batch.desirable].mean()
    assert float(agent.score(batch).mean()) > 0.9


def test_own_losses_see_labels_and_the_reference_point() -> None:
    seen = []

    def loss(inputs: LossInputs) -> torch.Tensor:
        assert inputs.desirable is not None
        assert inputs.reference_point is not None
        seen.append((inputs.desirable.tolist(), inputs.reference_point.shape))
        return inputs.logp.sum() * 0

    make(loss=loss, micro_batch_size_per_gpu=4).learn(answers(6))
    assert sorted(len(labels) for labels, _ in seen) == [2, 4]
    assert sum(sum(labels) for labels, _ in seen) == 4
    assert all(shape == (len(labels),) for labels, shape in seen)


# -- labelled rows, and pairs as labelled rows ------------------------------------------------------------------------

ROWS = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 3 != 0} for n in range(12)]
PAIRS = [{"prompt": f"q{n}", "chosen": f"good{n}", "rejected": f"bad{n}"} for n in range(8)]


def test_gyms_of_labelled_rows_and_of_pairs() -> None:
    runtime = embedded_runtime()
    gym = UnpairedGym(ROWS, ROWS, runtime.tokenizer, data_batch_size_per_gpu=6)
    batch = gym.reset()
    assert batch.desirable is not None
    texts = [runtime.tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(batch.ids, batch.lengths)]
    for text, label in zip(texts, batch.desirable.tolist()):
        number = int(text[text.rindex("a") + 1 :])
        assert label == ROWS[number]["label"]
    both = UnpairedGym(PAIRS, PAIRS, runtime.tokenizer, data_batch_size_per_gpu=2).reset()
    assert both.desirable is not None
    assert both.desirable.tolist() == [True, False] * 2
    agent = KTO(runtime=runtime, lr=1e-3)
    assert agent.learn(batch)["loss"] == pytest.approx(0.5)
    assert agent.test(gym).shape == (6,)
    with pytest.raises(ConfigError, match="UnpairedGym"):
        agent.learn(PreferenceGym(PAIRS, PAIRS, runtime.tokenizer).reset())


def test_pairs_become_two_rows_of_an_epoch() -> None:
    task = UnpairedTask(DatasetTask(PAIRS, PAIRS[:1], reward_fn=lambda c, a, q: float(c == a), purpose="unpaired"))
    assert task.train_size == 16
    rows = [task.row("train", position) for position in range(16)]
    tokenizer = embedded_runtime().tokenizer
    for good, bad in zip(rows[0::2], rows[1::2]):
        assert good["prompt"] == bad["prompt"]
        (first,), (second,) = (task.examples(tokenizer, row) for row in (good, bad))
        assert (first.text, first.desirable) == (good["chosen"], True)
        assert (second.text, second.desirable) == (good["rejected"], False)
    assert len({row["prompt"] for row in rows}) == 8


def test_only_good_answers_are_examined() -> None:
    task = UnpairedTask(CuratedTask(ROWS, purpose="unpaired", exam_prompts=4, test_prompts=2))
    labels = [task.row("exam", place)["label"] for place in range(4)]
    assert labels == [True] * 4
    assert task.labelled
    assert task.train_size == 6
    assert sum(not task.row("train", place)["label"] for place in range(6)) == 4


@pytest.mark.parametrize("label", [{"label": word} for word in ("yes", None, 0.5, "0.0")] + [{}], ids=repr)
def test_labels_that_are_none(label: dict[str, Any]) -> None:
    rows = [{"prompt": "q", "completion": "a", **label}]
    with pytest.raises(EnvError, match="column label"):
        UnpairedGym(rows, rows, embedded_runtime().tokenizer)


def test_labels_of_text_files_are_words_or_digits() -> None:
    rows = [{**row, "label": word} for row, word in zip(ROWS, ("true", "False", "1", "0"))]
    task = UnpairedTask(DatasetTask(rows, rows[:1], reward_fn=lambda c, a, q: 0.0, purpose="unpaired"))
    found = {row["prompt"]: example.desirable for row, example in _examples(task, 4)}
    assert found == {"q0": True, "q1": False, "q2": True, "q3": False}


def _examples(task: UnpairedTask, count: int) -> list[tuple[Any, Any]]:
    tokenizer = embedded_runtime().tokenizer
    return [(row, *task.examples(tokenizer, row)) for row in (task.row("train", n) for n in range(count))]


def test_settings_that_learn_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing to learn"):
        make(desirable_weight=0.0, undesirable_weight=0.0)
