"""What a grader is: how any is called, the grades that come of it, and the base of those that hold resources."""

import asyncio
import inspect
import os
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat

from agilerl.checks.arguments import checked, described, shown
from agilerl.checks.validation import LARGEST_FLOAT32
from agilerl.errors import RewardError, RewardTimeoutError
from agilerl.safety.custom_code import left, printing_bounded, torch_restored

# -- calling: any function that turns completions into numbers, with either of the two usual signatures ---------------


Grader = Callable[..., Any]
"""``f(completion, answer, question) -> float`` or ``f(prompts, completions, **columns) -> list[float | None]``."""

Mark = float | Exception | None
"""A score, None (not applicable), or why there is none."""

POSITIONAL = ("completion", "answer", "question")
OF_A_BATCH = frozenset({"completions", "prompts", "environments"})
"""Parameters of a function that gets everything at once."""

MESSAGES, OPENING = "prompt_messages", "prompt_opening"
"""Columns that rollouts add to rows: the conversation as the model saw it, with a prefill as its last message; and what
the chat template's generation prompt has written of the answer, such as ``<think>``."""

Reads = Literal["answer", "text", "message", "completion"]
"""What a grader reads before a completion: ``text`` (any function): what the template has opened; ``message``: that, or
the prefill, as the whole message of the assistant; ``answer``: only answer tags opened there; ``completion``: nothing,
because it hands the completion to another grader, or is about nothing else."""


Columns = Mapping[str, Any]
"""A row as graders and tasks read it: values by the names of columns."""


@dataclass(frozen=True)
class TrainerState:
    """Where the training of a completion's agent is; graders ask for it by the parameter ``trainer_state``."""

    global_step: int
    """Rollouts that the agent has learned from."""
    epoch: float | None = None
    """Passes over the training rows; None if the task makes its questions."""


class GradedRow(dict[str, Any]):
    """A row as graders get it."""

    state: TrainerState | None = None
    group: Hashable = None
    """What the completions of one prompt for one agent have in common; None: not known."""
    answer_row: "GradedRow | None" = None
    """What graders get of it with an answer that was found in the completion."""

    def changed(self, **columns: Any) -> "GradedRow":
        """Return a row with other columns, of the same state and group."""
        row = GradedRow({**self, **columns})
        row.state, row.group = self.state, self.group
        return row


def conversation(row: Columns, prompt: str) -> list[Any]:
    """Return the messages that a completion answers, without a prefill; ``prompt`` is the text of a row without any."""
    messages = _messages(row) or [{"role": "user", "content": prompt}]
    return list(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as one text: a single message of the user alone, else each with its role."""
    if [message["role"] for message in messages] == ["user"]:
        return str(messages[0]["content"])
    lines = [(message["role"], message.get("content") or message.get("tool_calls", "")) for message in messages]
    return "\n\n".join(f"{role}: {content}" for role, content in lines)


def read_text(grader: Grader, completion: str, row: Columns, *, in_batch: bool = False) -> str:
    """Return what a grader reads of a completion: with what the prompt has already written of it (``Reads``)."""
    reads: Reads = "answer" if grader is exact_match else getattr(grader, "reads", "text")
    if reads == "completion":
        return completion
    opening = str(row.get(OPENING, ""))
    if reads != "text" or (in_batch and _takes_messages(grader, row)):
        last = (_messages(row) or [{"role": "user"}])[-1]
        opening = str(last["content"]) if last["role"] == "assistant" else opening
    if reads == "answer":  # what is written before the tag is no part of it
        _, tag, answer = opening.rpartition(OPEN)
        opening = tag + answer if tag and CLOSE not in answer else ""
    return opening + completion


def _messages(row: Columns) -> Sequence[Any]:
    return row.get(MESSAGES) or (row["prompt"] if _is_conversation(row) else ())


@checked
def call_grader(
    grader: Grader, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Score ``completions`` with ``grader``; ``None`` means that the grader does not apply to that completion.

    Arguments are resolved by name. A function with a parameter ``completions`` or ``prompts`` gets everything at once:
    ``prompts``, ``completions`` and each column of the rows as a list, as far as it takes them. Any other function gets
    one completion per call: ``completion``, ``prompt`` and the columns of its row (``answer``, ``question``, ...). If
    these names do not fit but exactly three parameters are required, they are ``(completion, answer, question)`` by
    position. ``prompts`` defaults to the question of each row. Coroutine functions are awaited, all of them at once.

    As in TRL, a function for a batch gets the prompts and completions of rows whose column ``prompt`` is a conversation
    as messages: ``completions[i][0]["content"]`` is a text. Functions of ``trl`` always do; a ``BaseGrader`` never.
    ``trainer_state`` (see ``TrainerState``) is there in training and exams, for functions that name it.

    Raises:
        RewardError: the grader raised, asks for something the rows do not have, or returned anything but one finite
            number or None per completion.
    """
    outcomes = attempt_grader(grader, completions, rows, prompts)
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
    return outcomes  # type: ignore[return-value]


def attempt_grader(
    grader: Grader, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str] | None = None
) -> list[Mark]:
    """Score as ``call_grader`` does, but return a RewardError for each completion that could not be scored.

    A function for a batch may itself return an exception for a completion. If it raises, it is called again with one
    completion at a time, which shows which ones fail.

    Raises RewardError if the error does not belong to single completions: the grader asks for something the rows do not
    have, or did not return a list of the right length.
    """
    if len(rows) != len(completions):
        raise RewardError(f"expected one row per completion, found {len(rows)} rows for {len(completions)} completions")
    if not completions:
        return []
    prompts = [str(row.get("question", "")) for row in rows] if prompts is None else prompts
    # ``answer`` alone tells nothing: it is a column in both signatures.
    in_batch = _is_of_trl(grader) or not OF_A_BATCH.isdisjoint(_parameters(grader))
    texts = [read_text(grader, *arguments, in_batch=in_batch) for arguments in zip(completions, rows)]
    if in_batch:
        return _attempt_batch(grader, texts, rows, prompts)
    name = grader_name(grader)
    calls = [_single_call(name, grader, text, row, prompt) for text, row, prompt in zip(texts, rows, prompts)]
    return [score_or_error(score, name) for score in run_calls(calls)]


