"""From the rows read to the rows used: the columns they have, what is wrong with them, and panels without leakage."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from agilerl.checks.arguments import counted, nearest, shown
from agilerl.envs.core import LEAST, Message, Split, apportion, fit_panels
from agilerl.envs.prompts import HALF, check_opened, render_prompt
from agilerl.envs.sources import Rows
from agilerl.errors import EnvError
from agilerl.rewards.grader import Columns
from agilerl.text.contract import contract_of
from agilerl.text.padding import has_template

# -- the columns of the prompt, the response and the rejected one, as text or messages --------------------------------


Purpose = Literal["reasoning", "sft", "preference", "unpaired"]
"""What rows are read for: prompts to answer and grade, demonstrations, pairs, or answers with a label (or pairs)."""

AnswerNeed = Literal["no", "any", "text"]
"""Whether every row must have a response: no; yes, of any type (for a grader); yes, as text."""

Fault = Literal["missing", "not_text", "empty", "alike"]
"""What can be wrong with a row: a value is missing or None, not text, or empty, or both answers of a pair are equal."""


class RowFaultError(EnvError):
    """A malformed row: it does not have the form of its dataset."""

    def __init__(self, kind: Fault, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class MissingColumnError(EnvError):
    """Rows of the dataset ``name`` lack a column that they need: one of ``wanted``, the usual one first."""

    def __init__(self, wanted: Sequence[str], columns: Sequence[str], name: str) -> None:
        self.column = wanted[0]
        guess = guess_columns(columns).get(self.column)
        hint = f"did you mean {guess!r}?" if guess else nearest(self.column, columns)
        hint = f" {hint}" if hint.startswith("did") else ""
        super().__init__(
            f"expected the column {' or '.join(wanted)} in {name}, found {', '.join(sorted(columns))};{hint} rename a "
            f"column with columns: {{{self.column}: {guess or '<its name>'}}}"
        )


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
class RowForm:
    """Which columns are read, the same for all rows of a dataset."""

    prompt: str | None
    """Column of the prompt; ``messages`` holds prompt and response; None: what ``chosen`` and ``rejected`` share."""
    response: str | None = None
    """Column of the response, text or one assistant message."""
    needs: AnswerNeed = "text"
    """Whether a row without a response is a fault."""
    pairs: bool = False
    """Whether ``chosen`` and ``rejected`` are read."""
    labelled: bool = False
    """Whether the column ``label`` says if the response is good (True, 1) or bad (False, 0)."""
    grades_text: bool = False
    """Whether the column ``answer``, if a row has one, must be text, because a grader expects text."""
    teaches: bool = False
    """Whether training learns the rows' answers."""
    learned: bool = False
    """Whether rows are only learned, never asked: then they may be whole texts, and conversations may call tools."""

    def __str__(self) -> str:
        columns = [self.prompt, *(("chosen", "rejected") if self.pairs else (self.response,))]
        columns += ["label"] if self.labelled else []
        return " and ".join(dict.fromkeys(column for column in columns if column is not None))

    def read(self, row: Columns) -> Sample:
        """Return a row's content; raises RowFaultError if it does not have this form."""
        if self.grades_text and not isinstance(answer := row.get("answer"), str | None):
            raise RowFaultError("not_text", f"expected text in the column answer, found {shown(answer)}")
        sample = self._read(row)
        if self.labelled:
            sample = replace(sample, desirable=label_of(row))
        # No tokenizer reads such a text, and the error would come in the middle of a run.
        if any(HALF.search(text) for text in sample.texts()):
            raise RowFaultError("not_text", "expected text, found half of a character in it (a lone surrogate)")
        return sample

    def _read(self, row: Columns) -> Sample:
        if self.prompt is None:
            prompt, chosen, rejected = _shared_prompt(row)
            return Sample(prompt, chosen, rejected if self.pairs else None)
        if self.prompt == "messages":
            # Calls of tools can only be learned; _conversation refuses them.
            return (self.learned and _calling(row)) or _conversation(row, self.needs == "text")
        if self.prompt == "text":
            if not isinstance(text := _value(row, "text"), str):
                raise RowFaultError("not_text", f"expected text in the column text, found {shown(text)}")
            return Sample("", text)
        prompt = _prompt(row, self.prompt)
        if self.pairs:
            chosen, rejected = (_answer(row, column, prompt) for column in ("chosen", "rejected"))
            _check_differing(chosen, rejected)
            return Sample(prompt, chosen, rejected)
        value = None if self.response is None else row.get(self.response)
        # _answer() refuses what is no text; other values stay in the row, for the grader.
        if self.response is not None and (self.needs == "text" or (self.needs == "any" and value is None)):
            return Sample(prompt, _answer(row, self.response, prompt))
        return Sample(prompt, value if isinstance(value, str) else None)


