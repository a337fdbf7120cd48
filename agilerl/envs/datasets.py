"""A dataset of questions and answers as a single-turn task."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.envs.core import Message, Row, Split, Task
from agilerl.errors import ConfigError, EnvError
from agilerl.rewards.grader import Grader, call_grader, grader_name
from agilerl.streams import stream

__all__ = ["DatasetTask", "fill_template"]

PLACEHOLDER = re.compile(r"\{(\w+)\}")


class DatasetTask(Task):
    """Rows of a Hugging Face ``Dataset``, or of any sequence of dicts, with ``question`` and ``answer``.

    Training walks through the rows in a seeded order, a new one each epoch; exam and test are taken in their own
    order. The rows are used as they are: a question that is in several of the datasets stays in all of them.
    """

    name = "dataset"

    def __init__(
        self,
        train: Any,
        exam: Any,
        test: Any = (),
        *,
        reward_fn: Grader,
        conversation_template: Sequence[Mapping[str, str]] | None = None,
        seed: int = 42,
    ) -> None:
        """Check the datasets and the template.

        Args:
            train: training rows, at least one.
            exam: rows that fitness is measured on, at least one.
            test: rows for the final number; may be empty.
            reward_fn: ``(completion, answer, question) -> float`` or ``(prompts, completions, **columns) -> list``.
            conversation_template: messages with placeholders such as ``{question}``; by default the question alone, as
                the user. A last message of the assistant is a prefill.
            seed: decides the order of training.

        Raises:
            EnvError: an empty dataset, or one without ``question`` and ``answer``.
            ConfigError: a malformed template, or one without a placeholder of a column.
        """
        self._splits: dict[str, Any] = {"train": train, "exam": exam, "test": test}
        for split, rows in self._splits.items():
            if len(rows) or split != "test":
                _check_rows(split, rows)
        self._template = _check_template(conversation_template or [{"role": "user", "content": "{question}"}], train[0])
        if not callable(reward_fn):
            raise ConfigError(f"expected a function as reward_fn, found {reward_fn!r}")
        self._grader, self.seed = reward_fn, seed
        self.grader = grader_name(reward_fn)
        self.train_size, self.exam_prompts, self.test_prompts = len(train), len(exam), len(test)
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def row(self, split: Split, index: int) -> Row:
        """Return a row; training positions run on over the epochs."""
        self.check_index(split, index)
        rows = self._splits[split]
        if split == "train":
            epoch, place = divmod(index, len(rows))
            index = self._epoch_order(epoch)[place]
        row = dict(rows[index])
        missing = [column for column in ("question", "answer") if row.get(column) is None]
        if missing:
            raise EnvError(f"row {index} of the {split} dataset has no {' and no '.join(missing)}; found {sorted(row)}")
        return row

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the template with the row's columns filled in."""
        return [{"role": m["role"], "content": fill_template(m["content"], row)} for m in self._template]

    def reward(self, completion: str, row: Mapping[str, Any]) -> float | None:
        """Return what the reward function says."""
        return self.rewards([completion], [row])[0]

    def rewards(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Call the reward function for all completions; its first failure is raised, as a RewardError."""
        return call_grader(self._grader, completions, rows)

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if self._order[0] != epoch:
            count = len(self._splits["train"])
            self._order = (epoch, stream(self.seed, "dataset/order", epoch).permutation(count).tolist())
        return self._order[1]


def fill_template(text: str, row: Mapping[str, Any]) -> str:
    """Replace ``{column}`` by the row's value; braces that name no column stay, and so do braces inside values."""
    return PLACEHOLDER.sub(lambda found: str(row[found[1]]) if found[1] in row else found[0], text)


def _check_rows(split: str, rows: Any) -> None:
    if len(rows) == 0:
        raise EnvError(f"expected at least one row in the {split} dataset, found none")
    if not isinstance(rows[0], Mapping):
        raise EnvError(f"expected dicts as rows of the {split} dataset, found {type(rows[0]).__name__}")
    missing = [column for column in ("question", "answer") if column not in rows[0]]
    if missing:
        raise EnvError(
            f"expected the columns question and answer in the {split} dataset, found {sorted(rows[0])}; rename a "
            f"column to {' and one to '.join(missing)}"
        )


def _check_template(template: Sequence[Mapping[str, str]], row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    for message in template:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ConfigError(f"a conversation template is a list of {{'role', 'content'}}, found {message!r} in it")
    used = {name for message in template for name in PLACEHOLDER.findall(message["content"])}
    if used.isdisjoint(set(row) - {"answer"}):
        raise ConfigError(
            "expected {question} (or another column) somewhere in the conversation template, otherwise every prompt is "
            f"the same; found the placeholders {sorted(used)} and the columns {sorted(row)}"
        )
    return template
