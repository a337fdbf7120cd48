"""The environments that AgileRL documents for single turns: batches of prompts, of demonstrations or of pairs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from agilerl.checks.arguments import Accelerator, Count, Name, Seed, Tokenizer, Whole, checked, taken
from agilerl.data import RolloutBatch, collate
from agilerl.envs.core import Row, Split, Task, TaskArgument, TrainingOrder, prompt_columns, score_completions
from agilerl.envs.curation import RowForm, as_messages, check_rows, form_of
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import (
    DataKind,
    DataTask,
    Example,
    LossOn,
    PreferenceTask,
    UnpairedTask,
    demonstration,
    trajectories,
)
from agilerl.envs.prompts import check_tokenizer, decode_completions, render_prompt
from agilerl.envs.sources import Rows, read_dataset
from agilerl.errors import ConfigError, EnvError
from agilerl.rewards.combine import Graders
from agilerl.text.padding import decoded, padded

Batch = TypeVar("Batch")
Prompt = dict[str, Any]
"""``input_ids`` and ``attention_mask`` [1, P] int64, ``text``, ``question``, ``answer``, and ``row`` (all columns)."""


class Gym(ABC, Generic[Batch]):
    """Batches of one split at a time; a subclass defines what a batch holds.

    The order depends only on the seed and the number of batches drawn. Inside ``eval_mode()`` the rows are those of the
    test dataset (a task's exam), always from its first, so that every agent takes the same exam.
    """

    _panel: ClassVar[Split]
    """The split of ``eval_mode()``."""

    def _begin(
        self, tokenizer: Any, batch_size: int, accelerator: Accelerator | None, max_context_length: int | None
    ) -> None:
        tokenizer = padded(tokenizer)
        check_tokenizer(tokenizer)
        self.tokenizer, self.max_context_length = tokenizer, max_context_length
        self.data_batch_size_per_gpu, self.accelerator = batch_size, accelerator
        self._rank = 0 if accelerator is None else int(accelerator.process_index)
        self._world = 1 if accelerator is None else int(accelerator.num_processes)
        self._split: Split = "train"
        self._drawn: dict[Split, int] = {"train": 0, self._panel: 0}

    @abstractmethod
    def _size(self, split: Split) -> int:
        """Return the number of rows of a split; 0 for an endless stream."""

    @abstractmethod
    def _next(self) -> Batch:
        """Draw the next batch."""

    def __len__(self) -> int:
        """Return the number of rows of the current split; 0 for an endless stream."""
        return self._size(self._split)

    @property
    def num_epochs(self) -> int:
        """Training epochs completed by the batches drawn so far; always 0 for an endless stream."""
        size = self._size("train")
        return self._drawn["train"] * self.data_batch_size_per_gpu * self._world // size if size else 0

    @checked
    def reset(self, reset_dataloaders: bool = False) -> Batch:
        """Draw the next batch; with ``reset_dataloaders`` start the split again."""
        if reset_dataloaders:
            self._drawn[self._split] = 0
        return self._next()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Use the test dataset (a task's exam) inside; afterwards training continues where it was."""
        kept, self._split = self._split, self._panel
        self._drawn[self._panel] = 0
        try:
            yield
        finally:
            self._split = kept

    def state(self) -> dict[str, int]:
        """Return what ``from_state`` needs to continue from here: the number of training batches drawn."""
        return {"batches": self._drawn["train"]}

    def _positions(self) -> Sequence[int]:
        """Return the positions of this process's share of the next batch in the current split."""
        share, drawn = self.data_batch_size_per_gpu, self._drawn[self._split]
        whole, size = share * self._world, len(self)
        self._drawn[self._split] += 1
        if self._split == "train":
            first = drawn * whole + self._rank * share
            return range(first, first + share)
        # A panel's last batch may be short, because no row counts twice in one pass.
        # After its last batch a panel begins again.
        first = drawn % -(-size // whole) * whole
        # In turns, so that the processes share a short batch evenly.
        return range(first, min(first + whole, size))[self._rank :: self._world]


def _saved_batches(state: Mapping[str, Any]) -> int:
    """Return the number of batches in an environment's ``state()``; raises ConfigError if it is missing."""
    if "batches" not in state:
        raise ConfigError(f"from_state(state=...): expected what state() returned, with batches, found {dict(state)!r}")
    return cast(int, taken(Whole, state["batches"], "from_state", "batches"))


class ReasoningGym(Gym[list[Prompt]]):
    """Batches of prompts out, completions in, rewards back."""

    _panel = "exam"

    @checked
    def __init__(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Tokenizer,
        reward_fn: Graders,
        conversation_template: Sequence[Mapping[str, str]] | None,
        *,
        data_batch_size_per_gpu: Count = 8,
        accelerator: Accelerator | None = None,
        return_raw_completions: bool = False,
        max_context_length: Count | None = None,
        seed: Seed = 42,
    ) -> None:
        """Make an environment of two datasets.

        Args:
            train_dataset: anything that ``read_dataset`` takes (a Hugging Face ``Dataset``, a sequence of dicts, a
                file, a hub name), or a mixture; in any of the forms of ``DatasetTask``.
            test_dataset: the same; what ``eval_mode()`` uses.
            tokenizer: Hugging Face tokenizer; without a pad token its end token pads.
            reward_fn: ``(completion, answer, question) -> float``; None means no grade, NaN in the rewards.
            conversation_template: list of ``{"role", "content"}`` with ``{question}`` (and ``{answer}``, or any
                column); a final assistant message is a prefill, which is not part of the completion. None is the prompt
                alone, and is required for rows that are conversations.
            data_batch_size_per_gpu: prompts per batch of this process, 1 or more.
            accelerator: ``accelerate.Accelerator``; each process gets its share of every batch.
            return_raw_completions: accepted for compatibility; prompts always carry their text.
            max_context_length: most tokens of a prompt.
            seed: decides the order of training prompts.

        Raises:
            EnvError: a dataset that is empty or lacks a column, or a malformed row.
            ConfigError: a malformed template, a tokenizer without pad and end token, a batch size below 1.
        """
        task = DatasetTask(
            train_dataset, test_dataset, reward_fn=reward_fn, conversation_template=conversation_template, seed=seed
        )
        self.return_raw_completions = return_raw_completions
        self._setup(task, tokenizer, data_batch_size_per_gpu, accelerator, max_context_length)

    @classmethod
    @checked
    def from_task(
        cls,
        task: TaskArgument,
        tokenizer: Tokenizer,
        data_batch_size_per_gpu: Count = 8,
        *,
        accelerator: Accelerator | None = None,
        max_context_length: Count | None = None,
    ) -> Self:
        """Make an environment from any task; a dataset task leaves out what exceeds ``max_context_length`` tokens."""
        task.fit(tokenizer, max_context_length)
        # Without __init__, which makes a task of two datasets.
        env = cls.__new__(cls)
        env.return_raw_completions = False
        env._setup(task, tokenizer, data_batch_size_per_gpu, accelerator, max_context_length)
        return env

    def _setup(self, task: Task, tokenizer: Any, batch_size: int, accelerator: Any, max_tokens: int | None) -> None:
        self._begin(tokenizer, batch_size, accelerator, max_tokens)
        self.task = task
        # One for each split: an exam between reset() and step() leaves training's prompts as they are.
        self._prompts: dict[Split, list[Prompt]] = {"train": [], "exam": []}

    def _size(self, split: Split) -> int:
        return (self.task.train_size or 0) if split == "train" else self.task.exam_prompts

    @checked
    def step(self, completion_ids: Sequence[Tensor]) -> tuple[list[Prompt], Tensor]:
        """Score the completions of the current prompts and draw the next batch.

        Args:
            completion_ids: for each of the B prompts a [G, P + L] tensor of ids that begins with the prompt; a
                completion ends at its first end token or before trailing padding.

        Returns:
            The next prompts, and float32 rewards [B, G] on the CPU, NaN if a completion has no grade.

        Raises:
            EnvError: called before ``reset``, or ids that do not fit the prompts.
            RewardError: the reward function failed.
        """
        prompts = self._prompts[self._split]
        self._check_completions(prompts, completion_ids)
        texts: list[str] = []
        rows: list[Row] = []
        for prompt, ids in zip(prompts, completion_ids):
            start = prompt["input_ids"].shape[1]
            texts += decode_completions(self.tokenizer, ids[:, start:].tolist())
            columns = prompt_columns(self.task.messages(prompt["row"]), self.tokenizer)
            rows += [{**prompt["row"], **columns}] * ids.shape[0]
        scores = score_completions(self.task, rows, texts)
        rewards = torch.tensor([float("nan") if score is None else score for score in scores], dtype=torch.float32)
        return self._next(), rewards.reshape(len(completion_ids), -1)

    @checked
    def from_state(self, state: Mapping[str, int]) -> list[Prompt]:
        """Return to a saved position, and return its current prompts."""
        self._split, self._drawn["train"] = "train", _saved_batches(state)
        if not self._drawn["train"]:
            return []
        # The number counts the current batch, which is drawn once more.
        self._drawn["train"] -= 1
        return self._next()

    def _next(self) -> list[Prompt]:
        split = self._split
        self._prompts[split] = [self._prompt(self.task.row(split, position)) for position in self._positions()]
        return self._prompts[split]

    def _prompt(self, row: Row) -> Prompt:
        ids = render_prompt(self.tokenizer, self.task.messages(row), self.max_context_length)
        input_ids = torch.tensor([ids], dtype=torch.int64)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "text": decoded(self.tokenizer, ids),
            "question": row["question"],
            "answer": row["answer"],
            "row": row,
        }

    def _check_completions(self, prompts: Sequence[Prompt], completion_ids: Sequence[Tensor]) -> None:
        if not self._drawn[self._split]:
            raise EnvError("expected reset() before step(): there are no prompts to complete yet")
        if len(completion_ids) != len(prompts):
            raise EnvError(
                f"expected completions for {len(prompts)} prompts, found {len(completion_ids)}; step() takes the ids "
                "for the prompts that the last reset() or step() returned"
            )
        # Without the dimension of tokens one shape, (G,), should be left.
        groups = {tuple(ids.shape[:-1]) for ids in completion_ids}
        if [(len(shape), all(shape)) for shape in groups] != [(1, True)]:
            raise EnvError(
                f"expected one [G, P + L] tensor per prompt with the same G of 1 or more, found {sorted(groups)}"
            )
        for number, (prompt, ids) in enumerate(zip(prompts, completion_ids)):
            expected = prompt["input_ids"]
            start = ids[:, : expected.shape[1]].cpu()
            if not torch.equal(start, expected.expand(len(ids), -1).to(start.dtype)):
                raise EnvError(
                    f"expected the ids of prompt {number} to begin with its {expected.shape[1]} prompt tokens, found "
                    "others; pass whole sequences (prompt and completion, right-padded)"
                )


class GymRows(Task):
    """The rows of a :class:`DataGym` as a task, in the gym's order; nothing in it is graded."""

    grader = "none"

    def __init__(self, gym: "DataGym", form: RowForm) -> None:
        self.gym, self.read, self.labelled = gym, form.read, form.labelled
        self.name, self.train_size, self.exam_prompts = gym.rows["train"].name, gym._size("train"), gym._size("test")

    def row(self, split: Split, index: int) -> Row:
        """Return the row of a training position, or one of the test dataset."""
        self.check_index(split, index)
        row = self.gym.row("train" if split == "train" else "test", index)
        return {**row, "question": self.read(row).question}

    def reward(self, completion: str, row: Mapping[str, Any]) -> None:
        """Return no grade: the gym's rows are learned, not answered."""

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the conversation before the response."""
        return as_messages(self.read(row).prompt, "user", "the prompt")

    def demonstration(self, row: Mapping[str, Any]) -> str | None:
        """Return the response."""
        return self.read(row).response

    def counterexample(self, row: Mapping[str, Any]) -> str | None:
        """Return the worse response."""
        return self.read(row).rejected


class DataGym(Gym[RolloutBatch]):
    """Batches of examples for ``agent.learn``; a subclass says as which task the rows are learned.

    The datasets are anything that ``read_dataset`` takes, or a mixture. All rows are checked at the start. Each epoch
    has a new order.
    """

    _panel = "test"
    kind: ClassVar[DataKind]
    """What an agent learns from it."""
    _task_class: Callable[..., DataTask]
    """What makes examples of the rows."""
    _form_options: Mapping[str, Any] = {}
    """Further arguments of ``form_of``."""

    @checked
    def __init__(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Tokenizer,
        *,
        data_batch_size_per_gpu: Count = 8,
        accelerator: Accelerator | None = None,
        max_context_length: Count | None = None,
        seed: Seed = 42,
    ) -> None:
        self._begin(tokenizer, data_batch_size_per_gpu, accelerator, max_context_length)
        self.seed = seed
        self.rows: dict[Split, Rows] = {
            "train": read_dataset(train_dataset, name="the train dataset"),
            "test": read_dataset(test_dataset, name="the test dataset"),
        }
        forms = {s: form_of(rows.columns, self.kind, rows.name, **self._form_options) for s, rows in self.rows.items()}
        for split, rows in self.rows.items():
            check_rows(rows, forms[split])
        self._order = TrainingOrder(self.rows["train"].sizes, self.rows["train"].weights, seed)
        self._tasks = {split: self._task_class(GymRows(self, form)) for split, form in forms.items()}

    @property
    def task(self) -> DataTask:
        """The same rows as a task, for ``Population``."""
        return self._tasks["train"]

    def _size(self, split: Split) -> int:
        return len(self.rows[split])

    def row(self, split: Split, position: int) -> Row:
        """Return the row of a training position, or one of the test dataset."""
        row: Row = self.rows[split][self._order(position) if split == "train" else position]
        return row

    def step(self, completion_ids: Any = None) -> RolloutBatch:
        """Draw the next batch; nothing is graded, so completions are ignored."""
        return self._next()

    @checked
    def from_state(self, state: Mapping[str, int]) -> None:
        """Return to a saved position."""
        self._split, self._drawn["train"] = "train", _saved_batches(state)

    def _next(self) -> RolloutBatch:
        rows = [self.row(self._split, position) for position in self._positions()]
        examples = [t for group, row in enumerate(rows) for t in trajectories(self._examples(row), group, row)]
        return collate(examples, int(self.tokenizer.pad_token_id))

    def examine(self, agent: Any, batches: int) -> np.ndarray:
        """Return the agent's score of each row in that many batches of the test dataset."""
        if agent.env_type == "reasoning":
            raise ConfigError(f"{agent.algorithm.name} learns from rewards; test it on a ReasoningGym")
        scores: list[np.ndarray] = []
        with self.eval_mode():
            for number in range(batches):
                batch = self.step() if number else self.reset()
                scores.append(agent.score(batch).double().cpu().numpy())
                agent.tokens["evaluated"] += int(batch.lengths.sum())
        return np.concatenate(scores)

    def _examples(self, row: Row) -> list[Example]:
        """Return the examples of a row of the current split; those that belong together are adjacent."""
        return self._tasks[self._split].examples(self.tokenizer, row, self.max_context_length)


class SFTGym(DataGym):
    """Batches of demonstrations, one row each, for ``agent.learn(env.reset())``.

    A row has ``messages``, a whole conversation that ends with the assistant, or ``prompt`` (text, or messages; or
    ``question``) and a response (text, or one assistant message) in ``response_column``, ``completion``,
    ``answer`` or ``chosen``; or ``text`` alone, of which every token is learned. ``messages`` may hold ``tool_calls``
    and results of the role ``tool``; the column ``tools`` then has the schemas. The chat template renders both.
    """

    kind = "sft"

    @checked
    def __init__(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Tokenizer,
        *,
        response_column: Name = "target",
        loss_on: LossOn = "completion",
        data_batch_size_per_gpu: Count = 8,
        accelerator: Accelerator | None = None,
        max_context_length: Count | None = None,
        seed: Seed = 42,
    ) -> None:
        """Make an environment of two datasets.

        Args:
            train_dataset: anything that ``read_dataset`` takes, or a mixture.
            test_dataset: the same; what ``eval_mode()`` and ``agent.test`` use.
            tokenizer: Hugging Face tokenizer; without a pad token its end token pads.
            response_column: column of the response to ``prompt``; without a ``target``, one of those above.
            loss_on: ``completion``: only the last answer is learned; ``assistant``: every assistant message, which
                needs an append-only chat template.
            data_batch_size_per_gpu: rows per batch of this process, 1 or more.
            accelerator: ``accelerate.Accelerator``; each process gets its share of every batch.
            max_context_length: most tokens of prompt and response together.
            seed: decides the order of training.

        Raises:
            EnvError: a dataset that is empty or lacks a column, or a malformed row.
        """
        # Before super().__init__(), which reads them.
        self.response_column, self.loss_on = response_column, loss_on
        self._form_options = {"response": response_column, "learned": True}
        self._task_class = partial(_Demonstrations, loss_on=loss_on)
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            data_batch_size_per_gpu=data_batch_size_per_gpu,
            accelerator=accelerator,
            max_context_length=max_context_length,
            seed=seed,
        )


