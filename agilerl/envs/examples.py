"""Data to learn from: demonstrations and pairs as token ids, and the tasks that give them."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from agilerl.checks.arguments import Seed, checked
from agilerl.data import Trajectory
from agilerl.envs.core import Place, Row, Split, Task, TaskArgument, TaskWrapper
from agilerl.envs.curation import Sample, label_of
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.prompts import (
    PromptTooLongError,
    behind_opened,
    check_tokenizer,
    prompt_text,
    render_prompt,
    render_text,
)
from agilerl.errors import ConfigError, EnvError
from agilerl.streams import stream
from agilerl.text.contract import MARK, contract_of, plain_ids, template_ids, text_ids
from agilerl.text.padding import has_template

LossOn = Literal["completion", "assistant"]
"""What a conversation teaches: its last answer, or every assistant message."""


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised conversation."""

    ids: list[int]
    """Its tokens, up to the last learned one."""
    learned: list[bool]
    """True on the tokens whose log-probs enter a loss; same length, never True on the first token."""
    text: str = ""
    """The response, for logs."""
    desirable: bool | None = None
    """Whether the response is a good one; None: the question does not arise."""


def render_completion(
    tokenizer: Any,
    prompt: Sequence[Mapping[str, Any]],
    response: str,
    max_tokens: int | None = None,
    *,
    calls: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> Example:
    """Return a prompt and its response; the response is learned, including the end token.

    The prompt's tokens are those of ``render_prompt``, so training sees what sampling will see; a final assistant
    message is a prefill, which the response continues. ``calls`` are the response's calls of some of the ``tools``.
    Raises as ``render_conversation`` does.
    """
    if not has_template(tokenizer) and not calls and not tools:
        ids = render_prompt(tokenizer, prompt)
        before = "\n".join(str(message["content"]) for message in prompt)
        answer = _learned(tokenizer, response, "", before)
        return _fitted(Example(ids + answer, [False] * len(ids) + [True] * len(answer), response), max_tokens)
    messages = [*prompt]
    prefill = str(messages.pop()["content"]) if messages and messages[-1]["role"] == "assistant" else ""
    whole = [*messages, _answer(prefill + response, calls)]
    return _render(tokenizer, whole, [len(messages)], prefill, max_tokens, tools)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Example:
    """Return a conversation in which every assistant message is learned, including its end token.

    Pieces are tokenised one by one, as they would arrive in an episode, so token positions are known, not guessed. This
    requires an append-only template: the text of a conversation must begin with the text of its first messages.

    Raises:
        ConfigError: the template is missing, is not append-only, or refuses the messages.
        EnvError: there is no assistant message, the first message is one, the last is not, a text contains an end
            token, or there are more than ``max_tokens`` tokens.
    """
    if not has_template(tokenizer):
        raise ConfigError(
            "learning every message of the assistant needs a tokenizer with a chat template, found none in "
            f"{type(tokenizer).__name__}; learn completions only (loss_on='completion'), or set one"
        )
    learned = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not learned or learned[0] == 0 or learned[-1] != len(messages) - 1:
        raise EnvError(
            "expected a conversation in which the assistant answers and has the last word, found the roles "
            f"{', '.join(m['role'] for m in messages) or '(no messages)'}"
        )
    return _render(tokenizer, messages, learned, "", max_tokens, tools)


def render_whole(tokenizer: Any, text: str, max_tokens: int | None = None) -> Example:
    """Return a text of which every token but the first is learned, with the end token; no template is applied.

    The tokenizer's special tokens are read as such, and its start token is added unless the text begins with it.
    Raises EnvError if there are more than ``max_tokens`` tokens.
    """
    check_tokenizer(tokenizer)
    ids, contract = plain_ids(tokenizer, text), contract_of(tokenizer)
    # A lone end token may be the start token, where the two are one.
    ids += [] if ids[-1:] and ids[-1] in contract.ends and len(ids) > 1 else [int(contract.end or 0)]
    return _fitted(Example(ids, [False] + [True] * (len(ids) - 1), text), max_tokens)


def _answer(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {})}


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    learned: Sequence[int],
    prefill: str,
    max_tokens: int | None,
    tools: Sequence[Mapping[str, Any]],
) -> Example:
    """Render a conversation; ``learned`` are the indices of the assistant's messages whose tokens are learned."""
    check_tokenizer(tokenizer)
    template = f"the chat template of {type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r}"
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {str((item.get("function") or item).get("name")) for item in (*calls, *tools)}
    shown = render_text(tokenizer, messages, tools=tools) if names and has_template(tokenizer) else ""
    if missing := sorted(name for name in names if name not in shown):
        raise ConfigError(
            f"{template} does not show the tool {missing[0]!r}, so it would not be learned; use a model whose template "
            "has tools"
        )
    text, ids, marks = "", list[int](), list[bool]()
    for index, following in zip(learned, [*learned[1:], None]):
        message = messages[index]
        # With a prefill the prompt ends inside the assistant's message.
        context = [*messages[:index], *([{"role": "assistant", "content": prefill}] if prefill else [])]
        before = prompt_text(tokenizer, context, tools)
        upto = slice(0, index + 1 if following is None else following)
        after = render_text(tokenizer, messages[upto], tools=tools, prompts=following is not None)
        response = message["content"][len(prefill) :]
        # What the generation prompt or the prefill has begun already.
        response = response if prefill else behind_opened(tokenizer, response)
        parts = _parts(tokenizer, before, after, response)
        if parts is None:
            marked = [*messages[:index], {**message, "content": MARK}, *messages[index + 1 : upto.stop]]
            rest = render_text(tokenizer, marked, tools=tools, prompts=following is not None).rpartition(MARK)[2]
            parts = _parts(tokenizer, before, after, response, rest, calls="tool_calls" in message)
        if parts is not None and following is not None and not parts[2]:
            parts = None  # an earlier answer does not end with a token that ends answers
        if not before.startswith(text) or (parts is None and (following is not None or "tool_calls" in message)):
            raise ConfigError(
                f"{template} changes earlier text, or does not end an answer, when a message follows, so the "
                "assistant's tokens cannot be identified; learn completions only, with single answers "
                "(loss_on='completion'), or use a template that only appends"
            )
        # Where the template cuts the answer, it is the row's own behind the generation prompt.
        lead, shown, closing = parts or ("", response, "")
        # Some templates end an answer only once another turn follows.
        closing = closing or contract_of(tokenizer).closing
        new = text_ids(tokenizer, before[len(text) :], text) if ids else template_ids(tokenizer, before)
        answer = _learned(tokenizer, response, closing, before, lead)
        ids += new + answer
        marks += [False] * len(new) + [True] * len(answer)
        text = before + lead + shown + closing
    return _fitted(Example(ids, marks, messages[learned[-1]]["content"]), max_tokens)


