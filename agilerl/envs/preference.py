"""Pairs of answers, a better and a worse one: what preference optimisation learns from."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from agilerl.arguments import Seed, checked
from agilerl.envs.core import AnyTask, Row, Split
from agilerl.envs.examples import DataGym, DataTask, Example, render_completion
from agilerl.envs.forms import Form, Sample, as_messages, form_of
from agilerl.envs.sources import Rows
from agilerl.errors import EnvError
from agilerl.streams import stream

Mistake = Callable[[Row, np.random.Generator], str | None]
"""``mistake(row, draws)`` returns a plausible wrong answer to a row, or None."""

BLOCK = 256
"""Wrong answers come from rows in the same block of this many training positions."""
TRIES, MOST_TRIES = 16, 256


class PreferenceTask(DataTask):
    """A task's questions with the right answer as ``chosen`` and a wrong one as ``rejected``.

    A row that has a ``rejected`` column keeps it; else ``mistake`` makes one; else it is another row's answer. It is
    never the right answer, nor one that earns as much.
    """

    kind: ClassVar[Literal["sft", "preference"]] = "preference"

    @checked
    def __init__(self, task: AnyTask, *, mistake: Mistake | None = None, seed: Seed = 42) -> None:
        """Take a task; ``seed`` decides the wrong answers."""
        super().__init__(task)
        self.mistake, self.seed = mistake, seed

    def row(self, split: Split, index: int) -> Row:
        """Return the task's row; in training it has ``rejected``."""
        row = super().row(split, index)
        if split == "train" and self.task.counterexample(row) is None:
            row = {**row, "rejected": self._rejected(row, index)}
        return row

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question with its right and with its wrong answer."""
        prompt, answers = self.messages(row), (self.answer(row), str(self.task.counterexample(row)))
        return [render_completion(tokenizer, prompt, answer, max_tokens) for answer in answers]

    def _rejected(self, row: Row, index: int) -> str:
        right = self.answer(row)
        best = self.reward(right, row)
        for candidate in self._candidates(row, index):
            if candidate is None or candidate.strip() == right.strip():
                continue
            score = self.reward(candidate, row)
            if score is None or best is None or score < best:
                return candidate
        raise EnvError(
            f"found no wrong answer to {str(row.get('question'))[:80]!r} among the answers of {MOST_TRIES} other "
            f"training rows of {self.name}; preferences need answers that differ"
        )

    def _candidates(self, row: Row, index: int) -> Iterator[str | None]:
        draws = stream(self.seed, "preference/mistake", index)
        for _ in range(TRIES if self.mistake is not None else 0):
            yield self.mistake(row, draws)  # type: ignore[misc]
        first = index // BLOCK * BLOCK
        for place in stream(self.seed, "preference/other", index).integers(BLOCK, size=MOST_TRIES):
            answer = self.task.row("train", first + int(place)).get("answer")
            yield None if answer is None else str(answer)


class PreferenceGym(DataGym):
    """Batches of pairs for ``agent.learn(env.reset())``: two rows each, the chosen completion first.

    A row has ``prompt`` (text, or messages), ``chosen`` and ``rejected`` (text, or one assistant message).
    Without ``prompt``, ``chosen`` and ``rejected`` are whole: conversations that differ only in their last message, or
    texts, which are split after the last whole word that they share.
    """

    def form(self, rows: Rows) -> Form:
        """Return which columns are read."""
        return form_of(rows.columns, "preference", rows.name)

    def examples(self, sample: Sample) -> list[Example]:
        """Return the prompt with its chosen and with its rejected completion."""
        prompt, limit = as_messages(sample.prompt, "user", "the prompt"), self.max_context_length
        answers = (str(sample.response), str(sample.rejected))
        return [render_completion(self.tokenizer, prompt, answer, limit) for answer in answers]
