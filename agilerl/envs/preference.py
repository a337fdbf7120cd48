"""Pairs of answers, a better and a worse one: what preference optimisation learns from."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from agilerl.envs.core import Message, Row, Split, Task
from agilerl.envs.examples import DataGym, DataTask, Example, as_messages, render_completion
from agilerl.envs.sft import last_message
from agilerl.errors import EnvError
from agilerl.streams import stream

__all__ = ["Mistake", "PreferenceGym", "PreferenceTask"]

Mistake = Callable[[Row, np.random.Generator], str | None]
"""``mistake(row, draws)`` returns a plausible wrong answer to a row, or None where it knows none."""

BLOCK = 256
"""A wrong answer is taken from a row of the same block of training positions."""
TRIES, MOST_TRIES = 16, 256


class PreferenceTask(DataTask):
    """A task's questions with their right answer as ``chosen`` and a careless one as ``rejected``.

    A row that has a ``rejected`` column keeps it; else ``mistake`` makes one; else it is another row's answer. It never
    is the right answer, nor one that earns as much.
    """

    kind: ClassVar[Literal["sft", "preference"]] = "preference"

    def __init__(self, task: Task, *, mistake: Mistake | None = None, seed: int = 42) -> None:
        """Take a task; ``seed`` decides the careless answers."""
        super().__init__(task)
        self.mistake, self.seed = mistake, seed

    def row(self, split: Split, index: int) -> Row:
        """Return the task's row, in training with ``rejected``."""
        row = super().row(split, index)
        if split == "train" and row.get("rejected") is None:
            row = {**row, "rejected": self._rejected(row, index)}
        return row

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question with its right and with its careless answer."""
        prompt, answers = self.messages(row), (self.answer(row), str(row["rejected"]))
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

    A row has ``prompt`` (text, or messages), ``chosen`` and ``rejected`` (text, or one message of the assistant).
    Without ``prompt`` both are whole conversations that differ in their last message only.
    """

    def check_columns(self, row: Mapping[str, Any], split: str) -> None:
        """Raise EnvError unless there are chosen and rejected."""
        missing = [column for column in ("chosen", "rejected") if column not in row]
        if missing:
            raise EnvError(
                f"expected the columns prompt, chosen and rejected in the {split} dataset, found {sorted(row)}; rename "
                f"a column to {' and one to '.join(missing)}"
            )

    def examples(self, row: Mapping[str, Any]) -> list[Example]:
        """Return the prompt with its chosen and with its rejected completion."""
        if row.get("prompt") is not None:
            prompt = as_messages(row["prompt"], "user", "the column prompt")
            answers = [_answer(row[name], prompt, f"the column {name}") for name in ("chosen", "rejected")]
        else:
            prompt, answers = _implicit(row)
        limit = self.max_context_length
        return [render_completion(self.tokenizer, prompt, answer, limit) for answer in answers]


def _answer(value: Any, prompt: list[Message], where: str) -> str:
    """Return a completion; as a conversation it may repeat the prompt."""
    if not isinstance(value, str):
        messages = as_messages(value, "assistant", where)
        if len(messages) > 1 and messages[:-1] == prompt:
            value = messages[-1:]
    return last_message(value, where)


def _implicit(row: Mapping[str, Any]) -> tuple[list[Message], list[str]]:
    chosen, rejected = (row[name] for name in ("chosen", "rejected"))
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise EnvError("expected the column prompt beside texts in chosen and rejected, found none; add it")
    ends = [as_messages(value, "assistant", "chosen and rejected") for value in (chosen, rejected)]
    if len(ends[0]) < 2 or ends[0][:-1] != ends[1][:-1]:
        raise EnvError(
            "expected conversations that differ in their last message only in chosen and rejected, found others; give "
            "the column prompt"
        )
    return ends[0][:-1], [last_message(end[-1:], "the last message") for end in ends]
