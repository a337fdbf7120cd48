"""The environments that AgileRL documents for single turns: batches of prompts, of demonstrations or of pairs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from agilerl.arguments import Count, Name, Seed, Tokenizer, checked
from agilerl.data import RolloutBatch, collate
from agilerl.envs.core import AnyTask, Row, Split, Task, TrainingOrder, score_completions
from agilerl.envs.curation import Form, Sample, as_messages, check_rows, form_of
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import (
    DataKind,
    DataTask,
    Example,
    LossOn,
    PreferenceTask,
    UnpairedTask,
    demonstration,
    render_completion,
    trajectories,
)
from agilerl.envs.prompts import (
    Accelerator,
    check_tokenizer,
    decode_completions,
    render_prompt,
    saved_batches,
)
from agilerl.envs.sources import Rows, read_dataset
from agilerl.errors import EnvError
from agilerl.padding import decoded, padded
from agilerl.rewards.combine import Graders

Batch = TypeVar("Batch")
Prompt = dict[str, Any]
"""``input_ids`` and ``attention_mask`` [1, P] int64, ``text``, ``question``, ``answer``, and ``row`` (all columns)."""


class Gym(ABC, Generic[Batch]):
    """Batches of one split at a time; a subclass defines what a batch holds.

    The order depends only on the seed and the number of batches drawn. Inside ``eval_mode()`` the rows are those of the
    panel, always from its first.
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
        """Use the test dataset (a task's exam) inside; afterwards training continues from its last batch."""
        kept, self._split = self._split, self._panel
        self._drawn[self._panel] = 0
        try:
            yield
        finally:
            self._split = kept

    def state(self) -> dict[str, int]:
        """Return what ``from_state`` needs to continue from here: the number of training batches drawn."""
        return {"batches": self._drawn["train"]}

    def _places(self) -> Sequence[int]:
        """Return the places of this process's share of the next batch in the current split."""
        own, drawn = self.data_batch_size_per_gpu, self._drawn[self._split]
        whole, size = own * self._world, len(self)
        self._drawn[self._split] += 1
        if self._split == "train":
            first = drawn * whole + self._rank * own
            return range(first, first + own)
        # A panel's last batch may be short, because no row counts twice in one pass.
        first = drawn % -(-size // whole) * whole
        return range(first, min(first + whole, size))[self._rank :: self._world]


class ReasoningGym(Gym[list[Prompt]]):
    """Batches of prompts out, completions in, rewards back.

    The order of prompts depends only on ``seed`` and the number of batches drawn. Inside ``eval_mode()`` the prompts
    are those of the test dataset, always from its first row, so that every agent takes the same exam.
    """

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
        task: AnyTask,
        tokenizer: Tokenizer,
        data_batch_size_per_gpu: Count = 8,
        *,
        accelerator: Accelerator | None = None,
        max_context_length: Count | None = None,
    ) -> Self:
        """Make an environment from any task; ``eval_mode()`` uses its exam panel.

        A dataset task is fitted first, which leaves out prompts of more than ``max_context_length`` tokens.
        """
        task.fit(tokenizer, max_context_length)
        env = cls.__new__(cls)
        env.return_raw_completions = False
        env._setup(task, tokenizer, data_batch_size_per_gpu, accelerator, max_context_length)
        return env

    def _setup(self, task: Task, tokenizer: Any, batch_size: int, accelerator: Any, max_tokens: int | None) -> None:
        self._begin(tokenizer, batch_size, accelerator, max_tokens)
        self.task = task
        self._prompts: list[Prompt] = []

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
        self._check_completions(completion_ids)
        texts: list[str] = []
        rows: list[Row] = []
        for prompt, ids in zip(self._prompts, completion_ids):
            start = prompt["input_ids"].shape[1]
            texts += decode_completions(self.tokenizer, ids[:, start:].tolist())
            rows += [prompt["row"]] * ids.shape[0]
        scores = score_completions(self.task, rows, texts)
        rewards = torch.tensor([float("nan") if score is None else score for score in scores], dtype=torch.float32)
        return self._next(), rewards.reshape(len(completion_ids), -1)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Use the test dataset (a task's exam) inside; afterwards training continues with its current prompts."""
        kept, self._prompts = self._prompts, []
        try:
            with super().eval_mode():
                yield
        finally:
            self._prompts = kept

    @checked
    def from_state(self, state: Mapping[str, int]) -> list[Prompt]:
        """Return to a saved position, and return its current prompts."""
        self._split, self._prompts, self._drawn["train"] = "train", [], saved_batches(state)
        if self._drawn["train"]:
            self._drawn["train"] -= 1
            self._next()
        return self._prompts

    def _next(self) -> list[Prompt]:
        split = self._split
        self._prompts = [self._prompt(self.task.row(split, place)) for place in self._places()]
        return self._prompts

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

    def _check_completions(self, completion_ids: Sequence[Tensor]) -> None:
        if not self._prompts:
            raise EnvError("expected reset() before step(): there are no prompts to complete yet")
        if len(completion_ids) != len(self._prompts):
            raise EnvError(
                f"expected completions for {len(self._prompts)} prompts, found {len(completion_ids)}; step() takes the "
                "ids for the prompts that the last reset() or step() returned"
            )
        groups = {tuple(ids.shape[:-1]) for ids in completion_ids}
        if len(groups) != 1 or len(next(iter(groups))) != 1 or not next(iter(groups))[0]:
            raise EnvError(
                f"expected one [G, P + L] tensor per prompt with the same G of 1 or more, found {sorted(groups)}"
            )
        for place, (prompt, ids) in enumerate(zip(self._prompts, completion_ids)):
            expected = prompt["input_ids"][0]
            start = ids[:, : len(expected)].cpu()
            if start.shape[1] < len(expected) or not bool((start == expected).all()):
                raise EnvError(
                    f"expected the ids of prompt {place} to begin with its {len(expected)} prompt tokens, found "
                    "others; pass whole sequences (prompt and completion, right-padded)"
                )


class GymRows(Task):
    """The rows of a :class:`DataGym` as a task, in the gym's order; nothing in it is graded."""

    grader = "none"

    def __init__(self, gym: "DataGym") -> None:
        self._gym, self.name, self.train_size = gym, gym._rows["train"].name, len(gym._rows["train"])
        self.exam_prompts, self.labelled = len(gym._rows["test"]), gym._forms["train"].labelled

    def row(self, split: Split, index: int) -> Row:
        """Return the row of a training position, or one of the test dataset."""
        self.check_index(split, index)
        gym = self._gym
        row: Row = gym._rows["train"][gym._order(index)] if split == "train" else gym._rows["test"][index]
        return {**row, "question": self._read(row).question}

    def reward(self, completion: str, row: Mapping[str, Any]) -> None:
        """Return no grade: the gym's rows are learned, not answered."""

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the conversation before the response."""
        return as_messages(self._read(row).prompt, "user", "the prompt")

    def demonstration(self, row: Mapping[str, Any]) -> str | None:
        """Return the response."""
        return self._read(row).response

    def counterexample(self, row: Mapping[str, Any]) -> str | None:
        """Return the worse response."""
        return self._read(row).rejected

    def _read(self, row: Mapping[str, Any]) -> Sample:
        return self._gym._forms["train"].read(row)


class DataGym(Gym[RolloutBatch]):
    """Batches of examples for ``agent.learn``; a subclass defines a row's examples.

    The datasets are anything that ``read_dataset`` takes, or a mixture. All rows are checked at the start.

    The order depends only on ``seed`` and the number of batches drawn, a new one each epoch. Inside ``eval_mode()`` the
    rows are those of the test dataset, starting at its first.
    """

    _panel = "test"
    kind: ClassVar[DataKind]
    """What an agent learns from it."""

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
        self._rows: dict[Split, Rows] = {
            "train": read_dataset(train_dataset, name="the train dataset"),
            "test": read_dataset(test_dataset, name="the test dataset"),
        }
        self._forms = {split: self.form(rows) for split, rows in self._rows.items()}
        for split, rows in self._rows.items():
            check_rows(rows, self._forms[split])
        self._order = TrainingOrder(self._rows["train"].sizes, self._rows["train"].weights, seed)

    @property
    @abstractmethod
    def task(self) -> DataTask:
        """The same rows as a task, for ``Population``."""

    @abstractmethod
    def form(self, rows: Rows) -> Form:
        """Return which columns are read; raises EnvError if one is missing."""

    @abstractmethod
    def examples(self, sample: Sample) -> list[Example]:
        """Return the examples of a row; those that belong together are adjacent."""

    def _size(self, split: Split) -> int:
        return len(self._rows[split])

    def step(self, completion_ids: Any = None) -> RolloutBatch:
        """Draw the next batch; nothing is graded, so completions are ignored."""
        return self._next()

    @checked
    def from_state(self, state: Mapping[str, int]) -> None:
        """Return to a saved position."""
        self._split, self._drawn["train"] = "train", saved_batches(state)

    def _next(self) -> RolloutBatch:
        places = self._places()
        if self._split == "train":
            places = [self._order(place) for place in places]
        rows, form = [self._rows[self._split][place] for place in places], self._forms[self._split]
        made = [t for group, row in enumerate(rows) for t in trajectories(self.examples(form.read(row)), group, row)]
        return collate(made, int(self.tokenizer.pad_token_id))


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
            ConfigError: a tokenizer without pad and end token, a batch size below 1, an unknown ``loss_on``.
        """
        self.response_column, self.loss_on = response_column, loss_on
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            data_batch_size_per_gpu=data_batch_size_per_gpu,
            accelerator=accelerator,
            max_context_length=max_context_length,
            seed=seed,
        )

    @property
    def task(self) -> DataTask:
        """The same rows as a task, for ``Population``."""
        return _Demonstrations(self)

    def form(self, rows: Rows) -> Form:
        """Return which columns are read: a conversation, else a prompt and its response."""
        return form_of(rows.columns, "sft", rows.name, response=self.response_column, learned=True)

    def examples(self, sample: Sample) -> list[Example]:
        """Return the row's conversation."""
        return [demonstration(self.tokenizer, sample, self.loss_on, self.max_context_length)]


