"""The documented classes for loops that step by themselves: prompts out, ids in, episodes as tensors."""

from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO, PPO
from agilerl.compat.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.errors import ConfigError, EnvError
from agilerl.runtime import Runtime
from tests.envs.conftest import make_tokenizer
from tests.envs.scripted import Echo
from tests.envs.test_conversation import CUTS_THINKING
from tests.probes import GridNavigation


def complete(tokenizer: Any, prompt: dict[str, Any], text: str, padding: int = 0) -> torch.Tensor:
    said = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    tail = torch.tensor([said + [tokenizer.pad_token_id] * padding])
    return torch.cat([prompt["input_ids"], tail], dim=1)


def test_an_episode_step_by_step(tokenizer: Any) -> None:
    env = TokenObservationWrapper(Echo(length=2), tokenizer, 5, tokenizer.pad_token_id)
    prompt, info = env.reset(seed=4)
    assert (prompt["text"], info) == ("<user>start4<end><assistant>", {})
    assert prompt["attention_mask"].shape == prompt["input_ids"].shape
    first = complete(tokenizer, prompt, "ab", padding=3)
    prompt, reward, terminated, truncated, _ = env.step(first)
    assert (reward, terminated, truncated) == (5.0, False, False)
    assert torch.equal(prompt["input_ids"][:, : first.shape[1] - 3], first[:, :-3])
    prompt, reward, terminated, truncated, info = env.step(complete(tokenizer, prompt, "c"))
    assert (prompt, reward, terminated, truncated, info) == ({}, 6.0, True, False, {"success": True})
    ids, mask, turn_ids, rewards = env.get_episode_data()
    assert mask.shape == turn_ids.shape == (1, ids.shape[1] - 1)
    assert tokenizer.decode(ids[0, 1:][mask[0]]) == "ab<end>c<end>"
    assert turn_ids[mask].tolist() == [0, 0, 0, 1, 1]
    assert rewards.tolist() == [[5.0, 6.0]]
    with pytest.raises(EnvError, match=r"reset\(\) before step"):
        env.step(ids)
    env.close()


def test_seeds_go_on_by_themselves(tokenizer: Any) -> None:
    env = TokenObservationWrapper(Echo(), tokenizer, 5)
    starts = [env.reset()[0]["text"] for _ in range(2)]
    assert starts == ["<user>start0<end><assistant>", "<user>start1<end><assistant>"]


def test_a_full_context_and_the_turn_limit_truncate(tokenizer: Any) -> None:
    env = TokenObservationWrapper(Echo(), tokenizer, 5, max_model_len=30, max_output_tokens=12)
    prompt, _ = env.reset(0)
    _, _, terminated, truncated, info = env.step(complete(tokenizer, prompt, "a"))
    assert (terminated, truncated, info["truncated_by"]) == (False, True, "context")
    env = TokenObservationWrapper(Echo(), tokenizer, 1)
    prompt, _ = env.reset(0)
    assert env.step(complete(tokenizer, prompt, "a"))[4]["truncated_by"] == "turns"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (lambda prompt: prompt["input_ids"], "token, found none"),
        (lambda prompt: prompt["input_ids"][:, 1:], "9 tokens of the prompt"),
    ],
)
def test_ids_that_do_not_continue_the_prompt(tokenizer: Any, ids: Any, message: str) -> None:
    env = TokenObservationWrapper(Echo(), tokenizer, 5)
    prompt, _ = env.reset(0)
    with pytest.raises(EnvError, match=message):
        env.step(ids(prompt))


def test_templates_that_rewrite_are_refused_unless_they_are_followed() -> None:
    tokenizer = make_tokenizer(CUTS_THINKING)
    with pytest.raises(ConfigError, match="earlier turns"):
        TokenObservationWrapper(Echo(), tokenizer, 5)
    env = TokenObservationWrapper(Echo(length=2), tokenizer, 5, strict_chat_template_boundary=False)
    prompt, _ = env.reset(0)
    prompt = env.step(complete(tokenizer, prompt, "<think>x</think>a"))[0]
    env.step(complete(tokenizer, prompt, "b"))
    with pytest.raises(EnvError, match=r"env\.trajectories"):
        env.get_episode_data()
    assert len(env.trajectories()) == 2


@pytest.mark.model
@pytest.mark.parametrize(("kind", "group"), [(GRPO, 4), (PPO, 1)])
def test_the_documented_loop_trains(kind: Any, group: int) -> None:
    runtime = Runtime.from_pretrained("embedded", seed=1)
    agent = kind(runtime=runtime, group_size=group, batch_size=16, max_output_tokens=2, seed=1)
    vec = SyncMultiTurnVecEnv(
        lambda size: TokenObservationWrapper(GridNavigation(size), runtime.tokenizer, 2),
        batch_size=16 // group,
        group_size=group,
        env_config={"size": 3},
    )
    prompts: Any = vec.reset(seed=3)
    assert [p["text"] for p in prompts] == [p["text"] for p in prompts[::group] for _ in range(group)]
    while prompts:
        action = agent.get_action(prompts, repeat_prompts=False)
        prompts = vec.step(action.completion_ids, action.sampling_logps)
    ids, masks, turn_ids, rewards, steps, logps = vec.get_trajectories()
    assert len(ids) == len(masks) == len(turn_ids) == len(rewards) == 16
    assert steps == 32
    assert logps is not None
    before = runtime.store.adapter(agent.slot)[0][1].clone()
    metrics = agent.learn((ids, masks, rewards), turn_ids=turn_ids, sampling_logps=logps)
    assert metrics["reward"] == pytest.approx(sum(vec.returns()) / 16)
    if max(vec.returns()) > min(vec.returns()):
        assert not torch.equal(before, runtime.store.adapter(agent.slot)[0][1])
    batch = vec.batch()
    assert batch.groups.tolist() == [row // group for row in range(16)]
    scores = agent.test(vec, loop=2)
    assert scores.shape == (32,)
    assert agent.fitness == [pytest.approx(scores.mean())]
    vec.close()


def test_groups_of_single_rows_are_consecutive() -> None:
    from agilerl.compat.experiences import to_batch

    ids = [torch.arange(5)[None] for _ in range(6)]
    masks = [torch.ones(1, 4, dtype=torch.bool)] * 6
    turns = [torch.tensor([[0, 0, 1, 1]])] * 6
    rewards = [torch.tensor([1.0, 2.0])] * 5 + [torch.tensor([3.0])]
    batch = to_batch((ids, masks, rewards), 0, turns, group_size=3)
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rewards[0].tolist() == [1.0, 2.0]
    assert batch.rewards[5].isnan().tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"6 rows, .* for 5"):
        to_batch((ids, masks, rewards), 0, turns[:5], group_size=3)


def test_a_factory_of_something_else() -> None:
    with pytest.raises(ConfigError, match="expected a Hugging Face tokenizer for tokenizer, found None"):
        SyncMultiTurnVecEnv(Echo, 1, 1)  # type: ignore[arg-type]


def test_the_number_of_completions_must_fit(tokenizer: Any) -> None:
    vec = SyncMultiTurnVecEnv(lambda: TokenObservationWrapper(Echo(), tokenizer, 5), 2, 1)
    vec.reset()
    with pytest.raises(EnvError, match=r"2 .*episodes, found 0"):
        vec.step([])