class _Demonstrations(DataTask):
    """The rows of a gym, read as the gym reads them; unlike those of ``SFTTask`` they may have calls of tools."""

    kind: ClassVar[DataKind] = "sft"

    def __init__(self, rows: GymRows, loss_on: LossOn) -> None:
        super().__init__(rows)
        self._read, self._loss_on = rows.read, loss_on

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return what the row teaches."""
        return [demonstration(tokenizer, self._read(row), self._loss_on, max_tokens)]


class PreferenceGym(DataGym):
    """Batches of pairs for ``agent.learn(env.reset())``: two rows each, the chosen completion first.

    A row has ``prompt`` (text, or messages), ``chosen`` and ``rejected`` (text, or one assistant message).
    Without ``prompt``, ``chosen`` and ``rejected`` are whole: conversations that differ only in their last message, or
    texts, which are split after the last whole word that they share.
    """

    kind = "preference"
    _task_class = PreferenceTask


class UnpairedGym(DataGym):
    """Batches of labelled answers for ``agent.learn(env.reset())``.

    A row has ``prompt`` (text, or messages), ``completion`` (text, or one assistant message) and ``label``: True for a
    good completion, False for a bad one. A row of a pair, as in ``PreferenceGym``, becomes two rows of the batch.
    """

    kind = "unpaired"
    _task_class = UnpairedTask

    def _examples(self, row: Row) -> list[Example]:
        if self._tasks[self._split].labelled:
            return super()._examples(row)
        return super()._examples({**row, "label": True}) + super()._examples({**row, "label": False})