def _attempt_batch(
    grader: Grader, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str]
) -> list[Mark]:
    """Attempt a grader that gets everything at once."""

    def again(indices: Sequence[int]) -> list[Mark]:
        parts = [completions[k] for k in indices], [rows[k] for k in indices], [prompts[k] for k in indices]
        return _attempt_batch(grader, *parts)

    name, parameters, count = grader_name(grader), _parameters(grader), len(completions)
    states = [getattr(row, "state", None) if "trainer_state" in parameters else None for row in rows]
    if any(state != states[0] for state in states):  # one call for each, because a call has one state
        outcomes: dict[int, Mark] = {}
        for state in dict.fromkeys(states):
            indices = [k for k in range(count) if states[k] == state]
            outcomes |= dict(zip(indices, again(indices)))
        return [outcomes[k] for k in range(count)]
    as_messages = [_takes_messages(grader, row) for row in rows]
    inputs: dict[str, Any] = {
        "prompts": [conversation(row, p) if m else p for m, row, p in zip(as_messages, rows, prompts)],
        "completions": [
            [{"role": "assistant", "content": text}] if m else text for m, text in zip(as_messages, completions)
        ],
    }
    # Of any row, in the order in which they appear; a row without one of them gives None.
    columns = dict.fromkeys(key for row in rows for key in row)
    if states[0] is not None:
        inputs["trainer_state"] = states[0]
    # Rows may have thousands of columns, of which only those that it takes are made lists.
    names = select(name, grader, {**columns, **inputs})
    arguments = {key: inputs[key] if key in inputs else [row.get(key) for row in rows] for key in names}
    (scores,) = run_calls([lambda: grader(**arguments)])
    if not isinstance(scores, Exception):
        return [score_or_error(score, name) for score in _check_list(scores, count, name)]
    return [score_or_error(scores, name)] if count == 1 else [again([k])[0] for k in range(count)]


def check_score(value: object, name: str = "the reward function") -> float | None:
    """Return ``value`` as a float; None stays None. Raises RewardError for anything else; strings are not converted."""
    if value is None or (type(value) is float and abs(value) <= LARGEST_FLOAT32):  # nearly all: SupportsFloat is slow
        return value
    if not isinstance(value, SupportsFloat) or isinstance(value, str | bytes):
        raise RewardError(
            f"{name} must return a finite number or None, found {described(value)}; convert it in the reward function"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"{name} must return one number, found {shown(value)}, which is not one: {error}") from error
    if not abs(number) <= LARGEST_FLOAT32:  # NaN is not
        raise RewardError(
            f"{name} must return a finite number or None, found {number:g}; float32 holds numbers up to 3.4e38"
        )
    return number


def grader_name(grader: Grader) -> str:
    """Return a grader's name for messages and metrics: its ``name``, its function name, or the name of its type."""
    return str(getattr(grader, "name", getattr(grader, "__name__", type(grader).__name__)))


