"""SFT: the loss and its window, packing, metrics, exactness, and that it memorises."""

import math
from typing import Any

import pytest
import torch

from agilerl.algorithms import ALGORITHMS, GRPO, SFT
from agilerl.algorithms.forward import forward
from agilerl.algorithms.update import learn_together
from agilerl.data import RolloutBatch
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import SFTTask
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.llm_envs import SFTGym
from agilerl.population import Population
from tests.algorithms.conftest import equal, lora, weights
from tests.algorithms.data_agents import agents_of, embedded_runtime, examples, moment, new_runtime

pytestmark = pytest.mark.model


def make(**changes: Any) -> SFT:
    return agents_of(SFT, ({"lr": 1e-3, "batch_size": 64},), **changes)[0]


def token_stats(agent: SFT, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and whether they are the largest, of every learned token, from the model's own full logits."""
    with torch.no_grad(), agent.select_adapter("actor"):
        logits = agent.runtime.base.model(batch.ids).logits[:, :-1].double()
    targets = batch.ids[:, 1:]
    logp = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    return logp[batch.action_mask], (logits.argmax(-1) == targets)[batch.action_mask]


# -- the loss --------------------------------------------------------------------------------------------------------


def test_loss_and_metrics_are_those_of_the_full_logits() -> None:
    agent = make(lr=1e-2)
    agent.learn(examples(16, seed=3))  # away from the start, where an adapter does nothing
    batch = examples(16)
    logp, right = token_stats(agent, batch)
    metrics = agent.learn(batch)
    assert metrics["loss"] == metrics["mean_loss"] == pytest.approx(float(-logp.mean()), abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(float(-logp.mean())), rel=1e-5)
    assert metrics["mean_token_accuracy"] == pytest.approx(float(right.double().mean()))
    assert metrics["completions/mean_length"] == pytest.approx(float(batch.action_mask.sum()) / 16)
    assert not {"reward", "reward_std", "frac_reward_zero_std", "mean_kl", "kl"} & set(metrics)


def test_dft_weighs_each_token_by_its_own_probability() -> None:
    agent, batch = make(loss_type="dft"), examples(8)
    logp, _ = token_stats(agent, batch)
    assert agent.learn(batch)["loss"] == pytest.approx(float(-(logp.exp() * logp).mean()), abs=1e-6)
    plain = make()
    plain.learn(batch)
    assert not torch.allclose(moment(plain), moment(agent), rtol=1e-2)


@pytest.mark.parametrize("micro", [2, 4])
def test_packed_rows_give_the_losses_and_gradients_of_padded_ones(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizer steps of rows whose lengths differ; packing computes fewer tokens for the same result."""
    batch, results = examples(24, longest=90, seed=1), []
    for packing in (False, True):
        agent = make(packing=packing, micro_batch_size_per_gpu=micro, batch_size=12, lr=1e-5)
        tokens: list[int] = []

        def counted(runtime: Any, parts: Any, *, entropy: bool = False, tokens: list[int] = tokens) -> Any:
            tokens.append(sum(p.batch.ids.numel() for p in parts))
            return forward(runtime, parts, entropy=entropy)

        for module in ("forward", "update"):
            monkeypatch.setattr(f"agilerl.algorithms.{module}.forward", counted)
        metrics = agent.learn(batch)
        results.append((metrics, moment(agent), agent.runtime.store.theta[agent.slot].clone(), sum(tokens)))
    (padded, gradient, theta, tokens), (packed, gradient2, theta2, tokens2) = results
    assert torch.allclose(gradient, gradient2, rtol=1e-4, atol=1e-7)
    assert torch.allclose(theta, theta2, atol=1e-6)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    assert tokens2 < 0.9 * tokens


# -- exactness and copies --------------------------------------------------------------------------------------------


# -- environments and populations ------------------------------------------------------------------------------------

ROWS = [{"question": q, "answer": a} for q, a in (("2+2", "4"), ("capital", "Rome"), ("b", "no"), ("sun", "nus"))]


def memory_task() -> SFTTask:
    return SFTTask(DatasetTask(ROWS, ROWS, reward_fn=lambda completion, answer, question: float(completion == answer)))


def test_a_population_memorises_pairs_and_evolution_sees_it() -> None:
    genes = HyperparameterConfig(lr=RLParameter(1e-4, 1e-1))
    agents = SFT.population(
        2, runtime=embedded_runtime(), hp_config=genes, lr=1e-2, batch_size=4, max_output_tokens=6, seed=1
    )
    population = Population(agents, memory_task(), prompts_per_step=4)
    assert population.evaluate()[0].mean < 0.5
    for _ in range(40):
        metrics = population.learn(population.draw())
    results = population.evaluate()
    assert results[0].mean == 1.0
    assert metrics[0]["mean_token_accuracy"] == 1.0
    assert metrics[0]["perplexity"] < 2  # the small head bounds the logits
    assert [a.position for a in agents] == [160, 160]


def test_all_agents_of_a_population_read_the_same_rows() -> None:
    agents = SFT.population(2, runtime=embedded_runtime(), lr=1e-3, seed=1)
    population = Population(agents, memory_task(), prompts_per_step=3)
    first, second = population.draw().trajectories.values()
    assert [t.token_ids for t in first] == [t.token_ids for t in second]
    assert [t.group for t in first] == [0, 1, 2]
    agents[1].position = 0
    assert [t.token_ids for t in population.draw().trajectories[1]] == [t.token_ids for t in first]


def test_the_documented_loop_learns_and_tests() -> None:
    runtime = embedded_runtime()
    rows = [{"prompt": r["question"], "target": r["answer"]} for r in ROWS]
    env = SFTGym(rows, rows, runtime.tokenizer, data_batch_size_per_gpu=4)
    agent = SFT(runtime=runtime, lr=1e-2, batch_size=4)
    before = agent.test(env)
    batch = env.reset()
    for _ in range(10):
        agent.learn(batch)
        batch = env.step()
    after = agent.test(env)
    assert before.shape == after.shape == (4,)
    assert (after > before + 1).all()
    assert agent.fitness == pytest.approx([before.mean(), after.mean()])
    with env.eval_mode():
        logp = agent.logprobs(env.reset())
    assert after[0] == pytest.approx(float(logp[0][logp[0] != 0].mean()), rel=1e-5)
    assert agent.test(env, loop=2).shape == (8,)


def test_exams_of_prompts_are_answered_greedily() -> None:
    from agilerl.llm_envs import ReasoningGym

    runtime = embedded_runtime()
    env = ReasoningGym.from_task(memory_task().task, runtime.tokenizer, 4)
    agent = SFT(runtime=runtime, max_output_tokens=3)
    assert agent.test(env).shape == (4,)
    prompts = env.reset()
    assert [x.shape[0] for x in agent.get_action(prompts).completion_ids] == [1] * 4


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_defaults_and_names() -> None:
    assert ALGORITHMS["SFT"] is SFT
    config = SFT.Config()
    assert (config.lr, config.loss_type, config.packing) == (1e-4, "nll", True)
    with pytest.raises(ConfigError, match=r"SFT .*'beta'"):
        make(beta=0.1)


def test_what_is_no_batch_is_refused() -> None:
    agent = make()
    with pytest.raises(ConfigError, match=r"SFT .*found list"):
        agent.learn([{"prompt": "1", "target": "2"}])
    batch = examples(4)
    batch.action_mask[2] = False
    before = weights(agent)
    with pytest.raises(ConfigError, match="found a row without one"):
        agent.learn(batch)
    assert equal(weights(agent), before)


def test_populations_learn_from_one_source_that_fits() -> None:
    runtime = embedded_runtime()
    sft, grpo = SFT(runtime=runtime), GRPO(runtime=runtime, index=1)
    with pytest.raises(ConfigError, match=r"SFT .*'dataset' \(DatasetTask\)"):
        Population([sft], memory_task().task)
    with pytest.raises(ConfigError, match="found reasoning, sft"):
        Population([sft, grpo], memory_task())


def test_other_ranks_share_the_bank() -> None:
    runtime = new_runtime()
    small, large = agents_of(SFT, ({"lora_config": lora(2)}, {"lora_config": lora(16)}), runtime)
    learn_together([small, large], [examples(8), examples(8)])
    assert (small.rank, large.rank) == (2, 16)