def form_of(
    columns: Sequence[str],
    purpose: Purpose,
    name: str,
    *,
    response: str | None = None,
    needs: AnswerNeed = "no",
    learned: bool = False,
) -> RowForm:
    """Return the form of rows with these columns, of the dataset ``name``.

    ``response`` is the response column of ``sft``: without a ``target``, its default, it is one of the usual ones;
    rows of ``sft`` that are only ``learned``, never asked, may be whole texts. ``needs`` says whether ``reasoning``
    needs an answer to grade with. Raises EnvError if a column is missing; the message names the nearest one.
    """
    if purpose == "unpaired" and "label" in columns:
        return replace(form_of(columns, "sft", name, response=response), labelled=True)
    paired = {"chosen", "rejected"} <= set(columns)
    if purpose == "unpaired" and not paired:
        raise MissingColumnError(["label"], columns, name)
    if purpose in ("preference", "unpaired"):
        if not paired:
            raise MissingColumnError(["rejected" if "chosen" in columns else "chosen"], columns, name)
        return RowForm(_first(("prompt", "question"), columns), "chosen", pairs=True)
    if response not in (None, "target", *columns) and "messages" not in columns:
        raise MissingColumnError([str(response)], columns, name)
    if purpose == "sft":
        prompts, needs = ["messages", "prompt", "question"], "text"
        responses = [*([response] if response else []), "completion", "answer", "chosen"]
    else:
        prompts, responses = ["question", "messages", "prompt"], ["answer", "completion", "chosen"]
    prompt, answer = _first(prompts, columns), _first(responses, columns)
    if prompt is None and paired:
        return RowForm(None, "chosen")
    if prompt is None and purpose == "sft" and "text" in columns and answer is None:
        if learned:
            return RowForm("text", "text", learned=True)
        raise EnvError(
            f"{name} has whole texts in the column text, which have no prompt that an exam could ask; train on them "
            "with SFTGym, whose test is their likelihood, or rename columns to prompt and completion"
        )
    if prompt is None:
        raise MissingColumnError(prompts if purpose == "sft" else ["question", "prompt", "messages"], columns, name)
    if prompt == "messages":
        return RowForm(prompt, prompt, "text" if needs == "text" else "no", learned=learned)
    if answer is None and needs != "no":
        raise MissingColumnError(responses, columns, name)
    return RowForm(prompt, answer, needs)


def _first(names: Iterable[str], columns: Container[str]) -> str | None:
    return next((name for name in names if name in columns), None)


_OFTEN = {
    "question": ("question", "prompt", "problem", "instruction", "query", "input", "text"),
    "answer": ("answer", "completion", "solution", "target", "output", "response", "label"),
}
"""What datasets often call a column, in any case."""
_SERVES = {"question": ("question", "messages", "prompt"), "answer": ("answer", "completion", "chosen", "messages")}
"""The columns of which one is enough."""


def guess_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return what to rename so that rows have a question and an answer, as far as other datasets' names tell."""
    lower, guesses = {column.lower(): column for column in columns}, dict[str, str]()
    for new, names in _OFTEN.items():
        if _first(_SERVES[new], columns) is None:
            # A last word, as in gold_answer, tells only if there is one such column.
            ending = [column for column in lower if re.split(r"\W|_", column)[-1] == new]
            guess = _first(names, lower) or (ending[0] if len(ending) == 1 else None)
            guesses |= {} if guess is None else {new: lower[guess]}
    return guesses


# -- the values of a row ----------------------------------------------------------------------------------------------