def score_or_error(score: object, name: str) -> Mark:
    """Return a checked score, or the error that replaces it."""
    if isinstance(score, Exception):
        explained = isinstance(score, RewardError)
        kind = "" if explained else f" raised {type(score).__name__}"
        frames = [] if explained else traceback.extract_tb(score.__traceback__)
        line = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[-1:])
        late = isinstance(score, TimeoutError | RewardTimeoutError)
        failure = (RewardTimeoutError if late else RewardError)(f"{name}{kind}: {score}{line}")
        failure.__cause__ = score
        return failure
    try:
        return check_score(score, name)
    except RewardError as error:
        return error


def to_rows(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows that these columns are of."""
    return [{key: column[index] for key, column in columns.items()} for index in range(count)]


def _check_list(scores: Any, count: int, name: str) -> list[Any]:
    try:
        items = None if isinstance(scores, str | bytes | Mapping) else list(scores)
    except TypeError:
        items = None
    if items is None or len(items) != count:
        what = described(scores) if items is None else f"{len(items)} of them"
        raise RewardError(f"{name} must return a list of {count} numbers (one for each completion), found {what}")
    return items


def _is_of_trl(grader: Any) -> bool:
    """Return whether a function is TRL's own; these read completions as messages, whatever the prompts are."""
    while isinstance(grader, partial):
        grader = grader.func
    return str(getattr(grader, "__module__", "")).partition(".")[0] == "trl"


def _is_conversation(row: Columns) -> bool:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt else None
    return isinstance(first, Mapping) and {"role", "content"} <= set(first)


def _takes_messages(grader: Grader, row: Columns) -> bool:
    """Return whether a function for a batch gets the prompt and completion of a row as messages."""
    return _is_of_trl(grader) or (not isinstance(grader, BaseGrader) and _is_conversation(row))


def _parameters(grader: Grader) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, without ``*args`` and ``**kwargs``."""
    try:
        parameters = inspect.signature(grader).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"expected a Python function with named arguments as a grader, found {shown(grader)}: {error}"
        ) from error
    return {key: p for key, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def select(name: str, grader: Grader, offered: Mapping[str, Any]) -> list[str]:
    """Return the names that a function takes of those that are offered; raises RewardError if it asks for others."""
    parameters = _parameters(grader)
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in offered]
    if missing:
        more = f" and {len(offered) - _NAMED} more" if len(offered) > _NAMED else ""
        raise RewardError(
            f"{name} asks for {', '.join(missing)}, found only {', '.join(sorted(offered)[:_NAMED])}{more}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(grader).parameters.values()):
        # The state is no column: who takes columns by ``**`` may read all of them as lists.
        return [key for key in offered if key in parameters or key != "trainer_state"]
    return [key for key in parameters if key in offered]


_NAMED = 20
"""Columns that an error names."""


def _single_call(name: str, grader: Grader, text: str, row: Columns, prompt: str) -> Callable[[], Any]:
    offered = {**row, "completion": text, "prompt": prompt}
    if (state := getattr(row, "state", None)) is not None:
        offered["trainer_state"] = state
    parameters = _parameters(grader)
    required = [key for key, p in parameters.items() if p.default is p.empty]
    positional = [key for key in required if parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY]
    by_position = any(p.kind is p.POSITIONAL_ONLY for p in parameters.values())
    fits_by_name = not by_position and set(required) <= set(offered)
    if len(positional) == len(required) == len(POSITIONAL) and not fits_by_name:
        return partial(grader, *map(offered.get, POSITIONAL))
    return partial(grader, **{key: offered[key] for key in select(name, grader, offered)})


def run_calls(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make the calls and await awaitable results; an exception becomes the result of its call."""
    results: list[Any] = []
    with torch_restored(), printing_bounded():
        for call in calls:
            try:
                results.append(call())
            except Exception as error:
                results.append(error)
            except BaseException as error:  # a grader must not end the process
                results.append(left(error))
        if not any(inspect.isawaitable(result) for result in results):
            return results
        # In a new thread: the caller may be inside a running event loop (a notebook), which cannot be re-entered.
        with ThreadPoolExecutor(1) as pool:
            # With the context, in which _GRADING says that what these coroutines print is a grader's.
            return pool.submit(copy_context().run, asyncio.run, _gather(results)).result()


async def _gather(results: Sequence[Any]) -> list[Any]:
    async def settled(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:  # the event loop would raise it at once, without waiting for the other calls
            raise left(error) from error

    return list(await asyncio.gather(*map(settled, results), return_exceptions=True))


# -- the scores of a batch of completions, kept separately for each grader --------------------------------------------


Grade = float | None


@dataclass(frozen=True)
class Grades:
    """Rewards of N completions, and the scores of each grader that they were computed from."""

    rewards: list[Grade]
    """[N]; the rewards for training. None: no grade, which is masked out and never counts as 0."""
    scores: dict[str, list[Grade]] = field(default_factory=dict)
    """By grader, [N], before any weight; None if it did not apply or failed."""
    failures: dict[str, list[int]] = field(default_factory=dict)
    """By grader, the indices of completions on which it failed: raised, timed out, or returned an invalid score."""
    reasons: dict[int, RewardError] = field(default_factory=dict)
    """By completion index, the first error."""

    @property
    def errors(self) -> dict[str, int]:
        """How often each grader failed."""
        return {name: len(indices) for name, indices in self.failures.items()}

    def scores_at(self, index: int) -> dict[str, Grade]:
        """Return the score of each grader for one completion."""
        return {name: column[index] for name, column in self.scores.items()}

    def failed_at(self, index: int) -> tuple[str, ...]:
        """Return the graders that failed on one completion."""
        return tuple(name for name, indices in self.failures.items() if index in indices)


class AllGradesFailedError(RewardError):
    """A grader failed on every completion of a batch."""

    def __init__(self, message: str, reasons: Mapping[int, RewardError]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)
        """The error of each completion, by index."""


@checked
def grade(
    grader: Grader, completions: Sequence[str], rows: Sequence[Columns], prompts: Sequence[str] | None = None
) -> Grades:
    """Score ``completions`` with any grader; a completion on which it fails gets None and is counted.

    Arguments are those of ``call_grader``. A ``CombinedGrader`` reports a column for each of its graders.

    Raises RewardError if the grader failed on every completion, so that it is itself broken, or where
    ``attempt_grader`` raises.
    """
    if hasattr(grader, "grade"):  # it reports several scores separately
        grades: Grades = grader.grade(completions, rows, prompts)
        return grades
    return grades_of(grader_name(grader), attempt_grader(grader, completions, rows, prompts))


def grades_of(name: str, outcomes: Sequence[Mark]) -> Grades:
    """Return the outcomes of one grader as grades; raises AllGradesFailedError if all of them are failures."""
    failures = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, RewardError)}
    if failures and len(failures) == len(outcomes):
        count = f"{name} failed on all {len(outcomes)} completions; the first error: " if len(outcomes) > 1 else ""
        raise AllGradesFailedError(f"{count}{failures[0]}", failures) from failures[0]
    scores = [None if isinstance(outcome, Exception) else outcome for outcome in outcomes]
    return Grades(list(scores), {name: scores}, {name: list(failures)}, failures)


