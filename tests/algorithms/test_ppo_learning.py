"""PPO learns: its critic on constant returns, bandits of known optimum, a walk whose only reward comes last."""

from typing import Any

import pytest
import torch

from agilerl.algorithms import PPO
from agilerl.algorithms.forward import fixed_values
from agilerl.data import MicroBatch, Trajectory, collate
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.hpo.tournament import TournamentSelection
from agilerl.population import Population
from agilerl.rollouts import GenerationRequest
from agilerl.runtime import Runtime
from tests.algorithms.data_agents import embedded_runtime
from tests.probes import ConditionalTarget, ConstantTarget, GridNavigation
from tests.tiny_models import PAD, qwen2, random_model

pytestmark = pytest.mark.model

DIGIT_ZERO = 2  # token id of the digit 0: pad and end come before it


def digits_agent(**settings: Any) -> PPO:
    """An agent whose vocabulary is little more than the ten digits."""
    runtime = Runtime.for_model(random_model(qwen2(vocab_size=16)), seed=1)
    defaults = {"lr_actor": 5e-3, "lr_critic": 1e-2, "entropy_coef": 0.03, "beta": 0.0, "max_output_tokens": 1}
    return PPO(runtime=runtime, pad_token_id=PAD, **{**defaults, "seed": 1, "batch_size": 64, **settings})


