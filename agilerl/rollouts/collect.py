"""From prompts to graded trajectories: all agents' completions in one generate call, then the graders."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from agilerl.data import Completion, Trajectory
from agilerl.envs.core import Row, Task, score_completions
from agilerl.rollouts.engine import GenerationRequest, RolloutEngine

__all__ = ["CollectTimes", "TaskRequest", "collect"]


@dataclass(frozen=True)
class TaskRequest:
    """Some samples of one row of a task for one agent."""

    row: Row
    generation: GenerationRequest
    group: int


@dataclass
class CollectTimes:
    """Wall seconds of the two halves of a collection."""

    rollout: float = 0.0
    reward: float = 0.0


def collect(
    engine: RolloutEngine, task: Task, tokenizer: Any, requests: Sequence[TaskRequest]
) -> tuple[list[list[Trajectory]], CollectTimes]:
    """Return the trajectories of each request, in order, with the seconds spent.

    A completion that the grader cannot grade has a NaN reward: it is masked out of training, never counted as 0.
    """
    times = CollectTimes()
    start = perf_counter()
    groups = engine.generate([r.generation for r in requests])
    times.rollout = perf_counter() - start
    flat = [(request, completion) for request, group in zip(requests, groups) for completion in group]
    # Finished decoding belongs to the reward phase: it is what the grader reads.
    start = perf_counter()
    texts = tokenizer.batch_decode([c.token_ids for _, c in flat], skip_special_tokens=True) if flat else []
    rewards = score_completions(task, [r.row for r, _ in flat], texts)
    trajectories = [
        _trajectory(request, completion, text, reward)
        for (request, completion), text, reward in zip(flat, texts, rewards)
    ]
    times.reward = perf_counter() - start
    result, at = [], 0
    for group in groups:
        result.append(trajectories[at : at + len(group)])
        at += len(group)
    return result, times


def _trajectory(request: TaskRequest, completion: Completion, text: str, reward: float | None) -> Trajectory:
    return Trajectory(
        prompt_ids=list(request.generation.prompt_ids),
        token_ids=completion.token_ids,
        action_mask=[True] * len(completion.token_ids),
        logprobs=completion.logprobs,
        rewards=[float("nan") if reward is None else float(reward)],
        group=request.group,
        finish_reason=completion.finish_reason,
        text=text,
        row=request.row,
    )
