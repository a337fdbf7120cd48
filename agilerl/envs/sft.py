"""Demonstrations: what supervised fine-tuning learns from."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from agilerl.arguments import Count, Name, Seed, Tokenizer, checked
from agilerl.envs.core import AnyTask, Message
from agilerl.envs.examples import DataGym, DataTask, Example, LossOn, render_completion, render_conversation
from agilerl.envs.forms import Form, Sample, as_messages, form_of
from agilerl.envs.prompts import Accelerator
from agilerl.envs.sources import Rows
from agilerl.errors import ConfigError


class SFTTask(DataTask):
    """A task's questions with their right answers."""

    kind: ClassVar[Literal["sft", "preference"]] = "sft"

    @checked
    def __init__(self, task: AnyTask, *, loss_on: LossOn = "completion") -> None:
        """Take a task; ``loss_on="assistant"`` also learns earlier assistant messages."""
        super().__init__(task)
        self.loss_on = _checked(loss_on)

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question and its answer."""
        prompt = self.messages(row)
        return [_demonstration(tokenizer, prompt, self.answer(row), self.loss_on, max_tokens)]


class SFTGym(DataGym):
    """Batches of demonstrations, one row each, for ``agent.learn(env.reset())``.

    A row has ``messages``, a whole conversation that ends with the assistant, or ``prompt`` (text, or messages; or
    ``question``) and a response (text, or one assistant message) in ``response_column``, ``completion``,
    ``answer`` or ``chosen``.
    """

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
            tokenizer: Hugging Face tokenizer with a pad token.
            response_column: preferred column of the response to ``prompt``.
            loss_on: ``completion``: only the last answer is learned; ``assistant``: every assistant message, which
                needs an append-only chat template.
            data_batch_size_per_gpu: rows per batch of this process, 1 or more.
            accelerator: ``accelerate.Accelerator``; each process gets its share of every batch.
            max_context_length: most tokens of prompt and response together.
            seed: decides the order of training.

        Raises:
            EnvError: a dataset that is empty or lacks a column, or a malformed row.
            ConfigError: a tokenizer without pad token, a batch size below 1, an unknown ``loss_on``.
        """
        self.response_column, self.loss_on = response_column, _checked(loss_on)
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            data_batch_size_per_gpu=data_batch_size_per_gpu,
            accelerator=accelerator,
            max_context_length=max_context_length,
            seed=seed,
        )

    def form(self, rows: Rows) -> Form:
        """Return which columns are read: a conversation, else a prompt and its response."""
        return form_of(rows.columns, "sft", rows.name, response=self.response_column)

    def examples(self, sample: Sample) -> list[Example]:
        """Return the row's conversation."""
        prompt = as_messages(sample.prompt, "user", "the prompt")
        response = str(sample.response)
        return [_demonstration(self.tokenizer, prompt, response, self.loss_on, self.max_context_length)]


def _demonstration(
    tokenizer: Any, prompt: list[Message], response: str, loss_on: LossOn, max_tokens: int | None
) -> Example:
    if loss_on == "completion":
        return render_completion(tokenizer, prompt, response, max_tokens)
    if prompt and prompt[-1]["role"] == "assistant":
        prompt, response = prompt[:-1], prompt[-1]["content"] + response
    return render_conversation(tokenizer, [*prompt, {"role": "assistant", "content": response}], max_tokens)


def _checked(loss_on: LossOn) -> LossOn:
    if loss_on not in get_args(LossOn):
        raise ConfigError(f"expected loss_on to be one of {', '.join(get_args(LossOn))}, found {loss_on!r}")
    return loss_on
