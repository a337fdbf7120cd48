"""From prompts to graded trajectories: all agents' completions in one generate call, then the graders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from agilerl.data import Completion, Trajectory
from agilerl.envs.core import Row, Task, grade_completions
from agilerl.functional import MetricReducer
from agilerl.rewards.combine import weighted
from agilerl.rewards.grades import Grade, Grades
from agilerl.rollouts.engine import GenerationRequest, RolloutEngine

__all__ = ["CollectTimes", "TaskRequest", "collect", "grader_metrics"]


@dataclass(frozen=True)
class TaskRequest:
    """Some samples of one row of a task for one agent."""

    row: Row
    generation: GenerationRequest
    group: int
    weights: Mapping[str, float] | None = None
    """The agent's own weights of all parts of the reward; None: the grader's."""


@dataclass
class CollectTimes:
    """Wall seconds of the two halves of a collection."""

    rollout: float = 0.0
    reward: float = 0.0


def collect(
    engine: RolloutEngine, task: Task, tokenizer: Any, requests: Sequence[TaskRequest]
) -> tuple[list[list[Trajectory]], CollectTimes]:
    """Return the trajectories of each request, in order, with the seconds spent.

    A completion that cannot be graded has a NaN reward: it is masked out of training, never counted as 0. Graders get
    the columns of its row and ``completion_ids``, its tokens. Whatever is not a rollout is graded as an exam.
    """
    times = CollectTimes()
    start = perf_counter()
    groups = engine.generate([r.generation for r in requests])
    times.rollout = perf_counter() - start
    flat = [(request, completion) for request, group in zip(requests, groups) for completion in group]
    # Finished decoding belongs to the reward phase: it is what the grader reads.
    start = perf_counter()
    texts = tokenizer.batch_decode([c.token_ids for _, c in flat], skip_special_tokens=True) if flat else []
    rows = [{**request.row, "completion_ids": completion.token_ids} for request, completion in flat]
    exam = any(r.generation.purpose != "rollout" for r in requests)
    grades = grade_completions(task, rows, texts, exam=exam)
    rewards = _rewards([request for request, _ in flat], grades)
    trajectories = [
        _trajectory(request, completion, text, rewards[place], grades, place)
        for place, ((request, completion), text) in enumerate(zip(flat, texts))
    ]
    times.reward = perf_counter() - start
    result, at = [], 0
    for group in groups:
        result.append(trajectories[at : at + len(group)])
        at += len(group)
    return result, times


def _rewards(requests: Sequence[TaskRequest], grades: Grades) -> list[Grade]:
    """Return the reward of each completion, by the weights of the agent that it is for."""
    # One mapping an agent, so one sum over the batch for each of them.
    distinct = {id(r.weights): r.weights for r in requests if r.weights is not None}
    sums = {key: weighted(grades, weights) for key, weights in distinct.items()}
    return [sums.get(id(r.weights), grades.rewards)[place] for place, r in enumerate(requests)]


def _trajectory(
    request: TaskRequest, completion: Completion, text: str, reward: Grade, grades: Grades, place: int
) -> Trajectory:
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
        scores=grades.scores_at(place),
        failed=grades.failed_at(place),
    )


def grader_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and spread of what each grader said, and how often it failed; empty where none is kept apart.

    ``rewards/<grader>/mean`` and ``/std`` are over the completions that it applied to, and missing if there are none.
    """
    said = MetricReducer()
    failures = {name: 0.0 for t in trajectories for name in t.scores}
    for name in failures:
        scores = torch.tensor([s for t in trajectories if (s := t.scores.get(name)) is not None], dtype=torch.float64)
        if len(scores):
            said.add(f"rewards/{name}/mean", scores)
            said.add(f"rewards/{name}/std", scores, reduction="std")
    for trajectory in trajectories:
        for name in trajectory.failed:
            failures[name] += 1
    return said.result() | {f"reward_errors/{name}": count for name, count in failures.items()}