def encode(text: str) -> list[int]:
    return [DIGIT_ZERO + int(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(str(i - DIGIT_ZERO) if 0 <= i - DIGIT_ZERO < 10 else "x" for i in ids)


def act(agent: PPO, contexts: list[list[int]], *key: int) -> list[Any]:
    """Sample one completion of each context."""
    requests = [
        GenerationRequest(agent.slot, ids, 1, agent.sampling(len(ids)), key=(agent.index, agent.rollouts, i, *key))
        for i, ids in enumerate(contexts)
    ]
    return [c for (c,) in agent.runtime.engine.generate(requests)]


def bandit(agent: PPO, task: Any, episodes: int, reward: float | None = None) -> list[Trajectory]:
    rows = [task.row("train", agent.rollouts * episodes + i) for i in range(episodes)]
    prompts = [encode(row["question"]) for row in rows]
    found = [
        Trajectory(prompt, c.token_ids, [True] * len(c.token_ids), c.logprobs, [0.0], group=i)
        for i, (prompt, c) in enumerate(zip(prompts, act(agent, prompts)))
    ]
    for t, row in zip(found, rows):
        t.rewards = [task.reward(decode(t.token_ids), row) if reward is None else reward]
    agent.rollouts += 1
    return found


def walk(agent: Any, episodes: int, size: int = 3) -> list[Trajectory]:
    """Play GridNavigation turn by turn, ``group_size`` times from each start; the only reward is at the goal.

    A turn is one digit of the agent, then the two digits that it observes.
    """
    group = agent.config.group_size
    envs = [GridNavigation(size) for _ in range(episodes)]
    starts = [env.reset(seed=(agent.rollouts * episodes + i) // group)[0] for i, env in enumerate(envs)]
    found = [Trajectory(encode(start), [], [], [], [], group=i // group) for i, start in enumerate(starts)]
    for turn in range(envs[0].max_turns):
        completions = act(agent, [t.prompt_ids + t.token_ids for t in found], turn)
        for t, env, c in zip(found, envs, completions):
            observation, reward, over, _, _ = env.step(decode(c.token_ids))
            t.rewards.append(reward)
            told = [] if over else encode(observation)
            t.token_ids += c.token_ids + told
            t.logprobs += c.logprobs + [0.0] * len(told)
            t.turn_ids += [turn] * len(c.token_ids) + [-1] * len(told)
    for t in found:
        t.action_mask = [k >= 0 for k in t.turn_ids]
    agent.rollouts += 1
    return found


def learn_until(agent: PPO, play: Any, least: float, updates: int) -> int:
    """Return the number of updates until a batch of fresh samples earns ``least`` in the mean."""
    for update in range(1, updates + 1):
        if agent.learn(collate(play(agent), PAD))["reward"] >= least:
            return update
    return updates + 1


def test_the_value_head_converges_on_a_constant_return() -> None:
    agent = digits_agent(lr_actor=1e-12, lr_critic=1e-2, max_output_tokens=4)
    for _ in range(25):
        metrics = agent.learn(collate(bandit(agent, ConstantTarget(), 32, reward=0.7), PAD))
    batch = collate(bandit(agent, ConstantTarget(), 32, reward=0.7), PAD)
    values = fixed_values(agent.runtime, agent.critic_slot, batch, MicroBatch(32))[batch.action_mask]
    assert (values - 0.7).abs().mean() < 0.05
    assert metrics["value_loss"] < 0.005
    assert metrics["explained_variance"] == 0.0  # the returns do not vary


def test_the_critic_explains_returns_that_depend_on_the_prompt() -> None:
    class ByParity(ConstantTarget):
        def reward(self, completion: str, row: Any) -> float:
            return float(int(row["question"]) % 2)

    agent = digits_agent(lr_actor=1e-12, lr_critic=1e-2)
    explained = [agent.learn(collate(bandit(agent, ByParity(), 32), PAD))["explained_variance"] for _ in range(25)]
    assert explained[0] < 0.2
    assert explained[-1] > 0.9


def test_ppo_solves_the_conditional_target() -> None:
    agent = digits_agent()
    assert learn_until(agent, lambda a: bandit(a, ConditionalTarget(), 64), 0.95, 50) <= 50


def test_credit_reaches_the_first_turn_of_a_walk() -> None:
    """Two steps on three cells; where the goal is two cells away, only the right first move can earn the reward."""
    agent = digits_agent()
    assert learn_until(agent, lambda a: walk(a, 64), 0.95, 50) <= 50
    played = walk(agent, 64)
    far = [t.token_ids for t in played if abs(t.prompt_ids[0] - t.prompt_ids[1]) == 2]
    assert len(far) > 10
    assert sum(decode(t[:1]) in "13" for t in far) / len(far) > 0.8


def population(task: Any, **settings: Any) -> Population:
    runtime = embedded_runtime(scale=1.0)
    genes = HyperparameterConfig(lr_actor=RLParameter(1e-5, 1e-1), lr_critic=RLParameter(1e-5, 1e-1))
    defaults = {"lr_actor": 3e-3, "lr_critic": 3e-3, "beta": 0.0, "max_output_tokens": 1, "seed": 1, "batch_size": 128}
    agents = PPO.population(hp_config=genes, runtime=runtime, **{**defaults, **settings})
    return Population(agents, task, prompts_per_step=defaults["batch_size"], eval_max_new_tokens=1)


def test_a_population_solves_the_constant_target() -> None:
    found = population(ConstantTarget(), size=1)
    assert found.evaluate()[0].mean < 0.5
    for _ in range(8):
        found.learn(found.rollout())
    assert found.evaluate()[0].mean == 1.0


def test_evolution_copies_critics_and_keeps_the_slots_together() -> None:
    found = population(ConstantTarget(), size=4, batch_size=8)
    found.prompts_per_step = 8
    store = found.runtime.store
    assert len({a.lr_actor for a in found.agents}) == len({a.lr_critic for a in found.agents}) == 4
    for generation in range(3):
        found.learn(found.rollout())
        elite = found.agents[generation]
        fitness = {a.index: Fitness(float(a is elite), 0.0, 4) for a in found.agents}
        before = store.theta[elite.critic_slot].clone()
        found.evolve(
            fitness, TournamentSelection(4, True, 4), Mutations(0, 0, 0, 0, 0, 1), generation=generation, seed=0
        )
        assert all(torch.equal(store.theta[a.critic_slot], before) for a in found.agents)
        assert sorted(s for a in found.agents for s in (a.slot, a.critic_slot)) == list(range(8))
        assert store.used == 8
    assert store.heads[:8].abs().sum() > 0
