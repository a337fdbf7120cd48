r"""How prompts ask for answers, and where answers are found in completions: ``<answer>`` tags, ``\boxed``, a phrase."""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from agilerl.checks.arguments import Name, checked, shown
from agilerl.config.environment import EnvironmentConfig
from agilerl.envs.core import Message, TaskArgument, TaskWrapper, waiting_graders
from agilerl.errors import ConfigError
from agilerl.rewards.grader import CLOSE, MESSAGES, OPEN, OPENING, Columns, GradedRow, Grades
from agilerl.rewards.waiting import WaitingGrader
from agilerl.text.contract import text_ids

Format = Literal["whole", "tags", "last_number", "after", "boxed"]
PHRASE = "The answer is"
_CHECKED_ROWS = 8

# Every pattern is linear in the length of a text: no two of its repetitions match the same characters.
# A minus is a sign unless it follows a word or a bracket (5-3 ends with 3). Commas count between groups of three.
# Digits inside a word (x2) are no number.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-−])?"
    r"(?:(?<!\w)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
# A full stop ends a sentence only before a blank or a closing mark, so 3.5 is one number.
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*\"')\]]|$)")
# An escaped character is a match of its own, so \{ and \} neither open nor close.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)

_FORMATS: dict[Format, tuple[str, str]] = {
    "whole": ("", "the whole completion"),
    "tags": (f"Give your final answer between {OPEN} and {CLOSE}.", f"what stands between the last {OPEN} and {CLOSE}"),
    "last_number": ("", "the last number of the completion"),
    "after": ('End with "{phrase}" and your final answer.', "what follows the last {phrase!r} in its sentence"),
    "boxed": (r"Give your final answer in \boxed{{}}.", r"what the last \boxed{{}} holds"),
}
"""What prompts end with, and what is graded."""


