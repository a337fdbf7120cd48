"""From asks to graded trajectories; in a group of processes each does a part, and all of them get the whole."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from agilerl.data import Completion, EpisodeOutcome, Trajectory
from agilerl.envs.core import Row, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.models.lockstep import Lockstep, agreed
from agilerl.processes import Processes
from agilerl.rollouts.engine import Ask, GenerationRequest, RolloutEngine
from agilerl.rollouts.episodes import collect_episodes
from agilerl.rollouts.failures import Failure
from agilerl.rollouts.questions import collect_answers
from agilerl.rollouts.rollout import CollectReport

Collected = tuple[list[list[Trajectory]], CollectReport]
"""The trajectories of each ask, in order, with the seconds spent and what failed."""


def collect(
    processes: Processes,
    lockstep: Lockstep | None,
    engine: RolloutEngine,
    task: Task | EpisodeTask,
    tokenizer: Any,
    asks: Sequence[Ask],
) -> Collected:
    """Sample and grade what is asked for, each process some consecutive asks, which are decoded together.

    Every process gives the same asks. Seconds are those of the slowest.
    """
    if processes.size == 1:
        return _collected(engine, task, tokenizer, asks)
    # Of a question every process knows the row; that of an episode shows when it has been played.
    own, rows = processes.share(len(asks)), [None if task.multi_turn else ask.place.row for ask in asks]

    def sample() -> bytes:
        groups, report = _collected(engine, task, tokenizer, asks[own.start : own.stop])
        return json.dumps(
            {
                "groups": [[_encoded(t, row) for t in group] for group, row in zip(groups, rows[own.start : own.stop])],
                "seconds": [report.rollout, report.reward],
                "failures": [[own.start + f.request, f.kind, f.message] for f in report.failures],
            }
        ).encode()

    parts = [json.loads(part) for part in agreed(processes, sample, lockstep)]
    report = CollectReport(
        max(part["seconds"][0] for part in parts),
        max(part["seconds"][1] for part in parts),
        [Failure(*failure) for part in parts for failure in part["failures"]],
    )
    found = [group for part in parts for group in part["groups"]]
    return [[_decoded(t, row) for t in group] for group, row in zip(found, rows, strict=True)], report


def generate_beside(
    processes: Processes, lockstep: Lockstep | None, engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> list[list[Completion]]:
    """Return the completions of this process's own requests, while the others generate theirs."""
    if processes.size == 1:
        return engine.generate(requests)
    found: list[list[list[Completion]]] = []

    def sample() -> bytes:
        found.append(engine.generate(requests))
        return b""

    agreed(processes, sample, lockstep)
    return found[0]


def _collected(engine: RolloutEngine, task: Task | EpisodeTask, tokenizer: Any, asks: Sequence[Ask]) -> Collected:
    if isinstance(task, EpisodeTask):
        return collect_episodes(engine, task, tokenizer, asks)
    return collect_answers(engine, task, tokenizer, asks)


def _encoded(trajectory: Trajectory, row: Row | None) -> dict[str, Any]:
    """Return a trajectory as plain data, without its ``row`` where every process knows that already."""
    values = {f.name: getattr(trajectory, f.name) for f in fields(trajectory)}
    if trajectory.outcome is not None:
        values["outcome"] = asdict(trajectory.outcome)
    return {**values, "scores": dict(trajectory.scores), "row": dict(trajectory.row) if row is None else {}}


def _decoded(values: dict[str, Any], row: Row | None) -> Trajectory:
    outcome = values["outcome"]
    values["outcome"] = None if outcome is None else EpisodeOutcome(**outcome)
    trajectory = Trajectory(**{**values, "failed": tuple(values["failed"])})
    return trajectory if row is None else replace(trajectory, row=row)
