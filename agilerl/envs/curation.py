"""From the rows read to the rows used: the columns they have, what is wrong with them, and panels without leakage."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agilerl.arguments import nearest, shown
from agilerl.envs.core import LEAST, Message, Split, apportion, fewer
from agilerl.envs.prompts import HALF, render_prompt
from agilerl.envs.sources import Rows
from agilerl.errors import EnvError

# -- the columns of the prompt, the response and the rejected one, as text or messages --------------------------------


Purpose = Literal["reasoning", "sft", "preference", "unpaired"]
"""What rows are read for: prompts to answer and grade, demonstrations, pairs, or answers with a label (or pairs)."""

Needs = Literal["no", "any", "text"]
"""Whether every row must have a response: no; yes, of any type (for a grader); yes, as text."""

Fault = Literal["missing", "not_text", "empty", "alike"]
"""What can be wrong with a row: a value is missing or None, not text, or empty, or both answers of a pair are equal."""


class RowFaultError(EnvError):
    """A malformed row: it does not have the form of its dataset."""

    def __init__(self, kind: Fault, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of a row, independent of its form."""

    prompt: str | list[Message]
    """A text, or a conversation; an empty text: the response is a whole text, of which every token is learned."""
    response: str | None = None
    """The answer to learn or to compare with; None if the row has none."""
    rejected: str | None = None
    """A worse answer."""
    desirable: bool = True
    """Whether the response is a good one, as its label says."""
    calls: Sequence[Mapping[str, Any]] = ()
    """The response's calls of tools, as chat templates read them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the conversation may call."""

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
    labelled: bool = False
    """Whether the column ``label`` says if the response is good (True, 1) or bad (False, 0)."""
    grades_text: bool = False
    """Whether the column ``answer``, if a row has one, must be text, because a grader expects text."""
    learned: bool = False
    """Whether rows are only learned, never asked: then they may be whole texts, and conversations may call tools."""

    def told(self) -> str:
        """Return the columns that are read, for messages."""
        columns = [self.prompt, *(("chosen", "rejected") if self.pairs else (self.response,))]
        columns += ["label"] if self.labelled else []
        return " and ".join(dict.fromkeys(column for column in columns if column is not None))

    def read(self, row: Mapping[str, Any]) -> Sample:
        """Return a row's content; raises RowFaultError if it does not have this form."""
        if self.grades_text and not isinstance(answer := row.get("answer"), str | None):
            raise RowFaultError("not_text", f"expected text in the column answer, found {shown(answer)}")
        sample = self._read(row)
        if self.labelled:
            sample = replace(sample, desirable=label_of(row))
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
            return (self.learned and _calling(row)) or _conversation(row, self.needs == "text")
        if self.prompt == "text":
            if not isinstance(text := _value(row, "text"), str):
                raise RowFaultError("not_text", f"expected text in the column text, found {shown(text)}")
            return Sample("", text)
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
    learned: bool = False,
) -> Form:
    """Return the form of rows with these columns.

    Args:
        columns: what the rows have.
        purpose: what they are read for.
        name: the dataset's name in messages.
        response: response column of ``sft``; without a ``target``, its default, one of the usual ones.
        needs: whether ``reasoning`` needs an answer to grade with.
        learned: whether rows of ``sft`` are only learned, never asked.

    Raises:
        EnvError: a column is missing; the message names the nearest one.
    """
    if purpose == "unpaired" and "label" in columns:
        return replace(form_of(columns, "sft", name, response=response), labelled=True)
    if purpose == "unpaired" and not {"chosen", "rejected"} <= set(columns):
        raise _missing(["label"], columns, name)
    if purpose in ("preference", "unpaired"):
        return _form_of_pairs(columns, name)
    if response not in (None, "target", *columns) and "messages" not in columns:
        raise _missing([str(response)], columns, name)
    if purpose == "sft":
        prompts, needs = ["messages", "prompt", "question"], "text"
        responses = [*([response] if response else []), "completion", "answer", "chosen"]
    else:
        prompts, responses = ["question", "messages", "prompt"], ["answer", "completion", "chosen"]
    prompt = next((column for column in prompts if column in columns), None)
    if prompt is None and {"chosen", "rejected"} <= set(columns):
        return Form(None, "chosen")
    if prompt is None and purpose == "sft" and "text" in columns and set(responses).isdisjoint(columns):
        if learned:
            return Form("text", "text", learned=True)
        raise EnvError(
            f"{name} has whole texts in the column text, which have no prompt that an exam could ask; train on them "
            "with SFTGym, whose test is their likelihood, or rename columns to prompt and completion"
        )
    if prompt is None:
        raise _missing(prompts if purpose == "sft" else ["question", "prompt", "messages"], columns, name)
    if prompt == "messages":
        return Form(prompt, prompt, "text" if needs == "text" else "no", learned=learned)
    answer = next((column for column in responses if column in columns), None)
    if answer is None and needs != "no":
        raise _missing(responses, columns, name)
    return Form(prompt, answer, needs)


