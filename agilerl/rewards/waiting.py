"""Graders that wait for a server or a process: they grade in threads, and may begin before the batch is complete."""

import json
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

from agilerl.checks.arguments import Count, Name, checked
from agilerl.rewards.grader import (
    BaseGrader,
    Columns,
    Grader,
    Mark,
    attempt_grader,
    close,
    grader_name,
    read_text,
    setup,
    to_rows,
)
from agilerl.safety.custom_code import torch_restored


class WaitingGrader(BaseGrader):
    """A grader whose time is not that of this process: it asks about each completion separately, several at a time.

    A subclass says what it asks (``question``) and how it gets the answer (``answer``, called in threads). Such a
    grader may begin on completions that have ended while others are still being generated (``EarlyGrading``): an answer
    may depend on its question alone.
    """

    asks_once = False
    """Whether equal questions of a batch are asked only once."""
    remembers = False
    """Whether an answer may depend on earlier questions, if they are asked one after another."""
    workers: int = 1
    """The most questions at a time, 1 or more."""
    _threads: "Threads | None" = None

    @property
    def in_order(self) -> bool:
        """Whether questions are asked in the order of the rows: what it remembers depends on nothing but the rows."""
        return self.remembers and self.workers == 1

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[Mark]:
        """Return a score for each completion, or the error if it has none."""
        self.setup()
        rows = to_rows(columns, len(completions))
        return self.answers([self.question(*arguments) for arguments in zip(completions, prompts, rows)])

    def question(self, completion: str, prompt: str, row: Columns) -> Any:
        """Return everything that the score of a completion depends on; may raise what ``__call__`` would raise."""
        raise NotImplementedError(f"{type(self).__name__} does not define question, which every WaitingGrader needs")

    def answer(self, question: Any) -> Mark:
        """Return the score, or why there is none; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} does not define answer, which every WaitingGrader needs")

    def key(self, question: Any) -> Hashable:
        """Return what equal questions have in common; None if they cannot be compared: then it is not asked early."""
        try:
            return json.dumps(question, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            return None

    def answers(self, questions: Sequence[Any]) -> list[Mark]:
        """Return the answers to all questions in their order; those that were begun early are only waited for."""
        with ExitStack() as stack:
            threads = self._threads or stack.enter_context(Threads(self.workers))
            futures: list[Future[Mark]] = []
            shared: dict[Hashable, Future[Mark]] = {}
            for question in questions:
                key = self.key(question) if self.asks_once or self._threads is not None else None
                # An answer that was begun is used once: who asks again gets a new one, as if nothing had been begun.
                begun = threads.begun.get(key)
                future = shared.get(key) or (begun.popleft() if begun else threads.submit(self.answer, question))
                if self.asks_once and key is not None:
                    shared[key] = future
                futures.append(future)
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def begin(self, completion: str, prompt: str, row: Columns) -> None:
        """Ask about a completion of a batch that is not complete yet."""
        assert self._threads is not None
        try:
            question = self.question(completion, prompt, row)
        except Exception:  # the call for the whole batch meets it again, and reports it
            return
        key, begun = self.key(question), self._threads.begun
        if key is not None and not (self.asks_once and key in begun):
            begun.setdefault(key, deque()).append(self._threads.submit(self.answer, question))


def waiting_parts(grader: object) -> list[WaitingGrader]:
    """Return the graders inside ``grader``, or itself, that may begin before a batch is complete.

    A subclass that calls in its own way has none, unless it says so again: what it would ask is not known.
    """
    kind = type(grader)
    if isinstance(grader, WaitingGrader):
        return [grader] if covers(kind, "question", "__call__", "grade") else []
    if hasattr(grader, "waiting") and covers(kind, "waiting", "__call__", "grade"):  # a grader that calls others
        return list(grader.waiting())
    return []


def covers(kind: type, promise: str, *methods: str) -> bool:
    """Return whether ``promise`` is defined where these methods are, or below: no subclass changed one without it."""

    def depth(name: str) -> int:
        return next((k for k, ancestor in enumerate(kind.__mro__) if name in vars(ancestor)), len(kind.__mro__))

    return all(depth(promise) <= depth(method) for method in methods)


class EarlyGrading:
    """Lets graders work on finished completions of a batch while others are still being generated.

    ``add`` hands a completion over. Later the graders are called with the whole batch as usual, and the result is the
    same; they only have less to wait for. No thread outlives the context, except that Ctrl-C does not wait for them.
    """

    def __init__(self, graders: Sequence[WaitingGrader], columns: Collection[str] = ()) -> None:
        """``columns`` are those of all rows of the batch: a grader gets each of them, or None if a row lacks it."""
        self.graders = list({id(grader): grader for grader in graders}.values())
        self.columns = tuple(columns)
        # Completions that have ended before an earlier one, for graders that need the order of the rows.
        self._held: dict[int, tuple[str, str, Columns]] = {}
        self._next = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        ready = []
        for grader in self.graders:
            try:
                grader.setup()
            except Exception:  # it fails again when it is called, and then that is reported
                continue
            grader._threads = Threads(grader.workers)
            ready.append(grader)
        self.graders = ready
        if ready:  # what a function in a thread does to torch's settings ends with the batch
            self._stack.enter_context(torch_restored())
        return self

    def add(self, index: int, completion: str, row: Columns) -> None:
        """Begin with a completion; ``index`` is its place in the batch, of which the first is 0."""
        # As ``attempt_grader`` will say it for the whole batch.
        self._held[index] = completion, str(row.get("question", "")), {key: row.get(key) for key in self.columns}
        for grader in self.graders:
            if not grader.in_order:
                self._begin(grader, *self._held[index])
        while self._next in self._held:
            offered = self._held.pop(self._next)
            for grader in self.graders:
                if grader.in_order:
                    self._begin(grader, *offered)
            self._next += 1

    def _begin(self, grader: WaitingGrader, completion: str, prompt: str, row: Columns) -> None:
        grader.begin(read_text(grader, completion, row), prompt, row)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for grader in self.graders:
            threads, grader._threads = grader._threads, None
            assert threads is not None
            threads.__exit__(kind, error, at)
        self._stack.close()


class ThreadedGrader(WaitingGrader):
    """Call a function in threads, one completion at a time; for functions that wait, such as a client of a service.

    With ``workers`` of 2 or more the function must bear being called by several threads at once, in any order. With one
    it is called in the order of the rows. It is called while the base decodes: it may change neither torch's settings
    nor its rows.
    """

    remembers = True
    reads = "completion"  # the function inside reads more

    @checked
    def __init__(self, grader: Grader, *, workers: Count = 8, name: Name | None = None) -> None:
        """Take a function or another grader, of either signature.

        Args:
            grader: the function.
            workers: threads, 1 or more.
            name: the grader's name in metrics; the function's name by default.
        """
        self.grader: Grader = grader
        self.workers, self.name = workers, name or grader_name(grader)

    def __repr__(self) -> str:
        return f"ThreadedGrader({self.grader!r}, workers={self.workers})"

    def open(self) -> None:
        """Set the grader up."""
        setup(self.grader)

    def release(self) -> None:
        """Close the grader."""
        close(self.grader)

    def question(self, completion: str, prompt: str, row: Columns) -> tuple[str, str, Columns]:
        """Return the arguments."""
        return completion, prompt, row

    def answer(self, question: tuple[str, str, Columns]) -> Mark:
        """Return what the function says, or its error."""
        completion, prompt, row = question
        (outcome,) = attempt_grader(self.grader, [completion], [row], [prompt])
        cause = outcome.__cause__ if isinstance(outcome, Exception) else None
        return cause if isinstance(cause, Exception) else outcome  # its name is put before it when the batch is graded

    def key(self, question: tuple[str, str, Columns]) -> Hashable:
        """Return the texts and which objects are in the row: unlike JSON, that holds for values of any kind."""
        completion, prompt, row = question
        return completion, prompt, frozenset((key, id(value)) for key, value in row.items())


class Threads:
    """Threads that make calls in the order in which they come.

    Daemons, unlike those of an executor: a judge that answers in a minute must not keep Ctrl-C waiting for it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun: dict[Hashable, deque[Future[Mark]]] = {}
        """Answers to questions of a batch that is not complete yet, by the key of the question."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._running: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(None if kind is None or issubclass(kind, Exception) else 0.0)  # Ctrl-C does not wait

    def end(self, patience: float | None) -> None:
        """Let no further call begin, and wait so many seconds for the current ones; None: until they have ended."""
        with suppress(Empty):
            while waiting := self._calls.get_nowait():
                waiting[0].cancel()
        # One for each thread, each of which takes one and ends.
        for _ in self._running:
            self._calls.put(None)
        deadline = None if patience is None else monotonic() + patience
        for thread in self._running:
            thread.join(None if deadline is None else max(0.0, deadline - monotonic()))

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a call made as soon as a thread is free."""
        future: Future[Any] = Future()
        self._calls.put((future, call, arguments))
        if len(self._running) < self.count:
            self.add()
        return future

    def add(self) -> None:
        """Start a thread, the first ones as calls come, others in place of those whose call does not return."""
        self._running.append(Thread(target=self._work, daemon=True))
        self._running[-1].start()

    def _work(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call, arguments = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*arguments))
                except BaseException as error:  # whoever waits for the result gets it, SystemExit included
                    future.set_exception(error)
            del future, call, arguments, waiting  # an idle thread keeps no row alive
