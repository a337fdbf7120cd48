"""Turns asks into graded trajectories; in a group of processes each does a share, and all of them get the whole."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch

from agilerl.data import Completion, EpisodeOutcome, Trajectory
from agilerl.envs.core import Row, Task, prompt_columns, waiting_graders
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.programs import AgentTask
from agilerl.envs.prompts import decode_completions
from agilerl.functional import MetricReducer
from agilerl.models.sharding import Lockstep
from agilerl.processes import Processes
from agilerl.rewards.grader import GradedRow
from agilerl.rewards.waiting import EarlyGrading
from agilerl.rollouts.endpoint.collect import collect_programs
from agilerl.rollouts.engine import Ask, CollectReport, Failure, GenerationRequest, RolloutEngine
from agilerl.rollouts.episodes import collect_episodes
from agilerl.rollouts.grading import Verdict, is_exam, verdicts_of

Collected = tuple[list[list[Trajectory]], CollectReport]
"""The trajectories of each ask, in order, with the seconds spent and what failed."""


def collect(
    processes: Processes,
    lockstep: Lockstep | None,
    engine: RolloutEngine,
    task: Task | EpisodeTask,
    tokenizer: Any,
    asks: Sequence[Ask],
    *,
    whole: bool = False,
) -> Collected:
    """Sample and grade what is asked for; each process takes some asks, with ``whole`` all those of some slots.

    A process decodes its asks together. Every process passes the same asks. The seconds are those of the slowest one.
    """
    if processes.size == 1:
        return _collected(engine, task, tokenizer, asks)
    # Every process knows the row of a question; the row of an episode is known once it has been played.
    rows = [None if task.multi_turn else ask.place.row for ask in asks]
    shares = processes.parts([ask.slot for ask in asks], whole=whole)
    share = shares[processes.rank]

    def sample() -> bytes:
        groups, report = _collected(engine, task, tokenizer, [asks[number] for number in share])
        # JSON, as what a process receives must not be able to run code.
        return json.dumps(
            {
                "groups": [[_encoded(t, rows[number]) for t in group] for number, group in zip(share, groups)],
                "seconds": [report.rollout, report.reward],
                # By their numbers in the whole batch.
                "failures": [[share[f.request], f.kind, f.message] for f in report.failures],
            }
        ).encode()

    parts = [json.loads(part) for part in processes.agreed(sample, lockstep)]
    report = CollectReport(
        max(part["seconds"][0] for part in parts),
        max(part["seconds"][1] for part in parts),
        sorted((Failure(*failure) for part in parts for failure in part["failures"]), key=lambda f: f.request),
    )
    groups = {number: group for numbers, part in zip(shares, parts) for number, group in zip(numbers, part["groups"])}
    return [[_decoded(t, row) for t in groups[number]] for number, row in enumerate(rows)], report


def generate_beside(
    processes: Processes, lockstep: Lockstep | None, engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> list[list[Completion]]:
    """Return the completions of this process's own requests while the other processes generate theirs."""
    if processes.size == 1:
        return engine.generate(requests)
    groups: list[list[Completion]] = []

    def sample() -> bytes:
        groups.extend(engine.generate(requests))
        return b""

    # Nothing is exchanged, but a divided base needs all processes until the last one is done.
    processes.agreed(sample, lockstep)
    return groups


def _collected(engine: RolloutEngine, task: Task | EpisodeTask, tokenizer: Any, asks: Sequence[Ask]) -> Collected:
    if isinstance(task, EpisodeTask):
        return collect_episodes(engine, task, tokenizer, asks)
    if isinstance(task, AgentTask):
        return collect_programs(engine, task, tokenizer, asks)
    return collect_answers(engine, task, tokenizer, asks)


def _encoded(trajectory: Trajectory, row: Row | None) -> dict[str, Any]:
    """Return a trajectory as plain data, without its ``row`` if every process knows that already."""
    # Mappings of other kinds are not plain data.
    return asdict(replace(trajectory, scores=dict(trajectory.scores), row=dict(trajectory.row) if row is None else {}))


def _decoded(values: dict[str, Any], row: Row | None) -> Trajectory:
    outcome = values["outcome"]
    values["outcome"] = None if outcome is None else EpisodeOutcome(**outcome)
    # JSON has turned the tuple into a list.
    trajectory = Trajectory(**{**values, "failed": tuple(values["failed"])})
    return trajectory if row is None else replace(trajectory, row=row)


# -- single-turn tasks: all agents' completions in one call of the engine, and the graders ----------------------------