def as_messages(value: Any, role: str, where: str) -> list[Message]:
    """Return a column as messages; text becomes one message of ``role``. Raises RowFaultError for anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = value if isinstance(value, Sequence) else ()
    sound = (isinstance(m, Mapping) and "role" in m and isinstance(m.get("content"), str) for m in messages)
    if not messages or not all(sound):
        expected = "expected text or a list of {'role', 'content'} with texts"
        raise RowFaultError("not_text", f"{expected} in {where}, found {shown(value)}")
    for key in ("reasoning_content", "reasoning", "thinking"):
        if any(message.get(key) for message in messages):
            expected = f"expected all that the assistant says in the content of its messages, found {key} beside it"
            raise RowFaultError("not_text", f"{expected} in {where}; write it into the content: <think>...</think>")
    return [{"role": str(m["role"]), "content": m["content"]} for m in messages]


def _value(row: Columns, column: str) -> str | list[Message]:
    """Return a value that is a non-empty text or conversation."""
    value, expected = row.get(column), f"expected text in the column {column}, found"
    if value is None:
        raise RowFaultError("missing", f"{expected} {'None' if column in row else 'no such column'}")
    if isinstance(value, Sequence) and not (value.strip() if isinstance(value, str) else value):
        raise RowFaultError("empty", f"{expected} {shown(value)}")
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and any(isinstance(m, Mapping) and m.get("tool_calls") for m in value):
        raise RowFaultError("not_text", f"{expected} tool calls, which only SFTGym learns; tools are used in ToolEnv")
    messages = as_messages(value, "user", f"the column {column}")
    if not messages[-1]["content"].strip():
        raise RowFaultError("empty", f"expected text in the last message of the column {column}, found none")
    return messages


def _prompt(row: Columns, column: str) -> str | list[Message]:
    value: Any = row.get(column)
    if not isinstance(value, str | list) and hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
        return str(value)  # the row keeps the numbers, for the grader
    return _value(row, column)


def _answer(row: Columns, column: str, prompt: str | list[Message]) -> str:
    """Return a response; if it is a conversation, it may repeat the prompt."""
    value = _value(row, column)
    if not isinstance(value, str) and len(value) > 1 and value[:-1] == as_messages(prompt, "user", "the prompt"):
        value = value[-1:]
    messages = as_messages(value, "assistant", f"the column {column}")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        expected = f"expected text or one message of the assistant in the column {column}"
        raise RowFaultError("not_text", f"{expected}, found {shown(value)}")
    return messages[0]["content"]


def label_of(row: Columns) -> bool:
    """Return whether the response of a labelled row is a good one; raises RowFaultError for what is no label."""
    value = row.get("label")
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text not in ("true", "1", "false", "0"):
        kind: Fault = "missing" if value is None else "not_text"
        raise RowFaultError(kind, f"expected True or False (or 1 or 0) in the column label, found {shown(value)}")
    return text in ("true", "1")


def _conversation(row: Columns, answered: bool) -> Sample:
    """Split a whole conversation into the prompt and the assistant's last message."""
    if isinstance(messages := _value(row, "messages"), str):
        raise RowFaultError("not_text", f"expected messages in the column messages, found {shown(messages)}")
    *before, last = messages
    if last["role"] != "assistant" and not answered:
        return Sample(messages)
    if last["role"] != "assistant" or not before:
        expected = "expected a conversation that ends with the assistant's answer to a message"
        raise RowFaultError("missing", f"{expected}, found {shown(messages)}")
    return Sample(before, last["content"])


