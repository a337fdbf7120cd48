"""What a single-turn task must provide, and how its rows become prompts."""

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np

from agilerl.checks.arguments import Hint, checked
from agilerl.envs.prompts import PromptTooLongError, prompt_text, render_prompt
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.rewards.grader import (
    MESSAGES,
    OPENING,
    Columns,
    Grader,
    Grades,
    close,
    grade,
    grades_of,
    run_calls,
    score_or_error,
    setup,
)
from agilerl.rewards.waiting import WaitingGrader, covers, waiting_parts
from agilerl.streams import stream
from agilerl.text.contract import contract_of
from agilerl.text.padding import has_template

Split = Literal["train", "exam", "test"]
"""``train`` is an endless stream; ``exam`` is the panel that measures fitness; ``test`` is never used for selection."""

Row = dict[str, Any]
"""One problem: at least ``question`` (str) and ``answer`` (str, or None if there is no single right answer)."""

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": str}``."""

Rendered = TypeVar("Rendered")

TRIED_ROWS = 256
"""Training rows rendered before a run starts, to check that they fit."""
_STRIDE, _MOST_SKIPPED = 1009, 256
"""Distance from a row that is too long to its stand-in, so that it is in another batch; and the most rows tried."""


@dataclass(frozen=True)
class Place:
    """One place of a split: a question with its prompt, or an episode that has not begun."""

    row: Row
    """The row; for an episode only its ``seed``, since its content is unknown until it begins."""
    prompt_ids: Sequence[int] = ()
    """Tokens of the prompt; empty for an episode."""
    skipped: int = 0
    """Number of rows that were too long and that this one replaces."""
    level: int | None = None
    """Level of the curriculum; None if there is none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation that the prompt was rendered from, so that it need not be made again; empty: not kept."""


@dataclass(frozen=True)
class Lengths:
    """Token counts of the rows at some places."""

    prompts: Sequence[int]
    """Of each first prompt."""
    reply: int = 0
    """Most tokens that an environment writes between two completions."""
    turns: int = 1
    """Most completions in a row."""

    def row(self, completion: int, context_length: int) -> int:
        """Return the most tokens that a row may have, with completions of at most ``completion`` tokens."""
        return min(max(self.prompts) + self.turns * (completion + self.reply), context_length)


