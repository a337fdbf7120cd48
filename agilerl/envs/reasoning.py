"""ReasoningGym: a single-turn task stepped through in batches, with AgileRL's documented interface."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from agilerl.arguments import Count, Seed, Tokenizer, checked
from agilerl.envs.core import AnyTask, Row, Split, Task, score_completions
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.prompts import Accelerator, check_tokenizer, decode_completions, render_prompt, saved_batches
from agilerl.errors import EnvError
from agilerl.rewards.grader import Grader

Prompt = dict[str, Any]
"""``input_ids`` and ``attention_mask`` [1, P] int64, ``text``, ``question``, ``answer``, and ``row`` (all columns)."""


class ReasoningGym:
    """Batches of prompts out, completions in, rewards back.

    The order of prompts depends only on ``seed`` and the number of batches drawn. Inside ``eval_mode()`` the prompts
    are those of the test dataset, always from its first row, so that every agent takes the same exam.
    """

    @checked
    def __init__(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Tokenizer,
        reward_fn: Grader,
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
            tokenizer: Hugging Face tokenizer with a pad token.
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
            ConfigError: a malformed template, a tokenizer without pad token, a batch size below 1.
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
        check_tokenizer(tokenizer)
        self.task, self.tokenizer, self.max_context_length = task, tokenizer, max_tokens
        self.data_batch_size_per_gpu, self.accelerator = batch_size, accelerator
        self._rank = 0 if accelerator is None else int(accelerator.process_index)
        self._world = 1 if accelerator is None else int(accelerator.num_processes)
        self._split: Split = "train"
        self._drawn: dict[Split, int] = {"train": 0, "exam": 0}
        self._prompts: list[Prompt] = []

    def __len__(self) -> int:
        """Return the number of prompts of the current split; 0 for an endless stream."""
        return (self.task.train_size or 0) if self._split == "train" else self.task.exam_prompts

    @property
    def num_epochs(self) -> int:
        """Training epochs completed by the batches drawn so far; always 0 for an endless stream."""
        size = self.task.train_size
        return self._drawn["train"] * self.data_batch_size_per_gpu * self._world // size if size else 0

    def reset(self, reset_dataloaders: bool = False) -> list[Prompt]:
        """Draw the next batch of prompts; with ``reset_dataloaders`` start the split again."""
        if reset_dataloaders:
            self._drawn[self._split] = 0
        return self._next()

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
        """Use the test dataset (a task's exam) inside; training continues afterwards where it left off."""
        kept = self._split, self._prompts
        self._split, self._prompts, self._drawn["exam"] = "exam", [], 0
        try:
            yield
        finally:
            self._split, self._prompts = kept

    def state(self) -> dict[str, int]:
        """Return what ``from_state`` needs to continue from here: the number of training batches drawn."""
        return {"batches": self._drawn["train"]}

    @checked
    def from_state(self, state: Mapping[str, int]) -> list[Prompt]:
        """Return to a saved position, and return its current prompts."""
        self._split, self._prompts, self._drawn["train"] = "train", [], saved_batches(state)
        if self._drawn["train"]:
            self._drawn["train"] -= 1
            self._next()
        return self._prompts

    def _next(self) -> list[Prompt]:
        whole = self.data_batch_size_per_gpu * self._world
        if self._split == "train":
            first = self._drawn["train"] * whole + self._rank * self.data_batch_size_per_gpu
            places: Sequence[int] = range(first, first + self.data_batch_size_per_gpu)
        else:
            # A panel's last batch may be short, because no row counts twice in one pass.
            size = self.task.exam_prompts
            first = self._drawn["exam"] % -(-size // whole) * whole
            places = range(first, min(first + whole, size))[self._rank :: self._world]
        self._drawn[self._split] += 1
        self._prompts = [self._prompt(self.task.row(self._split, place)) for place in places]
        return self._prompts

    def _prompt(self, row: Row) -> Prompt:
        ids = render_prompt(self.tokenizer, self.task.messages(row), self.max_context_length)
        input_ids = torch.tensor([ids], dtype=torch.int64)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "text": self.tokenizer.decode(ids, clean_up_tokenization_spaces=False),
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