class _Demonstrations(DataTask):
    """The rows of a gym, read as the gym reads them."""

    kind: ClassVar[DataKind] = "sft"

    def __init__(self, gym: SFTGym) -> None:
        super().__init__(GymRows(gym))
        self._gym = gym

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return what the row teaches."""
        return [demonstration(tokenizer, self._gym._forms["train"].read(row), self._gym.loss_on, max_tokens)]


class PreferenceGym(DataGym):
    """Batches of pairs for ``agent.learn(env.reset())``: two rows each, the chosen completion first.

    A row has ``prompt`` (text, or messages), ``chosen`` and ``rejected`` (text, or one assistant message).
    Without ``prompt``, ``chosen`` and ``rejected`` are whole: conversations that differ only in their last message, or
    texts, which are split after the last whole word that they share.
    """

    kind = "preference"

    @property
    def task(self) -> DataTask:
        """The same rows as a task, for ``Population``."""
        return PreferenceTask(GymRows(self))

    def form(self, rows: Rows) -> Form:
        """Return which columns are read."""
        return form_of(rows.columns, "preference", rows.name)

    def examples(self, sample: Sample) -> list[Example]:
        """Return the prompt with its chosen and with its rejected completion."""
        prompt, limit = as_messages(sample.prompt, "user", "the prompt"), self.max_context_length
        answers = (str(sample.response), str(sample.rejected))
        return [render_completion(self.tokenizer, prompt, answer, limit) for answer in answers]


class UnpairedGym(DataGym):
    """Batches of labelled answers for ``agent.learn(env.reset())``.

    A row has ``prompt`` (text, or messages), ``completion`` (text, or one assistant message) and ``label``: True for a
    good completion, False for a bad one. A row of a pair, as in ``PreferenceGym``, becomes two rows of the batch.
    """

    kind = "unpaired"

    @property
    def task(self) -> DataTask:
        """The same rows as a task, for ``Population``."""
        return UnpairedTask(GymRows(self))

    def form(self, rows: Rows) -> Form:
        """Return which columns are read."""
        return form_of(rows.columns, "unpaired", rows.name)

    def examples(self, sample: Sample) -> list[Example]:
        """Return the prompt with its completion, or with both of a pair."""
        prompt, limit = as_messages(sample.prompt, "user", "the prompt"), self.max_context_length
        answers = [(str(sample.response), sample.desirable)]
        answers += [] if sample.rejected is None else [(sample.rejected, False)]
        return [replace(render_completion(self.tokenizer, prompt, a, limit), desirable=good) for a, good in answers]


class DatasetEnv:
    """``SFTGym`` or ``PreferenceGym`` under the name of AgileRL 2.58; a call returns one of them."""

    @checked
    def __new__(  # type: ignore[misc]
        cls,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Tokenizer,
        *,
        objective: Literal["preference", "sft"],
        response_column: Name = "target",
        data_batch_size_per_gpu: Count = 8,
        accelerator: Accelerator | None = None,
        max_context_length: Count | None = None,
        seed: Seed = 42,
    ) -> DataGym:
        """Make an environment of two datasets, of demonstrations (``sft``) or of pairs (``preference``)."""
        options: dict[str, Any] = {
            "data_batch_size_per_gpu": data_batch_size_per_gpu,
            "accelerator": accelerator,
            "max_context_length": max_context_length,
            "seed": seed,
        }
        if objective == "preference":
            return PreferenceGym(train_dataset, test_dataset, tokenizer, **options)
        return SFTGym(train_dataset, test_dataset, tokenizer, response_column=response_column, **options)