def _parts(
    tokenizer: Any, before: str, after: str, response: str, rest: str | None = None, *, calls: bool = False
) -> tuple[str, str, str] | None:
    """Return what a template writes behind a prompt: before the response, as the response, and up to its end token.

    ``rest`` is what it writes behind any response; without it only the usual case is seen, in which the response
    follows the prompt. None: the response is not there as a whole, blanks around it aside.
    """
    if not after.startswith(before):
        return None
    contract, written = contract_of(tokenizer), after[len(before) :]
    if rest is None:
        closing = contract.closing
        return ("", response, closing) if closing and written.startswith(response + closing) else None
    # Behind an empty response, which is one that only calls tools, all is the template's.
    core, behind = (written.removesuffix(rest), rest) if response else ("", written)
    if response and core == written and rest:
        return None
    stops = [at + len(end) for end in contract.end_texts if (at := behind.find(end)) >= 0]
    stops += [len(behind.rstrip())] * calls * (not stops)  # calls stand there, whatever ends them
    # Blanks that a template trims are of the response, not of what stands before it.
    for text in (response, response.rstrip(), response.strip()):
        if core.endswith(text):
            return core[: len(core) - len(text)], text, behind[: min(stops, default=0)]
    return None


def _learned(tokenizer: Any, response: str, closing: str, before: str, lead: str = "") -> list[int]:
    """Return the tokens of a response up to the first one that stops, which ``closing`` ends with unless it is empty.

    Raises EnvError for a response that has such a token in it.
    """
    contract = contract_of(tokenizer)
    for end in contract.end_texts:
        if end in response:
            raise EnvError(
                f"expected an answer without the end token, found {end!r} in {response[:80]!r}; the tokenizer adds it, "
                "so remove it"
            )
    ids = text_ids(tokenizer, lead + response + closing, before)
    return ids if ids and ids[-1] in contract.ends else [*ids, int(contract.end or 0)]


