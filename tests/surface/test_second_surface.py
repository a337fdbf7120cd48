"""Names of AgileRL 2.58: harness, dataset environment, and what its programs hand to the loops."""

from typing import Any

import pytest
import torch

from agilerl import PPO, EpisodeTask, Runtime
from agilerl.envs.adapters import as_text_env
from agilerl.envs.probes import GridNavigationEnv
from agilerl.errors import ConfigError
from agilerl.llm_envs import DatasetEnv, PreferenceGym, RolloutEnv, RolloutHarness, SFTGym
from agilerl.training.train_llm import train_llm_dataset, train_llm_rollout

pytestmark = pytest.mark.model

PAIRS = [{"prompt": f"{n}+{n}?", "chosen": str(2 * n), "rejected": "no"} for n in range(4)]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("embedded")


class Rows:
    """Serves the rows of a dataset, as its tutorials do."""

    max_turns, dataset_size = 1, 3

    def reset(self, seed: int | None = None, *, row_index: int | None = None) -> tuple[str, dict[str, Any]]:
        self.row = row_index
        return f"question {row_index}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self.row or 0), True, False, {}


class Letters(Rows):
    """Pays by what was said, so that completions earn different rewards."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(sum(map(ord, action)) % 3), True, False, {}


def test_equal_seeds_get_equal_rows() -> None:
    env = as_text_env(Rows())
    assert [env.reset(seed=seed)[0] for seed in (0, 1, 4, 1)] == [f"question {row}" for row in (0, 1, 2, 1)]


@pytest.mark.parametrize("split", ["train", "exam"])
def test_episodes_reach_every_row(split: Any) -> None:
    task = EpisodeTask(Rows, exam_episodes=60)
    env = as_text_env(Rows())
    seen = {env.reset(seed=task.episode_seed(split, index))[0] for index in range(60)}
    assert seen == {"question 0", "question 1", "question 2"}


def test_a_harness_tells_tokens_and_rewards(runtime: Runtime) -> None:
    env = RolloutEnv.local(GridNavigationEnv(max_turns=3), runtime.tokenizer, max_turns=3)
    assert RolloutEnv is RolloutHarness
    assert (env.full_ids, env.turn_rewards) == (None, [])
    prompt, _ = env.reset(seed=1)
    assert torch.equal(env.full_ids, prompt["input_ids"])
    stay = runtime.tokenizer("2", add_special_tokens=False)["input_ids"]
    env.step(torch.tensor([[*prompt["input_ids"][0].tolist(), *stay]]))
    assert env.turn_rewards == [-0.1]
    assert env.full_ids.shape[1] > prompt["input_ids"].shape[1] + len(stay)


def test_a_rollout_of_harnesses_trains(runtime: Runtime) -> None:
    agent = PPO(runtime=runtime, lr=1e-2, critic_warmup_steps=1, max_output_tokens=1, beta=0.0)
    policy, head = agent.runtime.store.adapter(agent.slot), runtime.store.heads[agent.critic_slot].clone()

    def env_factory() -> RolloutHarness:
        return RolloutEnv.local(Letters(), runtime.tokenizer, 1, apply_chat_template=False)

    def policy_moved() -> bool:
        now = agent.runtime.store.adapter(agent.slot)
        return any(not torch.equal(a, b) for own, other in zip(policy, now) for a, b in zip(own, other))

    options: dict[str, Any] = {"init_hp": {"BATCH_SIZE": 16}, "eval_loop": 1, "verbose": False, "max_steps": 1}
    train_llm_rollout([agent], 1, env_factory, **options)
    assert not policy_moved()  # the first update is the critic's alone
    assert not torch.equal(head, runtime.store.heads[agent.critic_slot])
    train_llm_rollout([agent], 1, env_factory, **options)
    assert policy_moved()


def test_a_dataset_environment_is_one_of_two(runtime: Runtime) -> None:
    pairs = DatasetEnv(PAIRS, PAIRS, runtime.tokenizer, objective="preference")
    shown = DatasetEnv(PAIRS, PAIRS, runtime.tokenizer, objective="sft", response_column="chosen")
    assert (type(pairs), type(shown)) == (PreferenceGym, SFTGym)
    assert (len(pairs.reset()), len(shown.reset())) == (16, 8)
    with pytest.raises(ConfigError, match="objective"):
        DatasetEnv(PAIRS, PAIRS, runtime.tokenizer, objective="reward")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="finetune_llm_reasoning"):
        train_llm_dataset([PPO(runtime=runtime)], shown)
