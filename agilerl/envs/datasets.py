"""Custom datasets as single-turn tasks: rows used as they are, or split into training, exam and test."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from agilerl.checks.arguments import Count, Seed, Whole, checked, counted
from agilerl.envs.core import Message, Row, Split, TaskWithGraders, TrainingOrder, warn_of_fewer
from agilerl.envs.curation import (
    AnswerNeed,
    BadRows,
    Purpose,
    RowFaultError,
    RowForm,
    Sample,
    check_rows,
    curate,
    form_of,
)
from agilerl.envs.sources import Rows, read_dataset
from agilerl.errors import ConfigError, EnvError
from agilerl.rewards.combine import CombinedGrader, Graders, as_grader
from agilerl.rewards.grader import OF_A_BATCH, Columns, Grader, exact_match, grader_name

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLAIN = ({"role": "user", "content": "{question}"},)
"""The template with the question alone."""

Template = Sequence[Mapping[str, str]]


class DatasetTask(TaskWithGraders):
    """Rows of three datasets, one for each split, used as they are.

    A row has ``question`` and ``answer``, or ``prompt`` (a text or a conversation; with ``completion`` or ``answer``,
    if there is one), or ``messages``, or ``chosen`` and ``rejected``. All its columns reach the grader, with
    ``question`` (the text of the prompt) and ``answer`` added if they are missing. Training walks through the rows in a
    seeded order, a new one each epoch; exam and test keep their order. A question that is in several of the datasets
    stays in all of them; use ``CuratedTask`` to avoid that.
    """

    name = "dataset"

    @checked
    def __init__(
        self,
        train: Any,
        exam: Any,
        test: Any = (),
        *,
        reward_fn: Graders,
        conversation_template: Template | None = None,
        purpose: Purpose = "reasoning",
        seed: Seed = 42,
    ) -> None:
        """Check all rows and the template.

        Args:
            train: training rows, at least one: anything that ``read_dataset`` takes, or a mixture.
            exam: rows that measure fitness, at least one.
            test: rows for the final number; may be empty.
            reward_fn: ``(completion, answer, question) -> float`` or ``(prompts, completions, **columns) -> list``; a
                list of them, or of pairs ``(grader, weight)``, is a ``CombinedGrader``.
            conversation_template: messages with placeholders such as ``{question}``; by default the question alone, as
                the user. A final assistant message is a prefill. Not for rows that are conversations.
            purpose: which columns are read if rows have several forms: ``sft`` prefers ``completion`` to ``answer``,
                ``preference`` reads ``chosen`` and ``rejected``, ``unpaired`` ``completion`` and ``label``, or pairs.
            seed: decides the order of training.

        Raises:
            EnvError: an empty dataset, a missing column, a malformed row.
            ConfigError: a malformed template, or one without a placeholder for a column.
        """
        without_test = isinstance(test, list | tuple) and not test
        sides: dict[Split, Rows] = {
            "train": read_dataset(train, name="the train dataset"),
            "exam": read_dataset(exam, name="the exam dataset"),
            "test": Rows(()) if without_test else read_dataset(test, name="the test dataset"),
        }
        self._setup(sides, reward_fn, conversation_template, purpose, seed)
        for rows in sides.values():
            check_rows(rows, self._form)
        self._use(sides)

    def _setup(
        self, sides: Mapping[Split, Rows], graders: Graders, template: Template | None, purpose: Purpose, seed: int
    ) -> None:
        grader = as_grader(graders)
        self._grader, self.grader, self.seed = grader, grader_name(grader), seed
        self._form = _common_form(sides.values(), purpose, needs_answer(grader))
        self.labelled = self._form.labelled
        rows = sides["train"]
        self._template = check_template(template, rows[0])
        with suppress(RowFaultError):  # reported when all rows are read
            if template and not isinstance(self._form.read(rows[0]).prompt, str):
                raise ConfigError(f"{rows.name} holds conversations, used as they are; remove conversation_template")

    def _use(self, sides: Mapping[Split, Rows]) -> None:
        self._sides = sides
        self._order = TrainingOrder(sides["train"].sizes, sides["train"].weights, self.seed)
        # Each source of a mixture has its own epochs.
        self.train_size = len(sides["train"]) if len(sides["train"].parts) == 1 else None
        self.exam_prompts, self.test_prompts = len(sides["exam"]), len(sides["test"])

    def row(self, split: Split, index: int) -> Row:
        """Return a row with all its columns; training positions continue across epochs."""
        self.check_index(split, index)
        row: Row = self._sides[split][self._order(index) if split == "train" else index]
        sample = self._form.read(row)
        row.setdefault("question", sample.question)
        # A bad response is nothing to compare with.
        if row.get("answer") is None and sample.desirable:
            row["answer"] = sample.response
        return row

    def messages(self, row: Columns) -> list[Message]:
        """Return the row's conversation, or the template with the row's columns filled in."""
        return self._converse(row, self._form.read(row))

    def demonstration(self, row: Columns) -> str | None:
        """Return the row's response."""
        response = self._form.read(row).response
        return super().demonstration(row) if response is None else response

    def counterexample(self, row: Columns) -> str | None:
        """Return the row's worse response."""
        return self._form.read(row).rejected if self._form.pairs else super().counterexample(row)

    def _converse(self, row: Columns, sample: Sample) -> list[Message]:
        if not isinstance(sample.prompt, str):
            return sample.prompt
        return fill_template(self._template, {**row, "question": sample.prompt})


