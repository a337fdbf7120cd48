"""Agent programs whose calls vLLM answers, in waves."""

from collections.abc import Mapping
from typing import Any

from agilerl import GRPO, Population, Runtime
from agilerl.envs.core import Row, Split, Task
from agilerl.envs.programs import AgentTask
from tests.with_vllm.conftest import World


class Questions(Task):
    name, exam_prompts, test_prompts = "questions", 4, 4

    def row(self, split: Split, index: int) -> Row:
        return {"question": f"{index % 7}, {index % 5 + 1}.", "answer": "1"}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(len(completion) % 2)


def asks_twice(client: Any, row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        messages.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message)
        messages.append({"role": "user", "content": row["question"]})


def test_two_agents_learn_from_what_vllm_sampled(world: World) -> None:
    runtime = Runtime.from_pretrained("embedded", seed=3)
    runtime.engine = World(runtime, runtime.engine, world.backend).engine()
    sizes = {"group_size": 4, "batch_size": 8, "max_output_tokens": 8, "lr": 1e-2, "beta": 0.0}
    agents = [GRPO(runtime=runtime, index=index, **sizes) for index in range(2)]
    population = Population(agents, AgentTask(Questions(), asks_twice), prompts_per_step=2, eval_max_new_tokens=8)
    rollout = population.rollout()
    assert not rollout.failures
    rows = [t for own in rollout.trajectories.values() for t in own]
    assert {t.outcome.turns for t in rows if t.outcome} == {2}
    assert all(set(t.turn_ids) == {-1, 0, 1} for t in rows)
    metrics = population.learn(rollout)
    assert all(values["sampling/sampling_logp_difference/max"] <= 1e-4 for values in metrics.values())