@dataclass(frozen=True)
class AnswerFormat:
    """How an answer is asked for and found."""

    kind: Format = "whole"
    phrase: str = PHRASE
    """What an answer follows, for ``after``."""

    @classmethod
    def of(cls, config: EnvironmentConfig) -> Self:
        """Return the format of a run."""
        return cls(config.answer_format, config.answer_phrase)

    @property
    def instruction(self) -> str:
        """What prompts end with; empty for ``whole`` and ``last_number``, which ask for nothing."""
        return _FORMATS[self.kind][0].format(phrase=self.phrase)

    def __str__(self) -> str:
        graded = _FORMATS[self.kind][1].format(phrase=self.phrase)
        asked = f"questions end with: {self.instruction}" if self.instruction else "prompts ask for no format"
        return f"the reward reads {graded}; {asked}"

    def ask(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation whose last user message ends with the instruction, unless the conversation asks itself.

        It asks if a message before the prefill has the tag, the box or the phrase.
        """
        asked = [dict(message) for message in messages]
        mark = {"tags": OPEN, "boxed": r"\boxed"}.get(self.kind, self.phrase)
        end = len(asked) - bool(asked and asked[-1]["role"] == "assistant")
        if not self.instruction or any(mark in message["content"] for message in asked[:end]):
            return asked
        index = max((k for k, message in enumerate(asked) if message["role"] == "user"), default=None)
        if index is None:
            index = end
            asked.insert(index, {"role": "user", "content": ""})
        asked[index]["content"] = f"{asked[index]['content']}\n\n{self.instruction}".lstrip("\n")
        return asked

    def find(self, completion: str, prefill: str = "") -> str | None:
        """Return the answer in a completion that continues ``prefill``; None if there is none.

        An answer may begin in the prefill, but not end there. It is stripped; numbers have ASCII signs and no commas.
        """
        if self.kind == "whole":
            return completion
        text = prefill + completion
        spans: Iterable[tuple[int, int]] = {  # generators: only the chosen one reads the text
            "tags": _find_tags(text),
            "boxed": _find_boxes(text),
            "after": _find_phrase(text, self.phrase),
            "last_number": (match.span() for match in _NUMBER.finditer(text)),
        }[self.kind]
        # The last span; (0, 0), which ends within any prefill, stands for none.
        (start, end), *_ = [*deque(spans, maxlen=1), (0, 0)]
        if end <= len(prefill):
            return None
        answer = text[start:end].strip()
        return answer.replace(",", "").replace("−", "-") if self.kind == "last_number" else answer

    def write(self, answer: str) -> str:
        """Return a completion that holds an answer as the prompt asks for it."""
        return {
            "tags": f"{OPEN}{answer}{CLOSE}",
            "boxed": f"\\boxed{{{answer}}}",
            "after": f"{self.phrase} {answer}.",
        }.get(self.kind, answer)


def _find_tags(text: str) -> Iterable[tuple[int, int]]:
    """Yield the span within the last opening tag that is closed; of nested ones the inner one."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    if start >= 0:
        yield start + len(OPEN), text.find(CLOSE, start)


def _find_boxes(text: str) -> Iterable[tuple[int, int]]:
    """Yield the span within the last ``\\boxed{`` whose braces balance; of nested ones the inner one."""
    opened: list[int | None] = []
    last = (0, 0)
    for match in _BRACES.finditer(text):
        if match[0] == "}" and opened:
            start = opened.pop()
            # Of nested boxes the inner one begins later, although it ends first.
            last = last if start is None else max(last, (start, match.start()))
        elif match[0].endswith("{") and match[0] != r"\{":
            opened.append(match.end() if len(match[0]) > 1 else None)  # None: a plain brace
    yield last


def _find_phrase(text: str, phrase: str) -> Iterable[tuple[int, int]]:
    """Yield the span after the last occurrence of a phrase up to the end of its line or sentence."""
    *_, last = [None, *deque(re.finditer(re.escape(phrase), text, re.IGNORECASE), maxlen=1)]
    if last is not None:
        # Blanks, colons and emphasis after the phrase are no part of the answer: **The answer is:** 5.
        start = len(text) - len(text[last.end() :].lstrip(" \t\r\n:*"))
        end = _SENTENCE_END.search(text, start)
        line = text[start : len(text) if end is None else end.start()]
        yield start, start + len(line.rstrip(" \t*"))


class AnswerFormatTask(TaskWrapper):
    """A task whose graders read only the answer of a completion; its prompts ask for the format.

    The task's own reward and custom graders get what was found as the completion, or an empty text if there is no
    answer; samples and logs keep the whole completion. A final assistant message of a prompt is a prefill, in which an
    answer may begin: after ``The answer is``, or after ``<answer>``.
    """

    @checked
    def __init__(self, task: TaskArgument, answer_format: Format, phrase: Name = PHRASE) -> None:
        r"""Take a task, with its graders.

        Args:
            task: the task.
            answer_format: ``whole``: the completion is the answer; ``tags``: the text between the last ``<answer>``
                and ``</answer>``; ``last_number``: the last whole or decimal number (``1,000`` as 1000); ``after``: the
                text after the last ``phrase`` up to the end of its line or sentence; ``boxed``: what the last
                ``\boxed{}`` holds.
            phrase: for ``after``; not blank, in upper or lower case.

        Raises:
            ConfigError: an unknown format, or a blank phrase.
        """
        super().__init__(task)
        self.format = AnswerFormat(answer_format, phrase)

    def __repr__(self) -> str:
        return f"AnswerFormatTask({self.task!r}, {self.format.kind!r}, {self.format.phrase!r})"

    def messages(self, row: Columns) -> list[Message]:
        """Return the task's conversation with the instruction."""
        return self.format.ask(self.task.messages(row))

    def graded_text(self, completion: str, row: Columns) -> str:
        """Return the answer in a completion; empty if there is none."""
        last = self.task.messages(row)[-1:]
        prefill = last[0]["content"] if last and last[0]["role"] == "assistant" else str(row.get(OPENING, ""))
        return self.format.find(completion, prefill) or ""

    def graded_row(self, row: Columns) -> Columns:
        """Return the row as graders of an answer get it: nothing is before the answer, and no form was asked for."""
        if self.format.kind == "whole" or not isinstance(row, GradedRow):
            return row
        if row.answer_row is None:  # the same one each time, as graders that begin early recognise its values
            messages = self.task.messages(row)
            asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            row.answer_row = row.changed(**{MESSAGES: asked, OPENING: ""})
        return row.answer_row

    def reads_completions(self) -> bool:
        """Return whether rewards read completions alone: an answer is found here, whatever the task reads."""
        return self.format.kind != "whole" or self.task.reads_completions()

    def reward(self, completion: str, row: Columns) -> float | None:
        """Return the task's reward of the answer."""
        return self.task.reward(self.graded_text(completion, row), row)

    def grade(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return the task's grades of the answers."""
        return self.task.grade(*self._answers(completions, rows))

    def grade_exam(self, completions: Sequence[str], rows: Sequence[Columns]) -> Grades:
        """Return the task's grades of the answers in an exam."""
        return self.task.grade_exam(*self._answers(completions, rows))

    def _answers(self, completions: Sequence[str], rows: Sequence[Columns]) -> tuple[list[str], list[Columns]]:
        return [self.graded_text(*pair) for pair in zip(completions, rows)], list(map(self.graded_row, rows))

    def check_answers(self) -> None:
        """Raise ConfigError if the rows' own answers earn nothing in this format, but do as they stand.

        Such a format pays every agent 0, however well it answers. Looks at a few rows, unless grading calls
        other services.
        """
        rows = [self.row("train", index) for index in range(_CHECKED_ROWS)]
        plain = all(isinstance(row.get("answer"), str | int | float) for row in rows)
        if not plain or waiting_graders(self.task, exam=False):
            return
        answers = [str(row["answer"]) for row in rows]
        written = [self.format.write(answer) for answer in answers]
        earned = [grade or 0.0 for grade in self.grade(written, rows).rewards]
        if max(earned) <= 0 < min(grade or 0.0 for grade in self.task.grade(answers, rows).rewards):
            raise ConfigError(
                f"environment.answer_format={self.format.kind} does not fit these answers: {shown(written[0])} is read "
                f"as {shown(self.graded_text(written[0], rows[0]))} and earns {earned[0]:g}; so do {len(rows)} of "
                f"{len(rows)} rows with their own answers. Take whole, tags or boxed"
            )

    def waiting(self, *, exam: bool) -> list[WaitingGrader]:
        """Return the task's graders that may begin early; they get ``graded_text`` too."""
        # Said again, because ``waiting`` only speaks for a ``grade`` of its own class or of one above (covers).
        return waiting_graders(self.task, exam=exam)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Let the task leave out what does not fit with the instruction."""
        # The task measures its prompts without the instruction, so they get that much less room.
        room = len(text_ids(tokenizer, f"\n\n{self.format.instruction}")) if self.format.instruction else 0
        super().fit(tokenizer, None if max_tokens is None else max(max_tokens - room, 1))