class CuratedTask(DatasetTask):
    """A dataset, or a mixture of several, split into training, exam and test without leakage.

    Rows that do not fit are left out, and everything is counted in ``counts``; see ``curation.curate``. Prompts are
    compared as conversations until ``fit``, which compares and measures them as the model's tokens. ``Population`` and
    ``ReasoningGym.from_task`` call ``fit``.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        *,
        exam: Any = None,
        test: Any = None,
        exam_prompts: Count = 128,
        test_prompts: Whole = 400,
        columns: Mapping[str, str] | None = None,
        grader: Graders = exact_match,
        conversation_template: Template | None = None,
        purpose: Purpose = "reasoning",
        bad_rows: BadRows = "raise",
        shrink_panels: bool = False,
        seed: Seed = 42,
    ) -> None:
        """Read and split the rows.

        Args:
            dataset: anything that ``read_dataset`` takes, or a mixture.
            exam: rows for the exam; None takes them from ``dataset``.
            test: rows for the test; None takes them from ``dataset``.
            exam_prompts: size of the exam, 1 or more.
            test_prompts: size of the test, 0 or more.
            columns: new column names, mapped to those in the datasets; as in ``read_dataset``.
            grader: as ``reward_fn`` of ``DatasetTask``; by default 1 for exactly the answer, else 0.
            conversation_template: as in ``DatasetTask``.
            purpose: as in ``DatasetTask``.
            bad_rows: ``raise``, or ``drop`` malformed rows.
            shrink_panels: if there are too few rows for the panels, make them smaller with a warning instead of raising
                EnvError; at least half of the training dataset's prompts are left for training.
            seed: decides the order of training, and nothing else.

        Raises:
            EnvError: a dataset that cannot be read or is too small, a missing column, a malformed row.
            ConfigError: a setting out of range, a malformed template.
        """
        datasets: dict[Split, Any] = {"train": dataset, "exam": exam, "test": test}
        sources = {
            split: read_dataset(source, columns=columns, name=f"the {split} dataset")
            for split, source in datasets.items()
            if source is not None or split == "train"
        }
        self._setup(sources, grader, conversation_template, purpose, seed)
        self.name = sources["train"].name
        self._asked = self._announced = (exam_prompts, test_prompts)
        self._curate = partial(
            curate, sources, self._form, self._asked, self._converse, bad_rows=bad_rows, shrink=shrink_panels
        )
        # Shows now what is wrong with the rows; the tokenizer comes later, and divides them again.
        self.fit(None, None)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Split the rows by the tokens that the model sees; leave out prompts of more than ``max_tokens`` tokens."""
        sides, self.counts = self._curate(tokenizer=tokenizer, max_tokens=max_tokens)
        self._use(sides)
        sizes = (self.exam_prompts, self.test_prompts)
        # fit() is called repeatedly, and warns of the same sizes once.
        if sizes != self._announced:
            self._announced = sizes
            rows = f"{counted(self.counts['read'], 'row')}, {self.counts['train']:,} of them for training"
            warn_of_fewer(self.name, self._asked, sizes, rows)


def fill_template(template: Template, row: Columns) -> list[Message]:
    """Return a template's messages with the row's columns filled in; other braces stay, as do those inside values."""

    def value(match: re.Match[str]) -> str:
        return str(row[match[1]]) if match[1] in row else match[0]

    return [{"role": m["role"], "content": PLACEHOLDER.sub(value, m["content"])} for m in template]


def check_template(template: Template | None, columns: Iterable[str]) -> Template:
    """Return a template, by default the question alone; raises ConfigError if no prompt would differ from another."""
    for message in template or PLAIN:
        if not {"role", "content"} <= set(message):
            raise ConfigError(f"conversation_template: expected role and content in each message, found {message!r}")
    used = {name for message in template or PLAIN for name in PLACEHOLDER.findall(message["content"])}
    if used.isdisjoint({"question", *columns} - {"answer"}):
        raise ConfigError(
            "conversation_template: expected {question} (or another column) in one of the messages, otherwise every "
            f"prompt is the same; found the placeholders {sorted(used)}"
        )
    return template or PLAIN


def needs_answer(grader: Grader) -> AnswerNeed:
    """Return whether a grader needs an ``answer``, and whether as text."""
    if isinstance(grader, CombinedGrader):
        # The strictest of all; Needs lists them from weak to strict.
        return max(map(needs_answer, grader.graders.values()), key=get_args(AnswerNeed).index)
    try:
        parameters = inspect.signature(grader).parameters.values()
    except (TypeError, ValueError):  # written in C; whether it works shows when it is called
        return "no"
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in required:
        if parameter.name == "answer":
            # The annotation is a text in modules with postponed annotations.
            return "text" if parameter.annotation in (str, "str") else "any"
    # Three arguments with other names are a completion, an answer and a question.
    return "any" if len(required) == 3 and OF_A_BATCH.isdisjoint(p.name for p in required) else "no"


def _common_form(sides: Iterable[Rows], purpose: Purpose, needs: AnswerNeed) -> RowForm:
    """Return the form of all rows; raises EnvError if datasets have different ones."""
    parts = [part for rows in sides for part in rows.parts]
    forms = [form_of(part.columns, purpose, part.name, needs=needs) for part in parts]
    for part, form in zip(parts, forms):
        if form != forms[0]:
            raise EnvError(
                f"expected datasets with the same form, found {forms[0]} in {parts[0].name} and {form} in {part.name}; "
                "rename columns so that they agree"
            )
    return replace(forms[0], grades_text=needs == "text", teaches=purpose != "reasoning")
