"""Asks of an agent task: programs play the episodes, and the engine answers their calls as they come."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from queue import Empty
from threading import Thread
from time import perf_counter
from typing import Any

from agilerl.data import Completion, Trajectory
from agilerl.envs.episode_task import Stepping
from agilerl.envs.programs import AgentTask, run_program
from agilerl.errors import EnvError
from agilerl.rewards.grader import GradedRow
from agilerl.rollouts.endpoint.server import Endpoint, Pending
from agilerl.rollouts.endpoint.session import Session
from agilerl.rollouts.engine import Ask, CollectReport, Failure, RolloutEngine, failure_of
from agilerl.rollouts.grading import Verdict, verdicts_of
from agilerl.sizes import UNIT_ROWS

_QUIET = 0.004
"""Seconds without a further request after which those that wait are answered."""
_POLL = 0.05


def collect_programs(
    engine: RolloutEngine, task: AgentTask, tokenizer: Any, asks: Sequence[Ask]
) -> tuple[list[list[Trajectory]], CollectReport]:
    """Return the trajectories of each ask, in order, with the seconds of decoding and of the programs.

    A sample is one trajectory, or several if its calls are not one growing conversation. A program that raises, or does
    not end in time, is an episode without a grade; the report names it.
    """
    report, start = CollectReport(), perf_counter()
    of_slot = Counter(ask.slot for ask in asks for _ in range(ask.samples))
    sessions, owners = list[Session](), list[int]()
    most = max((ask.sampling(1).max_new_tokens for ask in asks), default=1)
    endpoint = Endpoint(
        tokenizer,
        sessions,
        task.models(),
        context_length=min((ask.context_length for ask in asks), default=1),
        most_new_tokens=most,
    )
    for number, ask in enumerate(asks):
        for sample in range(ask.samples):
            keeps = of_slot[ask.slot] <= UNIT_ROWS
            sessions.append(Session(ask, sample, task.limits, endpoint.chat_of, keeps))
            owners.append(number)
    results: list[Any] = [None] * len(sessions)

    def play(number: int) -> None:
        session = sessions[number]
        try:
            results[number] = run_program(
                task.program, session.ask.place.row, endpoint.url(number), endpoint.key, task.limits.timeout
            )
        finally:
            session.over = True

    with endpoint, Stepping(task.limits.timeout + 1, workers=task.limits.concurrency) as stepping:
        for number in range(len(sessions)):
            stepping.add(partial(play, number))
        ended: list[Exception | None] = []
        waiting = Thread(target=lambda: ended.extend(stepping.results()), daemon=True)
        waiting.start()
        while waiting.is_alive():
            pending = _arrived(endpoint, sessions, task.limits.concurrency)
            if pending:
                begun = perf_counter()
                _answer(engine, endpoint, pending)
                report.rollout += perf_counter() - begun
        waiting.join()
    groups = _graded(task, tokenizer, sessions, owners, results, ended, report)
    report.reward = perf_counter() - start - report.rollout
    return [[t for k, own in zip(owners, groups) if k == number for t in own] for number in range(len(asks))], report


def _arrived(endpoint: Endpoint, sessions: Sequence[Session], concurrency: int) -> list[Pending]:
    """Return the requests that wait, once all programs wait or none has asked for a while; none after a while."""
    pending: list[Pending] = []
    while len(pending) < min(sum(not session.over for session in sessions), concurrency):
        try:
            pending.append(endpoint.inbox.get(timeout=_QUIET if pending else _POLL))
        except Empty:
            break
    return pending


def _answer(engine: RolloutEngine, endpoint: Endpoint, pending: list[Pending]) -> None:
    """Let the engine complete requests, and those that arrive meanwhile if it takes them."""

    def deliver(number: int, sample: int, completion: Completion) -> None:
        if pending[number].answer.set_running_or_notify_cancel():
            pending[number].answer.set_result(completion)

    def arrivals() -> list[Any]:
        further: list[Pending] = []
        while True:
            try:
                further.append(endpoint.inbox.get_nowait())
            except Empty:
                break
        pending.extend(further)
        return [p.request for p in further]

    requests = [p.request for p in pending]
    try:
        if getattr(engine, "takes_arrivals", False):
            engine.generate(requests, deliver, arrivals)  # type: ignore[call-arg]
            return
        for number, (completion,) in enumerate(engine.generate(requests)):
            deliver(number, 0, completion)
    finally:
        for p in pending:
            p.answer.cancel()


def _graded(
    task: AgentTask,
    tokenizer: Any,
    sessions: Sequence[Session],
    owners: Sequence[int],
    results: Sequence[Any],
    ended: Sequence[Exception | None],
    report: CollectReport,
) -> list[list[Trajectory]]:
    """Return the trajectories of each session, graded; adds to the report what failed."""
    transcripts = [session.transcript() for session in sessions]
    texts, rows = [], []
    for session, result, messages in zip(sessions, results, transcripts):
        said = messages[-1].get("content", "") if messages else ""
        texts.append(str(said if result is None else result))
        row = GradedRow({**session.ask.place.row, "messages": messages, "result": result})
        ids = session.calls[-1].completion.token_ids if session.calls and session.calls[-1].completion else []
        row["completion_ids"] = ids
        row.state, row.group = session.ask.state, id(session.ask)
        rows.append(row)
    whole = [n for n, error in enumerate(ended) if error is None and sessions[n].calls]
    asks = [sessions[n].ask for n in whole]
    graded = dict(zip(whole, verdicts_of(task.task, asks, [rows[n] for n in whole], [texts[n] for n in whole])))
    groups = []
    for n, (session, error) in enumerate(zip(sessions, ended)):
        verdict, message = graded.get(n, Verdict()), None
        if error is not None:
            message = str(error) if isinstance(error, EnvError | TimeoutError) else f"{type(error).__name__}: {error}"
            kind: Any = "timeout" if isinstance(error, TimeoutError) else "reward_error"
            report.failures.append(Failure(owners[n], kind, message))
        elif not session.calls:
            message = "the program did not call the model"
            report.failures.append(Failure(owners[n], "reward_error", message))
        elif verdict.reward is None and verdict.error is not None:
            report.failures.append(failure_of(owners[n], verdict.error))
        groups.append(
            session.trajectories(
                None if message else verdict.reward,
                _log(transcripts[n], texts[n]),
                session.ask.place.row,
                message,
                scores=verdict.scores,
                failed=verdict.failed,
            )
        )
    return groups


def _log(messages: Sequence[dict[str, Any]], text: str) -> str:
    """Return a conversation as text, for logs."""
    marks = [">" if m.get("role") == "assistant" else "<" for m in messages]
    lines = [f"{mark} {m.get('content') or m.get('tool_calls', '')}" for mark, m in zip(marks, messages)]
    return "\n".join(lines[1:] or [text])