def _form_of_pairs(columns: Sequence[str], name: str) -> Form:
    for column in ("chosen", "rejected"):
        if column not in columns:
            raise _missing([column], columns, name)
    return Form(next((column for column in ("prompt", "question") if column in columns), None), "chosen", pairs=True)


_OFTEN = {
    "question": ("problem", "instruction", "query", "input", "text"),
    "answer": ("solution", "target", "output", "response", "label"),
}
"""What other datasets often call a column."""


def renamed(columns: Sequence[str]) -> dict[str, str]:
    """Return what to rename so that rows have a question and an answer, as far as other datasets' names tell."""
    has = {"question": ("question", "messages", "prompt"), "answer": ("answer", "completion", "chosen", "messages")}
    found = {
        own: next((column for column in names if column in columns), None)
        for own, names in _OFTEN.items()
        if not any(column in columns for column in has[own])
    }
    return {own: theirs for own, theirs in found.items() if theirs is not None}


def _missing(wanted: Sequence[str], columns: Sequence[str], name: str) -> EnvError:
    meant = renamed(columns).get(wanted[0])
    hint = f"did you mean {meant!r}?" if meant else nearest(wanted[0], columns)
    guess = f" {hint}" if hint.startswith("did") else ""
    return EnvError(
        f"expected the column {' or '.join(wanted)} in {name}, found {', '.join(sorted(columns))};{guess} rename a "
        f"column with columns: {{{wanted[0]}: {meant or '<its name>'}}}"
    )


# -- the values of a row ----------------------------------------------------------------------------------------------


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
    listed = value if isinstance(value, Sequence) else ()
    if any(isinstance(message, Mapping) and message.get("tool_calls") for message in listed):
        raise RowFaultError(
            "not_text",
            f"expected messages of text in the column {column}, found tool calls, which only SFTGym learns; tools are "
            "used in ToolEnv",
        )
    try:
        messages = as_messages(value, "user", f"the column {column}")
    except EnvError as error:
        raise RowFaultError("not_text", str(error)) from error
    if not messages[-1]["content"].strip():
        raise RowFaultError("empty", f"expected text in the last message of the column {column}, found none")
    return messages


def _prompt(row: Mapping[str, Any], column: str) -> str | list[Message]:
    value: Any = row.get(column)
    if not isinstance(value, str | list) and hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, list) and value and all(type(one) in (int, float) for one in value):
        return str(value)  # the row keeps the numbers, for the grader
    prompt: str | list[Message] = _value(row, column)
    return prompt


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


LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
"""What the column ``label`` may hold, text in any case; True is 1."""


def label_of(row: Mapping[str, Any]) -> bool:
    """Return whether the response of a labelled row is a good one; raises RowFaultError for what is no label."""
    value = row.get("label")
    known = LABELS.get(value.lower() if isinstance(value, str) else value) if isinstance(value, str | int) else None
    if known is None:
        kind: Fault = "missing" if value is None else "not_text"
        raise RowFaultError(kind, f"expected True or False (or 1 or 0) in the column label, found {shown(value)}")
    return known


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


