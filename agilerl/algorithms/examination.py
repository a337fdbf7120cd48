"""Greedy examination of one agent on an environment that is stepped by hand."""

from typing import Annotated, Any, Protocol

import numpy as np

from agilerl.algorithms.experiences import ActionResult
from agilerl.arguments import Having, described
from agilerl.envs.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.errors import ConfigError
from agilerl.processes import Processes

Environment = Annotated[
    Any,
    Having("an environment", ("reset", "step"), "pass a ReasoningGym, ReasoningGym.from_task(task, tokenizer), say"),
]

_EXAM_SEED = 2**31
"""Seed of the first exam episode; training, which counts from 0, does not reach it."""


class _Player(Protocol):
    """An agent as an exam sees it."""

    tokens: dict[str, int]

    def get_action(self, obs: Any, training: bool = True) -> ActionResult:
        """Return completions of prompts."""


def examine(agent: _Player, env: Any, loop: int) -> np.ndarray:
    """Return rewards (returns of episodes) of greedy play, ``loop`` batches or episodes of it, as one flat array."""
    if isinstance(env, TokenObservationWrapper):
        return np.array([_play(agent, env, number) for number in range(loop)])
    if isinstance(env, SyncMultiTurnVecEnv):
        return np.concatenate([_play_all(agent, env, number) for number in range(loop)])
    if not hasattr(env, "eval_mode"):
        raise ConfigError(
            f"test(env=...): expected an environment with a test set (eval_mode), found {described(env)}; wrap a "
            "multi-turn one in TokenObservationWrapper"
        )
    rewards: list[np.ndarray] = []
    with env.eval_mode():
        prompts = env.reset()
        for _ in range(loop):
            action = agent.get_action(prompts, training=False)
            agent.tokens["evaluated"] += sum(int(m.sum()) for m in action.action_masks)
            prompts, reward = env.step(action.completion_ids)
            rewards.append(np.asarray(reward, dtype=np.float64).reshape(-1))
    return np.concatenate(rewards)


def of_all(processes: Processes, scores: np.ndarray) -> np.ndarray:
    """Return the scores that all processes have found, each with its own part of the exam."""
    if processes.size == 1:
        return scores
    return np.concatenate([np.frombuffer(part) for part in processes.gather(scores.astype(np.float64).tobytes())])


def _play(agent: _Player, env: TokenObservationWrapper, number: int) -> float:
    prompt, _ = env.reset(_EXAM_SEED + number)
    total, done = 0.0, False
    while not done:
        action = agent.get_action([prompt], training=False)
        agent.tokens["evaluated"] += int(action.action_masks[0].sum())
        prompt, reward, terminated, truncated, _ = env.step(action.completion_ids[0])
        total, done = total + reward, terminated or truncated
    return total


def _play_all(agent: _Player, env: SyncMultiTurnVecEnv, number: int) -> np.ndarray:
    prompts: list[Any] | None = env.reset(_EXAM_SEED + number * env.batch_size)
    while prompts is not None:
        action = agent.get_action(prompts, training=False)
        agent.tokens["evaluated"] += sum(int(m.sum()) for m in action.action_masks)
        prompts = env.step(action.completion_ids)
    return np.array(env.returns())
