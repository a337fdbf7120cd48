"""The metrics of an update: which there are, what they are, and that no split or packing changes one of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.data import MicroBatch, RolloutBatch
from agilerl.functional import kl_estimate
from agilerl.population import Population
from tests.algorithms.conftest import batch_of, make_agents
from tests.algorithms.data_agents import embedded_runtime
from tests.probes import ConstantTarget

pytestmark = pytest.mark.model

ALWAYS = {
    "loss",
    "policy_loss",
    "mean_loss",
    "mean_kl",
    "learning_rate",
    "grad_norm",
    "num_tokens",
    "skipped_steps",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "advantages/mean",
    "advantages/std",
    "advantages/abs_mean",
    "is_ratio/mean",
    "is_ratio/min",
    "is_ratio/max",
}
WITH_REFERENCE = {"kl"}
WITH_FOREIGN_SAMPLER = {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"}
WITH_ONE_GRADER = {"rewards/reward/mean", "rewards/reward/std", "reward_errors/reward"}
MOVES = {"lr": 1e-2, "batch_size": 16, "beta": 0.05, "update_epochs": 2, "clip_coef": 0.05}


def foreign(agent: GRPO, batch: RolloutBatch, shift: float = 0.1) -> RolloutBatch:
    """The batch as an engine reports it whose log-probs are off, by more at later tokens."""
    agent.runtime.engine.exact = False
    assert batch.sampling_logps is not None
    steps = batch.action_mask.cumsum(dim=1)
    return replace(batch, sampling_logps=torch.where(batch.action_mask, batch.sampling_logps - shift * steps, 0.0))


def learned(**changes: Any) -> dict[str, float]:
    """Metrics of one update on the same batch, whatever the settings."""
    (agent,) = make_agents(1, **{**MOVES, **changes})
    return agent.learn(foreign(agent, batch_of(agent)))


# -- the set ----------------------------------------------------------------------------------------------------------


def test_the_names_after_learn() -> None:
    (agent,) = make_agents(1, beta=0.0)
    batch = batch_of(agent)
    assert set(agent.learn(batch)) == ALWAYS
    agent.beta = 0.1
    assert set(agent.learn(batch)) == ALWAYS | WITH_REFERENCE
    assert set(agent.learn(foreign(agent, batch))) == ALWAYS | WITH_REFERENCE | WITH_FOREIGN_SAMPLER


def test_the_names_after_a_populations_step() -> None:
    runtime = embedded_runtime(scale=1.0)
    agents = GRPO.population(2, runtime=runtime, group_size=4, batch_size=16, max_output_tokens=2, beta=0.1)
    population = Population(agents, ConstantTarget(), prompts_per_step=4, eval_max_new_tokens=2)
    for metrics in population.learn(population.rollout()).values():
        assert set(metrics) == ALWAYS | WITH_REFERENCE | WITH_ONE_GRADER
        assert metrics["rewards/reward/mean"] == metrics["reward"]
        assert metrics["rewards/reward/std"] == metrics["reward_std"]


# -- their values -----------------------------------------------------------------------------------------------------


def test_values_from_first_principles() -> None:
    """One optimizer step by a policy that is a little ahead of the one that sampled; everything said once more."""
    (agent,) = make_agents(1, **MOVES)
    batch = batch_of(agent)
    agent.learn(batch)
    agent.set_hyperparameters({"update_epochs": 1, "lr": 1e-3})
    batch.rewards[:4] = 0.25  # a group that all scored alike
    seen = agent.logprobs(batch)
    old = batch.sampling_logps
    assert old is not None
    reference = fixed_logprobs(agent.runtime, None, batch, 1.0, MicroBatch(16))
    agent.batch_size = 15  # off-policy, in two steps: the second one moves no metric that is taken before it
    agent.lr = 1e-12
    metrics = agent.learn(batch)
    mask = batch.action_mask
    advantages, ratio, rewards = agent.credit(batch)[mask], (seen - old).exp()[mask], batch.rewards[:, 0]
    low, high = agent.config.clip_range
    kl = kl_estimate(seen, reference)[mask]
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    expected = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "frac_reward_zero_std": 0.25,
        "completions/mean_length": mask.sum(1).double().mean(),
        "completions/min_length": mask.sum(1).min(),
        "completions/max_length": mask.sum(1).max(),
        "completions/clipped_ratio": batch.truncated.double().mean(),  # type: ignore[union-attr]
        "advantages/mean": advantages.mean(),
        "advantages/std": advantages.std(),
        "advantages/abs_mean": advantages.abs().mean(),
        "is_ratio/mean": ratio.mean(),
        "is_ratio/min": ratio.min(),
        "is_ratio/max": ratio.max(),
        "clip_ratio/low_mean": below.double().mean(),
        "clip_ratio/high_mean": above.double().mean(),
        "clip_ratio/region_mean": (below | above).double().mean(),
        "policy_loss": surrogate.mean(),
        "kl": kl.mean(),
        "mean_kl": kl.mean(),
        "learning_rate": 1e-12,
        "skipped_steps": 0.0,
        "num_tokens": 3.0 * int(batch.lengths.sum()),  # two epochs and this one
    }
    found = {name: metrics[name] for name in expected}
    assert found == pytest.approx({n: float(v) for n, v in expected.items()}, rel=1e-4, abs=1e-6)
    assert expected["clip_ratio/low_mean"] > 0
    assert expected["clip_ratio/high_mean"] > 0


def test_the_gap_to_a_foreign_sampler() -> None:
    (agent,) = make_agents(1, **MOVES)
    batch = foreign(agent, batch_of(agent), shift=0.1)
    metrics = agent.learn(batch)
    steps = batch.action_mask.cumsum(dim=1)[batch.action_mask].double()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1 * float(steps.mean()), rel=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.1 * float(steps.max()), rel=1e-4)


def test_a_completion_without_a_grade_has_no_reward() -> None:
    (agent,) = make_agents(1)
    batch = batch_of(agent)
    batch.rewards[:4] = torch.tensor([[0.5], [float("nan")], [1.0], [float("nan")]])
    batch.rewards[4:] = 0.0
    metrics = agent.learn(batch)
    assert metrics["reward"] == pytest.approx(1.5 / 14)
    assert metrics["frac_reward_zero_std"] == pytest.approx(12 / 14)
    batch.rewards.fill_(float("nan"))
    metrics = agent.learn(batch)
    assert "reward" not in metrics
    assert metrics["completions/max_length"] > 0


def test_rows_without_advantage_count_although_they_are_not_computed() -> None:
    """At beta 0 they are skipped. What is known of them without a forward pass is 0, and takes part in the means."""
    found = []
    for beta in (0.0, 1e-12):  # the second computes every row
        (agent,) = make_agents(1, **{**MOVES, "beta": beta})
        batch = batch_of(agent)
        batch.rewards[:8] = 0.5
        found.append(agent.learn(batch))
    skipped, computed = found
    names = ALWAYS - {"entropy", "is_ratio/mean", "is_ratio/min", "is_ratio/max", "mean_kl"}
    assert {n: skipped[n] for n in names} == pytest.approx({n: computed[n] for n in names}, rel=1e-3, abs=1e-5)
    assert skipped["entropy"] != pytest.approx(computed["entropy"], rel=1e-3)


# -- no split, no packing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_norm": "token-mean", "loss_type": "cispo", "clip_coef": (0.98, 1.02)},
        {"loss_type": "gspo", "beta": 0.0},
        {"batch_size": 6},  # windows of 6, 6 and 4 rows
    ],
)
def test_no_metric_depends_on_the_micro_batch(settings: dict[str, Any]) -> None:
    whole = learned(**settings, micro_batch_size_per_gpu=16)
    expected = ALWAYS | WITH_FOREIGN_SAMPLER | (set() if settings.get("beta") == 0 else WITH_REFERENCE)
    assert set(whole) == expected
    assert whole["clip_ratio/region_mean"] > 0
    for micro in (1, 2, 3, 4):
        # A second step amplifies the rounding of the first: fp32 sums in another order, through Adam.
        assert learned(**settings, micro_batch_size_per_gpu=micro) == pytest.approx(whole, rel=2e-3, abs=2e-4), micro