def _calling(row: Mapping[str, Any]) -> Sample | None:
    """Return a conversation with calls of tools, as chat templates read them; None for one of text alone."""
    value, tools = row.get("messages"), row.get("tools")
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        return None
    if not tools and not any(message.get("tool_calls") for message in value):
        return None
    where = "the columns messages and tools"
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools or []
        messages = [_without_none({"content": "", **message}) for message in value]
        messages = [{"content": "", **message} if message.get("tool_calls") else message for message in messages]
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            function = call.get("function", call)
            if isinstance(function["arguments"], str):  # as the APIs write them, while templates expect an object
                function["arguments"] = json.loads(function["arguments"])
        plain = as_messages(messages, "user", where)
        if HALF.search(json.dumps([messages, tools], ensure_ascii=False)) or not isinstance(tools, list):
            raise ValueError("expected text and a list of tools")
    except (EnvError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RowFaultError(
            "not_text", f"expected messages with calls of tools in {where}, found {error} in {shown(value)}"
        ) from error
    if len(plain) < 2 or plain[-1]["role"] != "assistant":
        raise RowFaultError("missing", f"expected a conversation that ends with the assistant in {where}")
    calls = messages[-1].get("tool_calls", [])
    return Sample(messages[:-1], plain[-1]["content"], calls=calls, tools=[_without_none(tool) for tool in tools])


def _without_none(value: Any) -> Any:
    """Return plain data without entries that are None, with which tables fill up what a row lacks."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


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


# -- rows checked, measured and split without leakage; all of them counted --------------------------------------------


BadRows = Literal["raise", "drop"]
"""What to do about rows that do not have the form of their dataset."""

_COUNTED = (
    *("read", "train", "exam", "test"),
    *("missing", "not_text", "empty", "alike", "special_tokens", "too_long", "leaking", "unused", "repeated"),
)

Converse = Callable[[Mapping[str, Any], Sample], Sequence[Message]]
"""From a row and its parsed sample to the conversation shown to the model."""


@dataclass(frozen=True)
class Sizes:
    """How many prompts the panels have."""

    exam: int
    test: int


@dataclass(frozen=True)
class Curated:
    """The rows in use; no two splits share a rendered prompt."""

    sides: Mapping[Split, Rows]
    """``train``, ``exam`` and ``test``."""
    counts: Mapping[str, int]
    """``read`` = ``train`` + ``exam`` + ``test`` + ``missing`` + ``not_text`` + ``empty`` + ``alike`` (rows that do not
    have the form of their dataset) + ``special_tokens`` + ``too_long`` + ``leaking`` (the same prompt is in a panel) +
    ``unused`` (from a panel's own dataset, which needs fewer). ``repeated``: training rows that share a prompt with
    another one; they stay."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """A row that can be used."""

    index: int
    part: int
    key: bytes
    """Digest of its rendered prompt."""
    rank: bytes
    """Digest of its conversation: decides which rows a panel takes."""
    examines: bool = True
    """Whether a panel may take it; a bad answer is nothing to compare with."""


@dataclass(frozen=True)
class Ruler:
    """The tokenizer and limit that prompts are rendered and measured with."""

    tokenizer: Any = None
    """If None, prompts are compared as conversations, not as tokens, and have no length."""
    max_tokens: int | None = None
    """Most tokens of a prompt."""

    def special_tokens(self) -> tuple[str, ...]:
        """Return the texts that the tokenizer does not read as plain text."""
        if self.tokenizer is None:
            return ()
        added = [
            token.content for token in getattr(self.tokenizer, "added_tokens_decoder", {}).values() if token.special
        ]
        return tuple(dict.fromkeys([*getattr(self.tokenizer, "all_special_tokens", ()), *added]))


def curate(
    sources: Mapping[Split, Rows],
    form: Form,
    sizes: Sizes,
    *,
    converse: Converse,
    ruler: Ruler | None = None,
    bad_rows: BadRows = "raise",
    shrink: bool = False,
) -> Curated:
    """Check all rows, leave out what cannot be used, and fill the panels.

    A panel takes its rows from its own dataset if ``sources`` has one, else from the training rows. Which rows it takes
    depends only on their text, not on their order or a seed: it takes the conversations with the smallest digests, the
    test before the exam, so that other sizes or seeds give nearly the same panels. A panel holds each prompt once.
    Training rows (and rows of the exam's own dataset) whose rendered prompt is in a panel are left out. In a mixture,
    every dataset gives each panel its share by weight.

    Args:
        sources: ``train``, and ``exam`` and ``test`` if they are separate datasets.
        form: which columns are read.
        sizes: number of prompts in each panel.
        converse: turns a row into the conversation shown to the model.
        ruler: renders and measures prompts. Rows are left out if their prompt is too long or their text contains a
            special token of the tokenizer, which would be read e.g. as the end of a message.
        bad_rows: ``raise`` an error at the first malformed row, or ``drop`` such rows.
        shrink: if there are too few prompts, make the panels smaller, so that training keeps half of its rows.

    Raises:
        EnvError: malformed rows, too few prompts for a panel, or none left to train on.
    """
    counts: Counter[str] = Counter()
    fits = {split: _usable(rows, form, converse, ruler or Ruler(), bad_rows, counts) for split, rows in sources.items()}
    try:
        return _divided(sources, fits, sizes, counts)
    except _TooFewError:
        smaller = _fewer(sources, fits, sizes) if shrink else None
        while smaller is not None:
            try:
                return _divided(sources, fits, smaller, counts)
            except _TooFewError:  # splits share prompts, or shares of a mixture were rounded up
                smaller = _less(smaller, sizes)
        raise


class _TooFewError(EnvError):
    """There are fewer distinct prompts than the panels need."""


def _divided(
    sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], sizes: Sizes, read: Counter[str]
) -> Curated:
    """Fill the panels from the usable rows, and leave to training what shares no prompt with them."""
    counts = Counter(read)
    taken: set[bytes] = set()
    chosen: dict[Split, list[_Fit]] = {}
    splits: tuple[tuple[Split, int], ...] = (("test", sizes.test), ("exam", sizes.exam))
    for split, size in splits:
        own: Split = split if split in sources else "train"
        chosen[split] = panel = _panel(sources[own], fits[own], size, taken, split)
        taken |= {fit.key for fit in panel}
        if own == split:
            used = {fit.index for fit in panel}
            left = [fit.key for fit in fits[split] if fit.index not in used]
            unused = [key for key in left if key not in taken]
            counts.update(leaking=len(left) - len(unused), unused=len(unused))
            taken |= set(unused)  # rows passed as a test set are never trained on
    panels = {fit.index for split in chosen for fit in chosen[split] if split not in sources}
    rest = [fit for fit in fits["train"] if fit.key not in taken]
    counts.update(leaking=len(fits["train"]) - len(rest) - len(panels))
    counts.update(repeated=len(rest) - len({fit.key for fit in rest}))
    sides: dict[Split, Rows] = {"train": sources["train"].select(fit.index for fit in rest)}
    for split in ("exam", "test"):
        sides[split] = sources.get(split, sources["train"]).select(fit.index for fit in chosen[split])
    counts.update({split: len(rows) for split, rows in sides.items()})
    counts = Counter({name: counts[name] for name in _COUNTED})
    empty = [part.name for part in sides["train"].parts if not len(part)]
    if empty:
        raise _TooFewError(
            f"expected rows to train on in {empty[0]}, found none besides the exam ({sizes.exam}) and the test "
            f"({sizes.test}); {_told(counts)}; ask for fewer (eval_prompts, test_prompts), or give more rows"
        )
    return Curated(sides, dict(counts))


def _fewer(sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], asked: Sizes) -> Sizes | None:
    """Return sizes that may fit: all of a panel's own dataset, and half of the training rows."""
    own = {split: len({fit.key for fit in found}) for split, found in fits.items()}
    exam, test = min(asked.exam, own.get("exam", asked.exam)), min(asked.test, own.get("test", asked.test))
    rows = sources["train"]
    each = [len({fit.key for fit in fits["train"] if fit.part == number}) for number in range(len(rows.parts))]
    whole = sum(rows.weights)
    half = int(min(count * whole / weight for count, weight in zip(each, rows.weights))) // 2
    if "exam" not in sources and "test" not in sources:
        found = fewer(exam, test, half)
        return None if found is None else Sizes(*found)
    shrunk = Sizes(exam if "exam" in sources else min(exam, half), test if "test" in sources else min(test, half))
    return shrunk if _suffices(shrunk, asked) else None


def _less(sizes: Sizes, asked: Sizes) -> Sizes | None:
    """Return sizes that are a tenth smaller, or None if they would be too small."""
    smaller = Sizes(sizes.exam - -(-sizes.exam // 10), sizes.test - -(-sizes.test // 10))
    return smaller if _suffices(smaller, asked) else None


def _suffices(sizes: Sizes, asked: Sizes) -> bool:
    return sizes.exam >= min(asked.exam, LEAST) and sizes.test >= min(asked.test, LEAST)


def check_rows(rows: Rows, form: Form) -> None:
    """Raise EnvError for the first malformed row."""
    for index in range(len(rows)):
        try:
            form.read(rows[index])
        except RowFaultError as fault:
            raise EnvError(f"{rows.where(index)}: {fault}") from fault


def _usable(
    rows: Rows, form: Form, converse: Converse, ruler: Ruler, bad_rows: BadRows, counts: Counter[str]
) -> list[_Fit]:
    """Return the well-formed rows that fit, and count all others."""
    found, first = [], ""
    faults: Counter[str] = Counter()
    special = re.compile("|".join(map(re.escape, ruler.special_tokens())) or r"(?!)")
    for index in range(len(rows)):
        row = rows[index]
        try:
            sample = form.read(row)
        except RowFaultError as fault:
            faults[fault.kind] += 1
            first = first or f"{rows.where(index)}: {fault}"
            continue
        if any(special.search(text) for text in sample.texts()):
            counts["special_tokens"] += 1
            continue
        messages = [*converse(row, sample)]
        rank = _digest(json.dumps(messages).encode())
        key = rank
        if ruler.tokenizer is not None:
            ids = render_prompt(ruler.tokenizer, messages)
            if ruler.max_tokens is not None and len(ids) > ruler.max_tokens:
                counts["too_long"] += 1
                continue
            key = _digest(" ".join(map(str, ids)).encode())
        found.append(_Fit(index, rows.part_of(index), key, rank, sample.desirable))
    if faults and bad_rows == "raise":
        others = sum(faults.values()) - 1
        more = f"; {others} more of {len(rows)} rows are malformed ({_told(faults)})" if others else ""
        raise EnvError(f"{first}{more}; fix the file, or leave such rows out with bad_rows: drop")
    counts.update(faults)
    counts["read"] += len(rows)
    if not found:
        raise EnvError(f"expected usable rows in {rows.name}, found none; {_told(counts)}")
    return found


def _panel(rows: Rows, fits: Sequence[_Fit], size: int, taken: Iterable[bytes], split: Split) -> list[_Fit]:
    """Choose rows with distinct prompts, by rank; each part of a mixture gives its share."""
    known, panel = set(taken), list[_Fit]()
    for number, share in enumerate(apportion(rows.weights, size)):
        before = len(panel)
        able = (fit for fit in fits if fit.part == number and fit.examines)
        for fit in sorted(able, key=lambda fit: (fit.rank, fit.index)):
            if len(panel) - before == share:
                break
            if fit.key not in known:
                known.add(fit.key)
                panel.append(fit)
        if len(panel) - before < share:
            raise _TooFewError(
                f"expected {share} different prompts for the {split} in {rows.parts[number].name}, found "
                f"{len(panel) - before}; ask for fewer (eval_prompts, test_prompts), or give more rows"
            )
    return panel


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count) or "nothing read"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