def collect_answers(
    engine: RolloutEngine, task: Task, tokenizer: Any, asks: Sequence[Ask]
) -> tuple[list[list[Trajectory]], CollectReport]:
    """Return the trajectories of each ask, one a sample, with the seconds spent and what failed.

    A completion that cannot be graded has a NaN reward: it is masked out of training, never counted as 0. Graders get
    the columns of its row, ``completion_ids``, its tokens, and what its prompt was (``prompt_columns``). Whatever is
    not a rollout is graded as an exam. Grading seconds count from the last completion on.
    """
    report = CollectReport()
    start = perf_counter()
    requests = [ask.generation(ask.place.prompt_ids, ask.samples) for ask in asks]
    graders = waiting_graders(task, exam=is_exam(asks))
    conversations = [ask.place.messages or task.messages(ask.place.row) for ask in asks]
    prompts = [prompt_columns(messages, tokenizer) for messages in conversations]
    columns = dict.fromkeys(key for ask, prompt in zip(asks, prompts) for key in (*ask.place.row, *prompt, _IDS))
    with EarlyGrading(graders, columns) as grading:
        early = _Early(grading, task, tokenizer, asks, prompts)
        groups = engine.generate(requests, early) if grading.graders else engine.generate(requests)
        report.rollout = perf_counter() - start
        flat = [(number, completion) for number, group in enumerate(groups) for completion in group]
        # Turning tokens into text counts as grading: the grader reads the text.
        start = perf_counter()
        texts = decode_completions(tokenizer, [c.token_ids for _, c in flat])
        whole = [n for n, (_, completion) in enumerate(flat) if completion.finish_reason != "oom"]
        graded = [asks[flat[n][0]] for n in whole]
        rows = [early.row(n, *flat[n]) for n in whole]
        verdicts = dict(zip(whole, verdicts_of(task, graded, rows, [texts[n] for n in whole])))
    result: list[list[Trajectory]] = [[] for _ in asks]
    for n, (number, completion) in enumerate(flat):
        verdict = verdicts.get(n, Verdict())
        if completion.finish_reason == "oom":
            report.failures.append(Failure(number, "oom", "memory does not hold a single completion"))
        elif failure := verdict.failure(number):
            report.failures.append(failure)
        trajectory = Trajectory(
            prompt_ids=list(asks[number].place.prompt_ids),
            token_ids=completion.token_ids,
            action_mask=[True] * len(completion.token_ids),
            logprobs=completion.logprobs,
            rewards=[float("nan") if verdict.reward is None else float(verdict.reward)],
            group=asks[number].group,
            finish_reason=completion.finish_reason,
            text=texts[n],
            row=asks[number].place.row,
            scores=verdict.scores,
            failed=verdict.failed,
        )
        result[number].append(trajectory)
    report.reward = perf_counter() - start
    return result, report


_IDS = "completion_ids"


class _Early:
    """Hands completions to the graders as they end."""

    def __init__(
        self,
        grading: EarlyGrading,
        task: Task,
        tokenizer: Any,
        asks: Sequence[Ask],
        prompts: Sequence[Mapping[str, Any]],
    ) -> None:
        self.grading, self.task, self.tokenizer, self.asks, self.prompts = grading, task, tokenizer, asks, prompts
        self.firsts = [0, *accumulate(ask.samples for ask in asks)]
        self._rows: dict[int, GradedRow] = {}
        """What was handed over, by number in the batch."""

    def __call__(self, request: int, sample: int, completion: Completion) -> None:
        if completion.finish_reason == "oom":
            return
        number = self.firsts[request] + sample
        row = self._rows[number] = self._graded(request, completion)
        (text,) = decode_completions(self.tokenizer, [completion.token_ids])
        self.grading.add(number, self.task.graded_text(text, row), self.task.graded_row(row))

    def row(self, number: int, request: int, completion: Completion) -> Row:
        """Return the row that was handed over with this completion: graders recognise it by object identity."""
        row = self._rows.get(number)
        return row if row is not None and row[_IDS] == completion.token_ids else self._graded(request, completion)

    def _graded(self, request: int, completion: Completion) -> GradedRow:
        """Return the row that graders get."""
        ask = self.asks[request]
        row = GradedRow({**ask.place.row, **self.prompts[request], _IDS: completion.token_ids})
        # Any number will do that the rows of one ask share with no other.
        row.state, row.group = ask.state, id(ask)
        return row


def grader_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and spread of each grader's scores, and how often it failed; empty if scores are not kept apart.

    ``rewards/<grader>/mean`` and ``/std`` are over the completions that it applied to, and missing if there are none.
    """
    metrics = MetricReducer()
    failures = {name: 0.0 for t in trajectories for name in t.scores}
    for name in failures:
        scores = torch.tensor([s for t in trajectories if (s := t.scores.get(name)) is not None], dtype=torch.float64)
        metrics.add(f"rewards/{name}/mean", scores)
        metrics.add(f"rewards/{name}/std", scores, reduction="std")
    for trajectory in trajectories:
        for name in trajectory.failed:
            failures[name] += 1
    return metrics.result() | {f"reward_errors/{name}": count for name, count in failures.items()}
