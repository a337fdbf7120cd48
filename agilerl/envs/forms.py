"""The forms that rows come in: the columns of the prompt, the response and the rejected one, as text or messages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agilerl.arguments import nearest, shown
from agilerl.envs.core import Message
from agilerl.errors import EnvError

Purpose = Literal["reasoning", "sft", "preference"]
"""What rows are read for: prompts to answer and grade, demonstrations, or pairs."""

Needs = Literal["no", "any", "text"]
"""Whether every row must have a response: no; yes, of any type (for a grader); yes, as text."""

Fault = Literal["missing", "not_text", "empty", "alike"]
"""What can be wrong with a row: a value is missing or None, not text, or empty, or both answers of a pair are equal."""


HALF = re.compile("[\ud800-\udfff]")
"""Lone surrogates: JSON can contain them, but no tokenizer reads them."""


class RowFaultError(EnvError):
    """A malformed row: it does not have the form of its dataset."""

    def __init__(self, kind: Fault, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of a row, independent of its form."""

    prompt: str | list[Message]
    """A text, or a conversation."""
    response: str | None = None
    """The answer to learn or to compare with; None if the row has none."""
    rejected: str | None = None
    """A worse answer."""

    @property
    def question(self) -> str:
        """The prompt as text; for a conversation, its last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def texts(self) -> list[str]:
        """Return every text of the row that a model sees."""
        prompt = [self.prompt] if isinstance(self.prompt, str) else [m["content"] for m in self.prompt]
        return [*prompt, *(text for text in (self.response, self.rejected) if text is not None)]


@dataclass(frozen=True, slots=True)
class Form:
    """Which columns are read, the same for all rows of a dataset."""

    prompt: str | None
    """Column of the prompt; ``messages`` holds prompt and response; None: what ``chosen`` and ``rejected`` share."""
    response: str | None = None
    """Column of the response, text or one assistant message."""
    needs: Needs = "text"
    """Whether a row without a response is a fault."""
    pairs: bool = False
    """Whether ``chosen`` and ``rejected`` are read."""
    grades_text: bool = False
    """Whether the column ``answer``, if a row has one, must be text, because a grader expects text."""

    def told(self) -> str:
        """Return the columns that are read, for messages."""
        columns = [self.prompt, *(("chosen", "rejected") if self.pairs else (self.response,))]
        return " and ".join(dict.fromkeys(column for column in columns if column is not None))

    def read(self, row: Mapping[str, Any]) -> Sample:
        """Return a row's content; raises RowFaultError if it does not have this form."""
        if self.grades_text and not isinstance(answer := row.get("answer"), str | None):
            raise RowFaultError("not_text", f"expected text in the column answer, found {shown(answer)}")
        sample = self._read(row)
        if any(HALF.search(text) for text in sample.texts()):
            raise RowFaultError("not_text", "expected text, found half of a character in it (a lone surrogate)")
        return sample

    def _read(self, row: Mapping[str, Any]) -> Sample:
        if self.prompt is None:
            prompt, answers = _shared_prompt(row)
            return Sample(prompt, answers[0], answers[1] if self.pairs else None)
        if self.pairs:
            return _pair(row, _prompt(row, self.prompt))
        if self.prompt == "messages":
            return _conversation(row, self.needs == "text")
        prompt = _prompt(row, self.prompt)
        return Sample(prompt, None if self.response is None else self._response(row, self.response, prompt))

    def _response(self, row: Mapping[str, Any], column: str, prompt: str | list[Message]) -> str | None:
        value = row.get(column)
        if self.needs == "text" or (self.needs == "any" and value is None):
            return _answer(row, column, prompt)
        return value if isinstance(value, str) else None


def form_of(
    columns: Sequence[str],
    purpose: Purpose,
    name: str,
    *,
    response: str | None = None,
    needs: Needs = "no",
) -> Form:
    """Return the form of rows with these columns.

    Args:
        columns: what the rows have.
        purpose: what they are read for.
        name: the dataset's name in messages.
        response: preferred response column of ``sft``.
        needs: whether ``reasoning`` needs an answer to grade with.

    Raises:
        EnvError: a column is missing; the message names the nearest one.
    """
    if purpose == "preference":
        return _form_of_pairs(columns, name)
    if purpose == "sft":
        prompts, needs = ["messages", "prompt", "question"], "text"
        responses = [*([response] if response else []), "completion", "answer", "chosen"]
    else:
        prompts, responses = ["question", "messages", "prompt"], ["answer", "completion", "chosen"]
    prompt = next((column for column in prompts if column in columns), None)
    if prompt is None and {"chosen", "rejected"} <= set(columns):
        return Form(None, "chosen")
    if prompt is None:
        raise _missing(prompts if purpose == "sft" else ["question", "prompt", "messages"], columns, name)
    if prompt == "messages":
        return Form(prompt, prompt, "text" if needs == "text" else "no")
    answer = next((column for column in responses if column in columns), None)
    if answer is None and needs != "no":
        raise _missing(responses, columns, name)
    return Form(prompt, answer, needs)


def _form_of_pairs(columns: Sequence[str], name: str) -> Form:
    for column in ("chosen", "rejected"):
        if column not in columns:
            raise _missing([column], columns, name)
    return Form(next((column for column in ("prompt", "question") if column in columns), None), "chosen", pairs=True)


