"""GRPO and its relatives solve the probes: an answer that depends on one digit, on two, a walk of two steps."""

from typing import Any

import pytest

from agilerl.algorithms import CISPO, DPPO, GRPO, GSPO, REINFORCE, RLOO, LLMAlgorithm, MaxRL
from agilerl.data import Trajectory
from agilerl.rollouts import GenerationRequest
from agilerl.runtime import Runtime
from tests.algorithms.test_ppo_learning import decode, encode, learn_until, walk
from tests.probes import ConditionalTarget, MultiInputConditional
from tests.tiny_models import PAD, qwen2, random_model

pytestmark = pytest.mark.model


def digits_agent(cls: type[LLMAlgorithm], **settings: Any) -> Any:
    """An agent whose vocabulary is little more than the ten digits."""
    runtime = Runtime.for_model(random_model(qwen2(vocab_size=16)), seed=1)
    common = {"lr": 5e-3, "group_size": 8, "beta": 0.0, "max_output_tokens": 1, "seed": 1, "batch_size": 64}
    return cls(runtime=runtime, pad_token_id=PAD, **{**common, **settings})


def answers(agent: Any, task: Any, count: int) -> list[Trajectory]:
    """Sample ``count`` answers to questions, ``group_size`` a question."""
    size = agent.config.group_size
    rows = [task.row("train", agent.rollouts * count + i) for i in range(count // size)]
    prompts = [encode(row["question"]) for row in rows]
    requests = [
        GenerationRequest(agent.slot, ids, size, agent.sampling(len(ids)), key=(agent.index, agent.rollouts, i))
        for i, ids in enumerate(prompts)
    ]
    agent.rollouts += 1
    return [
        Trajectory(prompt, c.token_ids, [True] * len(c.token_ids), c.logprobs, [reward], group=i)
        for i, (prompt, row, group) in enumerate(zip(prompts, rows, agent.runtime.engine.generate(requests)))
        for c in group
        for reward in [task.reward(decode(c.token_ids), row)]
    ]


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO, RLOO, MaxRL, DPPO, REINFORCE])
def test_the_answer_to_one_digit(cls: type[LLMAlgorithm]) -> None:
    agent = digits_agent(cls)
    assert learn_until(agent, lambda a: answers(a, ConditionalTarget(), 128), 0.95, 25) <= 25


def test_the_answer_to_two_digits() -> None:
    agent = digits_agent(GRPO, entropy_coef=0.02)
    assert learn_until(agent, lambda a: answers(a, MultiInputConditional(), 256), 0.9, 40) <= 40


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (GRPO, {"importance_sampling_level": "turn", "advantage_granularity": "trajectory"}),
        (REINFORCE, {"importance_sampling_level": "turn", "advantage_granularity": "turn"}),
    ],
)
def test_a_walk_whose_only_reward_comes_last(cls: type[LLMAlgorithm], settings: dict[str, Any]) -> None:
    agent = digits_agent(cls, entropy_coef=0.03, **settings)
    assert learn_until(agent, lambda a: walk(a, 128), 0.95, 50) <= 50
    far = [t.token_ids for t in walk(agent, 128) if abs(t.prompt_ids[0] - t.prompt_ids[1]) == 2]
    assert len(far) > 10
    assert sum(decode(t[:1]) in "13" for t in far) / len(far) > 0.6  # of ten digits two move