class Task(ABC):
    """A single-turn task: a pure function of (split, index) to a problem, and of a completion to a reward.

    Subclass it with ``row`` and ``reward`` for a custom task.
    """

    name: str = "task"
    """Its name in logs."""
    grader: str = "reward"
    """The name of its reward in the metrics ``rewards/<grader>/mean`` and ``/std``."""
    exam_prompts: int = 0
    """Size of the exam panel; ``row("exam", i)`` exists for 0 <= i < exam_prompts."""
    test_prompts: int = 0
    """Size of the test panel."""
    train_size: int | None = None
    """Rows of one training epoch; None for an endless stream without epochs."""
    # Read-only: a default that all tasks share.
    counts: Mapping[str, int] = MappingProxyType({})
    """How many rows were read, used, and left out, by reason; empty if nothing is read."""
    labelled: bool = False
    """Whether a row's response is good or bad, as its column ``label`` says."""
    multi_turn: ClassVar[bool] = False
    """Whether an answer is an episode, as in an ``EpisodeTask``."""

    @abstractmethod
    def row(self, split: Split, index: int) -> Row:
        """Return one problem; equal arguments give equal rows, whatever was asked before.

        Raises:
            EnvError: ``index`` is outside the panel, or the task cannot give that many distinct problems.
        """

    @abstractmethod
    def reward(self, completion: str, row: Columns) -> float | None:
        """Return what ``completion`` is worth as an answer to ``row``; None if it cannot be graded.

        Raises:
            RewardError: the scorer failed.
        """

    def messages(self, row: Columns) -> list[Message]:
        """Return the conversation shown to the model; a final assistant message is a prefill."""
        return [{"role": "user", "content": str(row["question"])}]

    def grade(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return ``reward`` of each completion; override it if batches are cheaper or the grade has parts.

        A completion whose scorer fails gets None and is counted, so one odd text does not end a run. If all of them
        fail, the scorer is broken, not the texts.

        Raises:
            RewardError: the scorer failed for every completion.
        """
        scores = run_calls([partial(self.reward, *arguments) for arguments in zip(completions, rows)])
        return grades_of(self.grader, [score_or_error(score, f"the reward of {self.name}") for score in scores])

    def grade_exam(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return the grades of completions of an exam or test; by default as in training."""
        return self.grade(completions, rows)

    def graded_text(self, completion: str, row: Columns) -> str:
        """Return the part of a completion that graders read."""
        return completion

    def reads_completions(self) -> bool:
        """Return whether rewards read completions alone, without what the chat template has opened of the answer."""
        return False

    def graded_row(self, row: Columns) -> Columns:
        """Return the row that graders get with that part."""
        return row

    def waiting(self, *, exam: bool) -> list[WaitingGrader]:
        """Return the graders among those that ``grade`` (or ``grade_exam``) calls that may begin early.

        They are handed completions as these end, while others are still being generated. Override it along with these
        two methods: a subclass that overrides one of them without it grades complete batches only.
        """
        return []

    def rewards(self, completions: Sequence[str], rows: Sequence[Columns]) -> list[float | None]:
        """Return the rewards of ``grade`` alone."""
        return self.grade(completions, rows).rewards

    def close(self) -> None:  # noqa: B027  (most tasks hold nothing)
        """Release what grading has opened; it is reopened on demand."""

    def prepare(self) -> None:  # noqa: B027  (most tasks have nothing to prepare)
        """Do now what would otherwise happen on first use (draw the panels), so that problems show before training."""

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:  # noqa: B027  (most tasks have nothing to fit)
        """Set the tokenizer and the longest prompt; called before training, possibly repeatedly.

        A dataset task leaves out rows that do not fit and counts them.
        """

    def level(self, position: int) -> int | None:
        """Return the curriculum level of a training row; None without a curriculum."""
        return None

    def demonstration(self, row: Columns) -> str | None:
        """Return the response to imitate, or None."""
        answer = row.get("answer")
        return None if answer is None else str(answer)

    def counterexample(self, row: Columns) -> str | None:
        """Return a worse response, for preferences, or None."""
        rejected = row.get("rejected")
        return None if rejected is None else str(rejected)

    def place_at(self, split: Split, index: int, tokenizer: Any, context_length: int) -> Place:
        """Return the row at a place with its prompt, which leaves room for a completion in ``context_length`` tokens.

        In training, a row whose prompt is too long is replaced by another row, always the same one. Raises EnvError if
        a panel's prompt is too long, or those of all stand-ins are.
        """

        def placed(row: Row) -> Place:
            messages = self.messages(row)
            # At least one token is left for the completion.
            return Place(row, render_prompt(tokenizer, messages, max_tokens=context_length - 1), messages=messages)

        if split == "train":
            _, fitting, skipped = self.first_that_fits(index, placed)
            return replace(fitting, skipped=skipped, level=self.level(index))
        return placed(self.row(split, index))

    def first_that_fits(self, position: int, render: Callable[[Row], Rendered]) -> tuple[Row, Rendered, int]:
        """Return a training row, ``render`` of it, and how many rows before it were too long."""
        first = None
        for number in range(_MOST_SKIPPED):
            row = self.row("train", position + number * _STRIDE)
            try:
                return row, render(row), number
            except PromptTooLongError as error:
                first = first or error
        raise EnvError(f"none of {_MOST_SKIPPED} training rows of {self.name} fits; the first: {first}") from first

    def lengths(self, places: Sequence[Place], tokenizer: Any, context_length: int) -> Lengths:
        """Return the lengths of the rows at some places."""
        return Lengths([len(question.prompt_ids) for question in places])

    def panel_size(self, split: Split) -> int:
        """Return how many rows ``exam`` or ``test`` has."""
        return self.exam_prompts if split == "exam" else self.test_prompts

    def check_index(self, split: Split, index: int) -> None:
        """Raise an EnvError unless ``row(split, index)`` can exist."""
        if split not in ("train", "exam", "test"):
            raise EnvError(f"expected the split train, exam or test, found {split!r}")
        whole = isinstance(index, int) and not isinstance(index, bool)
        if not whole or index < 0 or (split != "train" and index >= self.panel_size(split)):
            limit = "0 or more" if split == "train" else f"0 to {self.panel_size(split) - 1}"
            raise EnvError(f"expected an index of {limit} in the {split} split of {self.name}, found {index!r}")


def _delegate(name: str) -> Any:
    """Return the method of a wrapper that calls the inner task's."""

    def method(self: "TaskWrapper", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.task, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(Task, name).__doc__
    return method


class TaskWrapper(Task):
    """A task around another one: what a subclass does not override is the inner task's."""

    # Assigned by name: Task defines all of these, so __getattr__ would never be asked for them.
    row, messages, reward = map(_delegate, ("row", "messages", "reward"))
    grade, grade_exam = map(_delegate, ("grade", "grade_exam"))
    level, demonstration, counterexample = map(_delegate, ("level", "demonstration", "counterexample"))
    prepare, close, reads_completions = map(_delegate, ("prepare", "close", "reads_completions"))

    def __init__(self, task: Task) -> None:
        self.task, self.grader = task, task.grader
        self._describe()

    def _describe(self) -> None:
        """Copy the task's description."""
        self.name, self.counts, self.train_size = self.task.name, self.task.counts, self.task.train_size
        self.exam_prompts, self.test_prompts = self.task.exam_prompts, self.task.test_prompts
        self.labelled = self.task.labelled

    def waiting(self, *, exam: bool) -> list[WaitingGrader]:
        """Return the task's graders that may begin early."""
        return waiting_graders(self.task, exam=exam)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Let the task leave out what does not fit."""
        self.task.fit(tokenizer, max_tokens)
        # Its sizes change with the rows that it leaves out.
        self._describe()


class TaskWithGraders(Task):
    """A task that is graded by ``_grader``; in exams and tests by ``fitness_grader``, if it has one."""

    _grader: Grader
    fitness_grader: Grader | None = None

    def reward(self, completion: str, row: Columns) -> float | None:
        """Return the training grader's reward."""
        return self.rewards([completion], [row])[0]

    def grade(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return the training grades; a completion on which the grader fails gets none and is counted."""
        return grade(self._grader, completions, rows)

    def grade_exam(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return the exam grades."""
        if self.fitness_grader is None:
            return self.grade(completions, rows)
        return grade(self.fitness_grader, completions, rows)

    def reads_completions(self) -> bool:
        """Return True: each grader says what else it reads."""
        return True

    def waiting(self, *, exam: bool) -> list[WaitingGrader]:
        """Return the parts of the grader that may begin early."""
        return waiting_parts(self.fitness_grader if exam and self.fitness_grader is not None else self._grader)

    def prepare(self) -> None:
        """Set up the graders."""
        super().prepare()
        setup(self._grader)
        setup(self.fitness_grader)  # None has nothing to set up

    def close(self) -> None:
        """Close the graders."""
        close(self._grader)
        close(self.fitness_grader)
        super().close()


def prompt_columns(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Return what graders are told of a prompt: its conversation, and what the template writes of an answer."""
    contract, last = contract_of(tokenizer), messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last["content"]:
        return {MESSAGES: messages, OPENING: contract.left_open}
    if contract.left_open and not last["content"].lstrip().startswith(contract.left_open.strip()):
        # A prefill that the template would change stands behind what the generation prompt has opened.
        text = contract.opened + last["content"]
        if has_template(tokenizer) and prompt_text(tokenizer, messages).endswith(text):
            messages = [*messages[:-1], {**last, "content": contract.left_open + last["content"]}]
    return {MESSAGES: messages, OPENING: ""}


def waiting_graders(task: Task, *, exam: bool) -> list[WaitingGrader]:
    """Return a task's graders that may begin early; none if a subclass overrides how it grades and not ``waiting``."""
    return task.waiting(exam=exam) if covers(type(task), "waiting", "grade", "grade_exam") else []


TaskArgument = Annotated[Task, Hint("pass a ReasoningGymTask, a DatasetTask or another subclass of Task")]


@checked
def score_completions(task: TaskArgument, rows: Sequence[Columns], texts: Sequence[str]) -> list[float | None]:
    """Return the reward of each text as an answer to the row at the same place; None without a grade.

    Raises:
        RewardError: the numbers of rows and texts differ, or the scorer failed for every text.
    """
    return grade_completions(task, rows, texts).rewards


def grade_completions(task: Task, rows: Sequence[Columns], texts: Sequence[str], *, exam: bool = False) -> Grades:
    """Return the grades of each text as an answer to the row at the same index; errors as of ``score_completions``."""
    if len(rows) != len(texts):
        raise RewardError(f"expected one completion per row, found {len(texts)} completions for {len(rows)} rows")
    if not task.reads_completions():
        texts = [str(row.get(OPENING, "")) + text for text, row in zip(texts, rows)]
    return task.grade_exam(texts, rows) if exam else task.grade(texts, rows)


# -- which questions are held out for exam and test, and the training order of the others -----------------------------
#
# The order is a pure function of the seed and the position, the split depends on the question alone.


HELD_OUT_EVERY = 5
"""One in this many questions is held out for exams and tests."""
LEAST = 2
"""Fewest questions of a panel; below, its mean is meaningless and has no standard error."""
BLOCK = 1000
"""Number of positions in which every source of a mixture has exactly its share."""


class TrainingOrder:
    """Maps positions to rows of one source, or of several mixed by weight.

    A source is walked through in epochs, a new permutation each. In a mixture, every block of ``BLOCK`` positions holds
    each source as often as its weight says, in a shuffled order; an exhausted source begins its next epoch while the
    others continue. Only an epoch's permutation is remembered, so any position can be looked up directly.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Take the number of rows (1 or more) and the weight (above 0) of each source.

        Raises ConfigError if a weight is too small for one row in a block.
        """
        self.sizes, self.seed = tuple(sizes), seed
        self._starts = (0, *accumulate(self.sizes))
        self._shares = apportion(weights, BLOCK)
        if 0 in self._shares:
            raise ConfigError(
                f"expected weights that give every dataset at least 1 of {BLOCK} rows, found {tuple(weights)}; raise "
                "the smallest, or remove it"
            )
        # By source, the latest epoch and the permutation of its rows.
        self._epochs: dict[int, tuple[int, Sequence[int]]] = {}
        # The latest block: for each position its source and how many earlier ones have that source.
        self._block: tuple[int, Sequence[tuple[int, int]]] = (-1, ())

    def __call__(self, position: int) -> int:
        """Return the row at a training position, counted over all sources in sequence."""
        source, number = self.source(position)
        epoch, index = divmod(number, self.sizes[source])
        if self._epochs.get(source, (-1,))[0] != epoch:
            # A single source keeps the key from before mixtures existed, so that its order is unchanged.
            key = (epoch,) if len(self.sizes) == 1 else (epoch, source)
            order = stream(self.seed, "dataset/order", *key).permutation(self.sizes[source]).tolist()
            self._epochs[source] = (epoch, order)
        return self._starts[source] + self._epochs[source][1][index]

    def source(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and how many earlier positions have that source."""
        if len(self.sizes) == 1:
            return 0, position
        block, index = divmod(position, BLOCK)
        if self._block[0] != block:
            pattern = np.repeat(np.arange(len(self.sizes)), self._shares)
            pattern = stream(self.seed, "dataset/mixture", block).permutation(pattern)
            # Every block holds `share` of each source, so the counts at its start are known.
            numbers = [count(block * share) for share in self._shares]
            self._block = (block, [(source, next(numbers[source])) for source in pattern.tolist()])
        return self._block[1][index]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` among weights in whole numbers that add up to it, by largest remainders."""
    whole = sum(weights)
    exact = [weight / whole * total for weight in weights]
    shares = [int(share) for share in exact]
    # Equal remainders are served in order, so that equal weights divide the same way everywhere.
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


@checked
def is_held_out(question: str) -> bool:
    """Return whether ``question`` belongs to the fifth of all questions that are never trained on.

    A question is held out when ``crc32(question as UTF-8) % 5 == 0``. The rule needs no list and no seed, so the
    embedded base model, the training draws and the exams agree on it independently.
    """
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0


def fit_panels(exam: int, test: int, available: int) -> tuple[int, int] | None:
    """Return the sizes of smaller panels that ``available`` questions fill, or None if they would be too small.

    Each gets half of the questions; if one needs fewer, the rest goes to the other.
    """
    # Half, rounded up, or all that the test leaves over.
    exam_fits = min(exam, max(-(-available // 2), available - test))
    test_fits = min(test, available - exam_fits)
    enough = exam_fits >= min(exam, LEAST) and test_fits >= min(test, LEAST)
    return (exam_fits, test_fits) if enough else None


def warn_of_fewer(name: str, asked: tuple[int, int], sizes: tuple[int, int], distinct: str) -> None:
    """Warn that the panels are smaller than requested."""
    warnings.warn(
        f"{name} has only {distinct}, so {sizes[0]} are used for exams and {sizes[1]} for the test, instead of "
        f"{asked[0]} and {asked[1]} (eval_prompts, test_prompts): both are less precise",
        stacklevel=3,
    )