# -- graders that hold resources: opened, closed and named ------------------------------------------------------------


class BaseGrader:
    """A grader with a name and a resource to open: a model, a connection, a process, other graders.

    Subclasses implement ``open`` and ``release``, and ``__call__`` with one of the two signatures. ``setup`` may be
    called any number of times and opens once per process; a process that was forked from one where the grader was open
    opens it again. The package's graders call it themselves when they are first used.
    """

    name: str = "grader"
    """The grader's name in messages and metrics."""
    reads: Reads = "text"
    """What it reads before a completion."""
    _opened_by: int | None = None

    def setup(self) -> None:
        """Open what grading needs, unless this process has already done so."""
        if self._opened_by != os.getpid():
            self.open()
            # Noted afterwards, so that an opening that failed is tried again.
            self._opened_by = os.getpid()

    def close(self) -> None:
        """Release it, if this process has opened it; ``setup`` can open it again."""
        if self._opened_by == os.getpid():
            # Forgotten before, so that a release that fails is not called twice.
            self._opened_by = None
            self.release()

    def open(self) -> None:
        """Open the resource; called by ``setup``."""

    def release(self) -> None:
        """Undo ``open``."""

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def setup(grader: Any) -> None:
    """Call the ``setup`` of a grader that has ``setup`` and ``close``; plain functions have neither."""
    if hasattr(grader, "setup") and hasattr(grader, "close"):
        grader.setup()


def close(grader: Any) -> None:
    """Call its ``close``."""
    if hasattr(grader, "setup") and hasattr(grader, "close"):
        grader.close()


# -- reward functions that only need text -----------------------------------------------------------------------------


OPEN, CLOSE = "<answer>", "</answer>"


@checked
def extract_answer(completion: str) -> str:
    """Return the text between the last ``<answer>`` and ``</answer>``, else the whole completion; stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    return completion[start + len(OPEN) : end].strip() if start >= 0 else completion.strip()


@checked
def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer equals ``answer``, ignoring outer whitespace; else 0.0."""
    return 1.0 if extract_answer(completion) == answer.strip() else 0.0
