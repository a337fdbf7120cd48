"""A reward model as the grader: a transformer that outputs one number."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from agilerl.checks.arguments import Count, Name, Whole, checked
from agilerl.errors import ConfigError, RewardError
from agilerl.models.model_config import check_config, check_model_folder, check_size, check_tokenizer_parts
from agilerl.rewards.grader import MESSAGES, BaseGrader, conversation, to_rows
from agilerl.safety.addresses import is_out_of_reach
from agilerl.text.templates import apply_chat_template


class RewardModelGrader(BaseGrader):
    """Score completions with a sequence-classification model; its raw logit is the score, of any size and sign.

    The chat template of the model's own tokenizer formats the whole conversation, system text and earlier turns
    included, with the completion as its last message; without a template their texts are joined. Only safetensors are
    read, and no code of the model's repository is run. Batches are padded, which changes a score only by rounding.
    """

    name = "reward_model"
    reads = "message"

    @checked
    def __init__(
        self,
        model: Name,
        *,
        revision: str | None = None,
        label: Whole | None = None,
        batch_size: Count = 8,
        max_length: Count | None = None,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        name: str = "reward_model",
    ) -> None:
        """Set the model; it is loaded when the grader is set up or first used.

        Args:
            model: local folder or name on the Hugging Face hub.
            revision: branch, tag or commit on the hub.
            label: which of several outputs is the score; None for a model with one output.
            batch_size: completions at a time, 1 or more.
            max_length: the most tokens of prompt and completion; a longer text has no score and counts as a failure,
                since a truncated text is a different text. None means the model's number of positions.
            device: the device to run on, such as ``cpu`` or ``cuda``.
            dtype: the type of its weights.
            name: the grader's name in messages and metrics.
        """
        self.model, self.revision, self.label, self.batch_size = model, revision, label, batch_size
        self.max_length, self.device, self.dtype, self.name = max_length, device, dtype, name

    def __repr__(self) -> str:
        return f"RewardModelGrader({self.model!r}, device={self.device!r}, dtype={self.dtype!r})"

    def open(self) -> None:
        """Load tokenizer and model; raises ConfigError if that fails, or if ``label`` is not an output of the model."""
        import torch
        from transformers import AutoConfig, AutoTokenizer  # takes seconds to import
        from transformers import AutoModelForSequenceClassification as Model

        options: dict[str, Any] = {"revision": self.revision, "trust_remote_code": False}
        folder = Path(self.model).expanduser()
        if folder.is_dir():
            check_model_folder(folder)
        else:  # the hub's client would keep retrying for half a minute
            options["local_files_only"] = is_out_of_reach()
        check_config(self.model, **options)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.model, **options)
            check_tokenizer_parts(self._tokenizer, self.model)
            dtype = getattr(torch, self.dtype)
            check_size(AutoConfig.from_pretrained(self.model, **options), self.model, dtype.itemsize, Model)
            self._model = Model.from_pretrained(self.model, dtype=dtype, use_safetensors=True, **options)
        except ConfigError:
            raise
        except Exception as error:  # several libraries read files here, and no list of their errors is complete
            raise ConfigError(f"cannot load the reward model {self.model}: {error}") from error
        outputs = self._model.config.num_labels
        if not (outputs == 1 if self.label is None else 0 <= self.label < outputs):
            raise ConfigError(f"{self.model} has {outputs} outputs: set label to one of 0 to {outputs - 1}")
        self._model.to(self.device).eval().requires_grad_(False)
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def release(self) -> None:
        """Release the model."""
        del self._model, self._tokenizer

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | Exception]:
        """Return the model's score of each completion as an answer to its conversation."""
        self.setup()
        asked = to_rows({key: columns[key] for key in (MESSAGES, "prompt") if key in columns}, len(completions))
        texts = zip(asked, prompts, completions)
        rows = [self._ids(conversation(row, prompt), completion) for row, prompt, completion in texts]
        limit = self.max_length or getattr(self._model.config, "max_position_embeddings", None)
        scores: list[float | Exception] = [
            RewardError(f"expected at most {limit} tokens of prompt and completion, found {len(row)}") for row in rows
        ]
        fitting = [n for n, row in enumerate(rows) if not limit or len(row) <= limit]
        # By length, so that rows of a batch need little padding.
        fitting.sort(key=lambda n: len(rows[n]))
        # Without a pad token the model cannot tell where a padded text ends.
        size = 1 if self._model.config.pad_token_id is None else self.batch_size
        for start in range(0, len(fitting), size):
            batch = fitting[start : start + size]
            for index, score in zip(batch, self._scores([rows[n] for n in batch])):
                scores[index] = score
        return scores

    def _ids(self, messages: Sequence[Mapping[str, Any]], completion: str) -> list[int]:
        templated = self._tokenizer.chat_template is not None
        text = "\n".join(str(message["content"]) for message in messages) + completion
        if templated:
            messages = [*messages, {"role": "assistant", "content": completion}]
            try:
                text = apply_chat_template(self._tokenizer, messages)
            except (TemplateError, ValueError, TypeError, LookupError) as error:
                raise ConfigError(f"the chat template of {self.model} does not accept an answer: {error}") from error
        # A template writes the special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=not templated)["input_ids"]
        return ids

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids = [torch.tensor(row) for row in rows]
        padded = pad_sequence(ids, batch_first=True, padding_value=self._model.config.pad_token_id or 0)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        with torch.inference_mode():
            logits: Any = self._model(input_ids=padded.to(self.device), attention_mask=mask.to(self.device)).logits
        values: list[float] = logits[:, self.label or 0].float().cpu().tolist()
        return values
