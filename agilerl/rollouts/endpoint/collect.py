"""Collects the episodes of an agent task: programs play them, and the engine answers their calls as they arrive."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty
from threading import Thread
from time import perf_counter
from typing import Any

from agilerl.data import Completion, Trajectory
from agilerl.envs.episode_task import Stepping
from agilerl.envs.programs import AgentTask, run_program
from agilerl.errors import EnvError
from agilerl.rewards.grader import MESSAGES, OPENING, GradedRow
from agilerl.rollouts.endpoint.server import Endpoint, Pending
from agilerl.rollouts.endpoint.session import ProgramSession
from agilerl.rollouts.engine import Ask, CollectReport, Failure, RolloutEngine
from agilerl.rollouts.grading import Verdict, verdicts_of
from agilerl.sizes import UNIT_ROWS
from agilerl.text.contract import contract_of

_QUIET, _BEGINNING = 0.004, 0.1
"""Seconds without a further request after which those that wait are answered; and at first, while programs start."""
_POLL = 0.05


@dataclass(eq=False)
class _ProgramRun:
    """One run of the program."""

    number: int
    """Position of its ask."""
    session: ProgramSession
    opening: str
    """What the chat template writes of each answer."""
    result: Any = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """What graders read: the result, or what the model said last."""
        if self.result is not None:
            return str(self.result)
        return self.session.calls[-1].text if self.session.calls else ""

    @property
    def row(self) -> GradedRow:
        """The row as graders get it."""
        last = self.session.calls[-1].completion
        ids = last.token_ids if last is not None else []
        transcript = self.session.transcript()
        columns = {"messages": transcript, "result": self.result, "completion_ids": ids}
        # A result is the program's own text.
        prompt = {MESSAGES: transcript[:-1], OPENING: self.opening if self.result is None else ""}
        row = GradedRow({**columns, **self.session.ask.place.row, **prompt})
        row.state, row.group = self.session.ask.state, id(self.session.ask)
        return row

    def play(self, task: AgentTask, url: str, key: str) -> None:
        """Run the program."""
        try:
            row, limits = self.session.ask.place.row, task.limits
            self.result = run_program(task.program, row, url, key, limits.timeout, limits.variables)
        finally:
            self.session.over = True


def collect_programs(
    engine: RolloutEngine, task: AgentTask, tokenizer: Any, asks: Sequence[Ask]
) -> tuple[list[list[Trajectory]], CollectReport]:
    """Return the trajectories of each ask, in order, with the seconds of decoding and of the programs.

    A sample is one trajectory, or several if its calls are not one growing conversation. A program that raises, or does
    not end in time, is an episode without a grade; the report names it.
    """
    report, start = CollectReport(), perf_counter()
    of_slot = Counter(ask.slot for ask in asks for _ in range(ask.samples))
    sessions = list[ProgramSession]()
    endpoint = Endpoint(
        tokenizer,
        sessions,
        task.models(),
        context_length=min((ask.context_length for ask in asks), default=1),
        most_new_tokens=max((ask.sampling(1).max_new_tokens for ask in asks), default=1),
    )
    episodes = []
    for number, ask in enumerate(asks):
        for sample in range(ask.samples):
            # By the agent's own episodes alone: kept caches change last bits, which must not depend on other agents.
            keeps = of_slot[ask.slot] <= UNIT_ROWS
            sessions.append(ProgramSession(ask, sample, task.limits, endpoint.chat_of, keeps))
            episodes.append(_ProgramRun(number, sessions[-1], contract_of(tokenizer).left_open))
    # The endpoint ends first: if the engine fails, programs are refused, and no one waits for them to time out.
    # A second more than a program's own limit, which ends it and says why.
    with Stepping(task.limits.timeout + 1, workers=task.limits.concurrency) as stepping, endpoint:
        for number, episode in enumerate(episodes):
            stepping.add(partial(episode.play, task, endpoint.url(number), endpoint.new_key(number)))
        errors: list[Exception | None] = []
        # The engine stays in this thread; another one waits for the programs to end.
        waiting = Thread(target=lambda: errors.extend(stepping.results()), daemon=True)
        waiting.start()
        quiet = _BEGINNING
        while waiting.is_alive():
            pending = _arrived(endpoint, sessions, task.limits.concurrency, quiet)
            if pending:
                quiet = _QUIET
                begun = perf_counter()
                _answer(engine, endpoint, pending)
                report.rollout += perf_counter() - begun
        waiting.join()
    for episode, error in zip(episodes, errors, strict=True):
        episode.error, episode.session.over = error, True
    groups: list[list[Trajectory]] = [[] for _ in asks]
    for episode, rows in zip(episodes, _graded(task, episodes, report), strict=True):
        groups[episode.number] += rows
    report.reward = perf_counter() - start - report.rollout
    return groups, report


def _arrived(endpoint: Endpoint, sessions: Sequence[ProgramSession], concurrency: int, quiet: float) -> list[Pending]:
    """Return the requests that wait, once all programs wait or none has asked for a while; none after a while."""
    pending: list[Pending] = []
    while len(pending) < min(sum(not session.over for session in sessions), concurrency):
        try:
            pending.append(endpoint.inbox.get(timeout=quiet if pending else _POLL))
        except Empty:
            break
    return pending


def _answer(engine: RolloutEngine, endpoint: Endpoint, pending: list[Pending]) -> None:
    """Let the engine complete requests, and those that arrive meanwhile if it takes them."""

    def deliver(number: int, sample: int, completion: Completion) -> None:
        # False for an answer that was cancelled: a result would raise InvalidStateError.
        if pending[number].answer.set_running_or_notify_cancel():
            pending[number].answer.set_result(completion)

    def arrivals() -> list[Any]:
        further = list(endpoint.waiting())
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
            # Does nothing to those that have their result; the others have lost their engine.
            p.answer.cancel()


def _graded(task: AgentTask, episodes: Sequence[_ProgramRun], report: CollectReport) -> Iterator[list[Trajectory]]:
    """Yield the trajectories of each episode; adds to the report what failed."""
    whole = [e for e in episodes if e.error is None and e.session.calls]
    asks = [e.session.ask for e in whole]
    verdicts = dict(zip(map(id, whole), verdicts_of(task.task, asks, [e.row for e in whole], [e.text for e in whole])))
    for episode in episodes:
        verdict, message = verdicts.get(id(episode), Verdict()), None
        if (error := episode.error) is not None:
            message = str(error) if isinstance(error, EnvError | TimeoutError) else f"{type(error).__name__}: {error}"
            kind: Any = "timeout" if isinstance(error, TimeoutError) else "reward_error"
            report.failures.append(Failure(episode.number, kind, message))
        elif not episode.session.calls:
            refused = episode.session.truncated is not None
            message = "all calls of the program were refused" if refused else "the program did not call the model"
            report.failures.append(Failure(episode.number, "reward_error", message))
        elif failure := verdict.failure(episode.number):
            report.failures.append(failure)
        yield episode.session.trajectories(
            None if message else verdict.reward,
            _log(episode.session.transcript(), episode.text),
            message,
            scores=verdict.scores,
            failed=verdict.failed,
        )


def _log(messages: Sequence[dict[str, Any]], text: str) -> str:
    """Return a conversation of several replies as text, for logs; of one reply the text alone."""
    if sum(m.get("role") == "assistant" for m in messages) < 2:
        return text
    marks = [">" if m.get("role") == "assistant" else "<" for m in messages]
    return "\n".join(f"{mark} {m.get('content') or m.get('tool_calls', '')}" for mark, m in zip(marks, messages))