def _calling(row: Columns) -> Sample | None:
    """Return a conversation with calls of tools, as chat templates read them; None for one of text alone."""
    value, tools = row.get("messages"), row.get("tools")
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        return None
    if not tools and not any(message.get("tool_calls") for message in value):
        return None
    where = "the columns messages and tools"
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools or []
        messages = [_drop_none({"content": "", **message}) for message in value]
        # Again: a content of None, common beside calls, has just been removed, and templates want text.
        messages = [{"content": "", **message} if message.get("tool_calls") else message for message in messages]
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            function = call.get("function", call)
            if isinstance(function["arguments"], str):  # as the APIs write them, while templates expect an object
                function["arguments"] = json.loads(function["arguments"])
        plain = as_messages(messages, "user", where)
        if HALF.search(json.dumps([messages, tools], ensure_ascii=False)) or not isinstance(tools, list):
            raise ValueError("expected text and a list of tools")
    except (EnvError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        expected = f"expected messages with calls of tools in {where}"
        raise RowFaultError("not_text", f"{expected}, found {error} in {shown(value)}") from error
    if len(plain) < 2 or plain[-1]["role"] != "assistant":
        raise RowFaultError("missing", f"expected a conversation that ends with the assistant in {where}")
    calls = messages[-1].get("tool_calls", [])
    return Sample(messages[:-1], plain[-1]["content"], calls=calls, tools=[_drop_none(tool) for tool in tools])


def _drop_none(value: Any) -> Any:
    """Return plain data without entries that are None, with which tables fill up what a row lacks."""
    if isinstance(value, Mapping):
        return {key: _drop_none(inner) for key, inner in value.items() if inner is not None}
    return [_drop_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def _shared_prompt(row: Columns) -> tuple[str | list[Message], str, str]:
    """Return the shared prompt of chosen and rejected, and their answers."""
    chosen, rejected = (_value(row, column) for column in ("chosen", "rejected"))
    _check_differing(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_text(chosen, rejected)
    *before, last = as_messages(chosen, "assistant", "chosen")
    *others, worse = as_messages(rejected, "assistant", "rejected")
    if not before or before != others or not last["role"] == worse["role"] == "assistant":
        expected = "conversations in chosen and rejected that differ only in the assistant's last message"
        raise RowFaultError("missing", f"expected {expected}, or a column prompt; add it")
    return before, last["content"], worse["content"]


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts after the last whole word that they share; no character is lost."""
    # Up to the last whole word: the halves of one are other tokens. The blank goes to the answers, as in most tokens.
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    prompt = "".join(f"{chosen[:shared]}x".rsplit(None, 1)[:-1])
    if not prompt:
        expected = "texts in chosen and rejected that begin alike"
        raise RowFaultError("missing", f"expected {expected}, or a column prompt; add it")
    better, worse = chosen[len(prompt) :], rejected[len(prompt) :]
    if not better.strip() or not worse.strip():
        raise RowFaultError("empty", f"expected an answer after the shared beginning of {shown(chosen)}, found none")
    return prompt, better, worse


def _check_differing(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise RowFaultError("alike", f"expected chosen and rejected to differ, found {shown(chosen)} twice")


# -- rows checked, measured and split without leakage; all of them counted --------------------------------------------


BadRows = Literal["raise", "drop"]
"""What to do about rows that do not have the form of their dataset."""

_COUNTED = (
    *("read", "train", "exam", "test"),
    *("missing", "not_text", "empty", "alike", "special_tokens", "too_long", "leaking", "unused", "repeated"),
)

Converse = Callable[[Columns, Sample], Sequence[Message]]
"""From a row and its parsed sample to the conversation shown to the model."""


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


def curate(
    sources: Mapping[Split, Rows],
    form: RowForm,
    sizes: tuple[int, int],
    converse: Converse,
    *,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    bad_rows: BadRows = "raise",
    shrink: bool = False,
) -> tuple[dict[Split, Rows], dict[str, int]]:
    """Check all rows, leave out what cannot be used, and fill the panels: exam and test, of these ``sizes``.

    A panel takes its rows from its own dataset if ``sources`` has one, else from the training rows. Which rows it takes
    depends only on their text, not on their order or a seed: it takes the conversations with the smallest digests, the
    test before the exam, so that other sizes or seeds give nearly the same panels. A panel holds each prompt once.
    Training rows (and rows of the exam's own dataset) whose rendered prompt is in a panel are left out. In a mixture,
    every dataset gives each panel its share by weight.

    ``converse`` turns a row into the conversation shown to the model. Prompts are compared and measured as the
    ``tokenizer``'s tokens; without one they are compared as conversations, and have no length. Rows with a longer
    prompt than ``max_tokens``, or a special token of the tokenizer in a text, which would be read e.g. as the end of a
    message, are left out; malformed rows too, if ``bad_rows`` is ``drop``. ``shrink`` makes panels smaller if there are
    too few prompts, so that training keeps half of its rows.

    Returns:
        The rows of ``train``, ``exam`` and ``test``, no two of which share a rendered prompt, and the number of rows:
        ``read`` = ``train`` + ``exam`` + ``test`` + ``missing`` + ``not_text`` + ``empty`` + ``alike`` (rows that do
        not have the form of their dataset) + ``special_tokens`` + ``too_long`` + ``leaking`` (the same prompt is in a
        panel) + ``unused`` (from a panel's own dataset, which needs fewer). ``repeated``: training rows that share a
        prompt with another one; they stay.

    Raises:
        EnvError: malformed rows, too few prompts for a panel, or none left to train on.
    """
    counts: Counter[str] = Counter()
    fits = {}
    for split, rows in sources.items():
        fits[split], counted = _select_usable(rows, form, converse, tokenizer, max_tokens, bad_rows)
        counts += counted
    try:
        return _divide(sources, fits, sizes, counts)
    except EnvError:
        for smaller in _shrink(sources, fits, sizes) if shrink else ():
            with suppress(EnvError):  # of splits that share prompts, or shares that were rounded up
                return _divide(sources, fits, smaller, counts)
        raise


def _divide(
    sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], sizes: tuple[int, int], read: Counter[str]
) -> tuple[dict[Split, Rows], dict[str, int]]:
    """Fill the panels from the usable rows, and leave to training what shares no prompt with them."""
    counts = Counter(read)
    taken: set[bytes] = set()
    sides: dict[Split, Rows] = {}
    of_training: set[int] = set()
    # The test first, so that an exam of another size leaves it as it is.
    exam, test = sizes
    panels: tuple[tuple[Split, int], ...] = (("test", test), ("exam", exam))
    for split, size in panels:
        source: Split = split if split in sources else "train"
        panel = _panel(sources[source], fits[source], size, taken, split)
        indices = {fit.index for fit in panel}
        sides[split] = sources[source].select(indices)
        taken |= {fit.key for fit in panel}
        if source == "train":
            of_training |= indices
        else:
            left = [fit.key for fit in fits[split] if fit.index not in indices]
            unused = [key for key in left if key not in taken]
            counts.update(leaking=len(left) - len(unused), unused=len(unused))
            taken |= set(unused)  # rows passed as a test set are never trained on, nor are those of an exam
    rest = [fit for fit in fits["train"] if fit.key not in taken]
    sides["train"] = sources["train"].select(fit.index for fit in rest)
    # The training rows that are neither left nor in a panel share a prompt with one.
    counts.update(leaking=len(fits["train"]) - len(rest) - len(of_training))
    counts.update(repeated=len(rest) - len({fit.key for fit in rest}))
    counts.update({split: len(rows) for split, rows in sides.items()})
    counted = {name: counts[name] for name in _COUNTED}
    # Every source of a mixture needs rows of its own, as every block of training has its share.
    empty = [part.name for part in sides["train"].parts if not len(part)]
    if empty:
        raise EnvError(
            f"expected rows to train on in {empty[0]}, found none besides the exam ({exam}) and the test "
            f"({test}); {_list_counts(counted)}; ask for fewer (eval_prompts, test_prompts), or give more rows"
        )
    return sides, counted


def _shrink(
    sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], asked: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield sizes that may fit: all of a panel's own dataset, and half of the training rows; then a tenth less each."""
    distinct = {split: len({fit.key for fit in usable}) for split, usable in fits.items()}
    exam, test = min(asked[0], distinct.get("exam", asked[0])), min(asked[1], distinct.get("test", asked[1]))
    rows = sources["train"]
    each = [len({fit.key for fit in fits["train"] if fit.part == number}) for number in range(len(rows.parts))]
    # A panel of n takes n * weight / total from each part, at most half of its prompts.
    half = int(min(count * sum(rows.weights) / weight for count, weight in zip(each, rows.weights))) // 2
    if "exam" not in sources and "test" not in sources:
        exam, test = fit_panels(exam, test, half) or (0, 0)  # (0, 0) ends the loop below
    else:
        exam = exam if "exam" in sources else min(exam, half)
        test = test if "test" in sources else min(test, half)
    while exam >= min(asked[0], LEAST) and test >= min(asked[1], LEAST):
        yield exam, test
        # A tenth, rounded up, so that small panels shrink as well.
        exam, test = exam - -(-exam // 10), test - -(-test // 10)


_FEW, _SMALL_SHARE = 32, 0.1
"""Fewer distinct prompts than this, or a smaller share of the rows, are little to train on."""


def few_rows(counts: Mapping[str, int]) -> str | None:
    """Return a sentence if rows, counted as by :func:`curate`, leave little to train on."""
    distinct = counts["train"] - counts.get("repeated", 0)
    least = max(_FEW, round(_SMALL_SHARE * counts["read"]))
    if distinct >= least:
        return None
    lower = ", or lower eval_prompts and test_prompts" * (counts["exam"] + counts["test"] > distinct)
    return (
        f"{counted(counts['read'], 'row')} leave only {counted(distinct, 'distinct prompt')} for training, besides "
        f"{counts['exam']} for the exam and {counts['test']} for the test; give at least "
        f"{counted(least - distinct, 'more row')}{lower}"
    )


def check_rows(rows: Rows, form: RowForm) -> None:
    """Raise EnvError for the first malformed row."""
    for index, row in enumerate(rows):
        try:
            form.read(row)
        except RowFaultError as fault:
            raise EnvError(f"{rows.where(index)}: {fault}") from fault


def _select_usable(
    rows: Rows, form: RowForm, converse: Converse, tokenizer: Any, max_tokens: int | None, bad_rows: BadRows
) -> tuple[list[_Fit], Counter[str]]:
    """Return the well-formed rows that fit, and the counts of all others."""
    # An added token may be special without being one of all_special_tokens, which have a role.
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*getattr(tokenizer, "all_special_tokens", ()), *(token.content for token in added if token.special)}
    special |= set() if tokenizer is None else set(contract_of(tokenizer).end_texts)
    # (?!) matches nothing, while an empty pattern matches everywhere.
    pattern = re.compile("|".join(map(re.escape, special)) or r"(?!)")
    fits, faults, counts = [], Counter[str](), Counter[str]()
    firsts: dict[str, str] = {}
    """What is wrong with the first row that is left out for each reason."""
    for index, row in enumerate(rows):
        try:
            sample = form.read(row)
        except RowFaultError as fault:
            faults[fault.kind] += 1
            firsts.setdefault("malformed", f"{rows.where(index)}: {fault}")
            continue
        if token := next(filter(None, map(pattern.search, sample.texts())), None):
            counts["special_tokens"] += 1
            why = f"{rows.where(index)} has the special token {token[0]!r} in {shown(token.string)}; remove it"
            cure = ", as the chat template adds such tokens itself" if has_template(tokenizer) else ""
            firsts.setdefault("special", why + cure)
            continue
        messages = [*converse(row, sample)]
        key = rank = _digest(json.dumps(messages))  # never the order or a seed: other runs get the same panels
        if tokenizer is not None:
            # Answers that are learned are refused here, and not in the middle of a run.
            if form.teaches and messages[-1]["role"] != "assistant":
                check_opened(tokenizer, sample.response, sample.rejected, where=rows.where(index))
            ids = render_prompt(tokenizer, messages)
            if max_tokens is not None and len(ids) > max_tokens:
                counts["too_long"] += 1
                why = (
                    f"{rows.where(index)} has a prompt of {len(ids)} tokens, and {max_tokens} fit; raise max_model_len"
                )
                firsts.setdefault("too long", why)
                continue
            # By tokens, which is what a model sees: different texts may become the same prompt.
            key = _digest(" ".join(map(str, ids)))
        fits.append(_Fit(index, rows.part_of(index), key, rank, sample.desirable))
    if faults and bad_rows == "raise":
        others = sum(faults.values()) - 1
        more = f"; {others} more of {len(rows)} rows are malformed ({_list_counts(faults)})" if others else ""
        raise EnvError(f"{firsts['malformed']}{more}; fix the file, or leave such rows out with bad_rows: drop")
    counts += faults
    counts["read"] = len(rows)
    if not fits:
        raise EnvError(
            "; ".join([f"expected usable rows in {rows.name}, found none: {_list_counts(counts)}", *firsts.values()])
        )
    return fits, counts


def _panel(rows: Rows, fits: Sequence[_Fit], size: int, taken: Iterable[bytes], split: Split) -> list[_Fit]:
    """Choose rows with distinct prompts, by rank; each part of a mixture gives its share."""
    order = attrgetter("rank", "index")
    keys, panel = set(taken), list[_Fit]()
    for number, share in enumerate(apportion(rows.weights, size)):
        able = [fit for fit in fits if fit.part == number and fit.examines and fit.key not in keys]
        distinct = {fit.key: fit for fit in sorted(able, key=order, reverse=True)}  # the first of equal prompts stays
        if len(distinct) < share:
            raise EnvError(
                f"expected {share} different prompts for the {split} in {rows.parts[number].name}, found "
                f"{len(distinct)}; ask for fewer (eval_prompts, test_prompts), or give more rows"
            )
        chosen = sorted(distinct.values(), key=order)[:share]
        keys |= {fit.key for fit in chosen}
        panel += chosen
    return panel


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count) or "nothing read"


def _digest(text: str) -> bytes:
    # 128 bits: no two prompts ever share a digest by chance.
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