def _missing(wanted: Sequence[str], columns: Sequence[str], name: str) -> EnvError:
    hint = nearest(wanted[0], columns)
    meant = f" {hint}" if hint.startswith("did") else ""
    return EnvError(
        f"expected the column {' or '.join(wanted)} in {name}, found {', '.join(sorted(columns))};{meant} rename a "
        f"column with columns: {{{wanted[0]}: <its name>}}"
    )


# -- values -----------------------------------------------------------------------------------------------------------


def as_messages(value: Any, role: str, where: str) -> list[Message]:
    """Return a column as messages; text becomes one message of ``role``. Raises EnvError for anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    sound = isinstance(value, Sequence) and len(value) > 0
    if not sound or not all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in value):
        raise EnvError(f"expected text or a list of {{'role', 'content'}} in {where}, found {value!r:.100}")
    if not all(isinstance(m["content"], str) for m in value):
        raise EnvError(f"expected text as the content of each message in {where}, found {value!r:.100}")
    return [{"role": str(m["role"]), "content": m["content"]} for m in value]


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return a value that is a non-empty text or conversation."""
    value = row.get(column)
    if value is None:
        found = "None" if column in row else "no such column"
        raise RowFaultError("missing", f"expected text in the column {column}, found {found}")
    if isinstance(value, str):
        if not value.strip():
            raise RowFaultError("empty", f"expected text in the column {column}, found {shown(value)}")
        return value
    if isinstance(value, Sequence) and len(value) == 0:
        raise RowFaultError("empty", f"expected messages in the column {column}, found an empty list")
    try:
        messages = as_messages(value, "user", f"the column {column}")
    except EnvError as error:
        raise RowFaultError("not_text", str(error)) from error
    if any(message.get("tool_calls") for message in value):
        raise RowFaultError("not_text", f"expected messages of text in the column {column}, found tool calls")
    if not messages[-1]["content"].strip():
        raise RowFaultError("empty", f"expected text in the last message of the column {column}, found none")
    return messages


def _prompt(row: Mapping[str, Any], column: str) -> str | list[Message]:
    value: str | list[Message] = _value(row, column)
    return value


def _answer(row: Mapping[str, Any], column: str, prompt: str | list[Message]) -> str:
    """Return a response; if it is a conversation, it may repeat the prompt."""
    value = _value(row, column)
    if not isinstance(value, str) and len(value) > 1 and value[:-1] == as_messages(prompt, "user", "the prompt"):
        value = value[-1:]
    messages = as_messages(value, "assistant", f"the column {column}")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise RowFaultError(
            "not_text", f"expected text or one message of the assistant in the column {column}, found {value!r:.100}"
        )
    return messages[0]["content"]


def _pair(row: Mapping[str, Any], prompt: str | list[Message]) -> Sample:
    chosen, rejected = (_answer(row, column, prompt) for column in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowFaultError("alike", f"expected chosen and rejected to differ, found {shown(chosen)} twice")
    return Sample(prompt, chosen, rejected)


def _conversation(row: Mapping[str, Any], answered: bool) -> Sample:
    """Split a whole conversation into the prompt and the assistant's last message."""
    where, value = "the column messages", _value(row, "messages")
    if isinstance(value, str):
        raise RowFaultError("not_text", f"expected a list of {{'role', 'content'}} in {where}, found {value!r:.100}")
    if value[-1]["role"] != "assistant":
        if answered:
            raise RowFaultError(
                "missing", f"expected a conversation that ends with the assistant, found {value[-1]!r:.100}"
            )
        return Sample(value)
    if len(value) == 1:
        raise RowFaultError("missing", f"expected a message before the assistant's in {where}, found {value!r:.100}")
    return Sample(value[:-1], value[-1]["content"])


def _shared_prompt(row: Mapping[str, Any]) -> tuple[str | list[Message], list[str]]:
    """Return the shared prompt of chosen and rejected, and their answers."""
    chosen, rejected = (_value(row, column) for column in ("chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_text(chosen, rejected)
    ends = [as_messages(value, "assistant", "chosen and rejected") for value in (chosen, rejected)]
    if len(ends[0]) < 2 or ends[0][:-1] != ends[1][:-1]:
        raise RowFaultError(
            "missing",
            "expected conversations in chosen and rejected to differ only in their last message; otherwise add "
            "the column prompt",
        )
    if ends[0] == ends[1]:
        raise RowFaultError("alike", f"expected chosen and rejected to differ, found {ends[0][-1]!r:.100} twice")
    if not all(end[-1]["role"] == "assistant" for end in ends):
        raise RowFaultError(
            "missing", f"expected conversations that end with the assistant, found {ends[0][-1]!r:.100}"
        )
    return ends[0][:-1], [end[-1]["content"] for end in ends]


def _shared_text(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """Split two texts after the last whole word that they share; no character is lost."""
    if chosen == rejected:
        raise RowFaultError("alike", f"expected chosen and rejected to differ, found {shown(chosen)} twice")
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    prompt = chosen[:shared].rstrip()
    if not prompt:
        raise RowFaultError(
            "missing", "expected a column prompt, because the texts in chosen and rejected share no beginning; add it"
        )
    answers = [text[len(prompt) :] for text in (chosen, rejected)]
    if not all(answer.strip() for answer in answers):
        raise RowFaultError("empty", f"expected an answer after the shared beginning of {shown(chosen)}, found none")
    return prompt, answers