def _fitted(example: Example, max_tokens: int | None) -> Example:
    if max_tokens is not None and len(example.ids) > max_tokens:
        raise PromptTooLongError(
            f"expected an example of at most {max_tokens} tokens, found {len(example.ids)}; raise max_model_len (of a "
            f"gym, max_context_length), or remove such rows: {example.text[:80]!r}"
        )
    return example


def trajectories(examples: Sequence[Example], group: int, row: Mapping[str, Any]) -> list[Trajectory]:
    """Return the examples of one row as trajectories to collate and learn from; they have no rewards."""
    starts = [example.learned.index(True) for example in examples]
    return [
        Trajectory(
            prompt_ids=example.ids[:start],
            token_ids=example.ids[start:],
            action_mask=example.learned[start:],
            logprobs=None,
            rewards=[float("nan")],
            group=group,
            text=example.text,
            row=row,
            desirable=example.desirable,
        )
        for example, start in zip(examples, starts)
    ]


DataKind = Literal["sft", "preference", "unpaired"]
"""Demonstrations, pairs of a better and a worse answer, or single answers with a label."""


class DataTask(TaskWrapper):
    """Another task's training rows as examples to imitate; its exam and test stay as they are."""

    kind: ClassVar[DataKind]
    """What its examples are."""

    @checked
    def __init__(self, task: TaskArgument) -> None:
        super().__init__(task)

    @abstractmethod
    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the examples of a training row; those that belong together are adjacent.

        Raises EnvError if the row has no answer or the example is too long.
        """

    def answer(self, row: Mapping[str, Any]) -> str:
        """Return the right answer of a row; raises EnvError if there is none."""
        answer = self.task.demonstration(row)
        if answer is None:
            raise EnvError(
                f"{self.name} has no answer to learn for the question {str(row.get('question'))[:80]!r}; such tasks "
                "can only be trained by reward (env_type: reasoning)"
            )
        return answer


def examples_at(
    task: Task | EpisodeTask, position: int, tokenizer: Any, context_length: int
) -> tuple[list[Trajectory], Place]:
    """Return the examples of the training row at a position, or of its stand-in if it is too long.

    Raises ConfigError for a task that has no examples, EnvError if all stand-ins are too long as well.
    """
    if not isinstance(task, DataTask):
        raise ConfigError(f"{task.name} has no examples to learn from; wrap it in SFTTask or PreferenceTask")
    row, examples, skipped = task.first_that_fits(position, lambda row: task.examples(tokenizer, row, context_length))
    return trajectories(examples, 0, row), Place(row, skipped=skipped, level=task.level(position))


# -- demonstrations: what supervised fine-tuning learns from ----------------------------------------------------------


class SFTTask(DataTask):
    """A task's questions with their right answers."""

    kind: ClassVar[DataKind] = "sft"

    @checked
    def __init__(self, task: TaskArgument, *, loss_on: LossOn = "completion") -> None:
        """Take a task; ``loss_on="assistant"`` also learns earlier assistant messages."""
        super().__init__(task)
        self.loss_on: LossOn = loss_on

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question and its answer."""
        return [demonstration(tokenizer, Sample(self.messages(row), self.answer(row)), self.loss_on, max_tokens)]


def demonstration(tokenizer: Any, sample: Sample, loss_on: LossOn, max_tokens: int | None) -> Example:
    """Return a prompt and its response as an example of which ``loss_on`` is learned; of a whole text, all of it."""
    prompt, response, tools = sample.prompt, str(sample.response), sample.tools
    if not prompt:
        return render_whole(tokenizer, response, max_tokens)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if loss_on == "completion":
        return render_completion(tokenizer, messages, response, max_tokens, calls=sample.calls, tools=tools)
    if messages[-1]["role"] == "assistant":
        response = messages.pop()["content"] + response
    return render_conversation(tokenizer, [*messages, _answer(response, sample.calls)], max_tokens, tools=tools)


# -- pairs of answers, a better and a worse one: what preference optimisation learns from -----------------------------


Mistake = Callable[[Row, np.random.Generator], str | None]
"""``mistake(row, draws)`` returns a plausible wrong answer to a row, or None."""

BLOCK = 256
"""Wrong answers come from rows in the same block of this many training positions."""
# Of `mistake`, and of other rows.
TRIES, MOST_TRIES = 16, 256


class PreferenceTask(DataTask):
    """A task's questions with the right answer as ``chosen`` and a wrong one as ``rejected``.

    A row that has a ``rejected`` column keeps it; else ``mistake`` makes one; else it is another row's answer. It is
    never the right answer, nor one that earns as much.
    """

    kind: ClassVar[DataKind] = "preference"

    @checked
    def __init__(self, task: TaskArgument, *, mistake: Mistake | None = None, seed: Seed = 42) -> None:
        """Take a task; ``seed`` decides the wrong answers."""
        super().__init__(task)
        self.mistake, self.seed = mistake, seed

    def row(self, split: Split, index: int) -> Row:
        """Return the task's row; in training it has ``rejected``."""
        row = self.task.row(split, index)
        if split == "train" and self.task.counterexample(row) is None:
            row = {**row, "rejected": self._rejected(row, index)}
        return row

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question with its right and with its wrong answer."""
        prompt, answers = self.messages(row), (self.answer(row), str(self.task.counterexample(row)))
        better, worse = (render_completion(tokenizer, prompt, answer, max_tokens) for answer in answers)
        if better.ids == worse.ids:
            raise EnvError(
                f"expected answers that differ, found that the tokenizer makes the same tokens of {answers[0][:80]!r} "
                f"and of {answers[1][:80]!r}; remove the row"
            )
        return [better, worse]

    def _rejected(self, row: Row, index: int) -> str:
        right = self.answer(row)
        best = self.reward(right, row)
        for candidate in self._candidates(row, index):
            if candidate is None or candidate.strip() == right.strip():
                continue
            score = self.reward(candidate, row)
            # Without grades to compare, any other answer counts as wrong.
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
        # From one block, so that a row's wrong answer does not depend on how many rows there are.
        first = index // BLOCK * BLOCK
        for offset in stream(self.seed, "preference/other", index).integers(BLOCK, size=MOST_TRIES):
            answer = self.task.row("train", first + int(offset)).get("answer")
            yield None if answer is None else str(answer)


# -- single answers, each found good or bad: what KTO learns from -----------------------------------------------------


class UnpairedTask(DataTask):
    """A task's questions with one answer each and its ``label``: True for a good answer, False for a bad one.

    A task whose rows are labelled keeps its labels. Any other gives each of its pairs (those of ``PreferenceTask``) as
    two training rows side by side, the good answer first; an epoch then has twice as many rows.
    """

    kind: ClassVar[DataKind] = "unpaired"

    @checked
    def __init__(self, task: TaskArgument, *, mistake: Mistake | None = None, seed: Seed = 42) -> None:
        """Take a task; ``mistake`` and ``seed`` decide the wrong answers, as in ``PreferenceTask``."""
        super().__init__(task if task.labelled else PreferenceTask(task, mistake=mistake, seed=seed))

    def _describe(self) -> None:
        super()._describe()
        if not self.labelled and self.train_size is not None:
            self.train_size *= 2

    def row(self, split: Split, index: int) -> Row:
        """Return the task's row; in training it has ``label``."""
        if self.labelled or split != "train":
            return self.task.row(split, index)
        self.check_index(split, index)
        return {**self.task.row(split, index // 2), "label": index % 2 == 0}

    def level(self, position: int) -> int | None:
        """Return the task's level of a curriculum."""
        return self.task.level(position if self.labelled else position // 2)

    def examples(self, tokenizer: Any, row: Mapping[str, Any], max_tokens: int | None = None) -> list[Example]:
        """Return the question with its answer, good or bad."""
        good = label_of(row)
        answer = self.answer(row) if good or self.labelled else str(self.task.counterexample(row))
        return [replace(render_completion(tokenizer, self.messages(row), answer, max_tokens), desirable=good)]
