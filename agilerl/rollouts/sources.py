"""Where trajectories come from: questions of a task, or episodes of an environment, asked for in one way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from agilerl.data import Completion, Trajectory
from agilerl.envs.core import Row, Split, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.prompts import PromptTooLongError, render_prompt
from agilerl.errors import AgileRLError, EnvError
from agilerl.rollouts.collect import CollectReport, TaskRequest, collect
from agilerl.rollouts.engine import GenerationRequest, RolloutEngine, SamplingSettings
from agilerl.rollouts.episodes import EpisodeRequest, collect_episodes
from agilerl.rollouts.stepping import call_all

__all__ = ["Ask", "EpisodeSource", "Panel", "QuestionSource", "Source"]

Panel = list[tuple[Row, list[int]]]
"""Rows with their rendered prompts."""

Made = TypeVar("Made")

_STRIDE, _MOST_SKIPPED = 1009, 256
"""How far away the stand-in for a row that does not fit is, so that it is in another batch; and how many are tried."""
_TRIED_EPISODES = 8
"""Episodes of a split that are begun before training, to see how long prompts are."""


@dataclass(frozen=True)
class Ask:
    """Some samples of one place of a split for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    split: Split
    index: int
    """Place in the split: the row of a task, or the episode of an environment."""
    samples: int
    sampling: Callable[[int], SamplingSettings]
    """From the length of a prompt to how its completion is drawn."""
    context_length: int
    """Most tokens of prompt and completion together."""
    reserve: int
    """Tokens that later prompts of an episode leave for the completion."""
    group: int
    key: tuple[int, ...]
    """Names the random stream of the samples, beside the purpose."""
    weights: Mapping[str, float] | None = None
    """The agent's own weights of all parts of the reward; None: the grader's."""

    @property
    def purpose(self) -> str:
        """What the samples are for: training and exams never share draws."""
        return "rollout" if self.split == "train" else self.split


class Source(Protocol):
    """Answers asks with graded trajectories."""

    def collect(self, engine: RolloutEngine, asks: Sequence[Ask]) -> tuple[list[list[Trajectory]], CollectReport]:
        """Return the trajectories of each ask, in order, all decoded together, with seconds spent and what failed."""

    def prompt_lengths(self, split: Split, context_length: int) -> list[int]:
        """Return the lengths in tokens of first prompts of a split; raises EnvError where one does not fit."""

    def row_length(self, split: Split, completion: int, context_length: int) -> int:
        """Return the most tokens that a row may have, with completions of at most ``completion`` tokens."""

    def skipped(self, positions: Sequence[int], context_length: int) -> int:
        """Return how many training rows were passed over at these positions, because they do not fit."""

    def levels(self, positions: Sequence[int]) -> list[int]:
        """Return the levels of a curriculum at these training positions; none where there is no curriculum."""

    def row(self, ask: Ask) -> Row | None:
        """Return the row of the task that an ask is about; None where only its trajectories know."""


class QuestionSource:
    """A single-turn task."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self._panels: dict[tuple[str, int, int], Panel] = {}
        self._skipped: dict[tuple[int, int], int] = {}

    def collect(self, engine: RolloutEngine, asks: Sequence[Ask]) -> tuple[list[list[Trajectory]], CollectReport]:
        """Return one trajectory a sample."""
        return collect(engine, self.task, self.tokenizer, [self._request(ask) for ask in asks])

    def render(self, row: Row, context_length: int) -> list[int]:
        """Return the prompt tokens of a row; raises EnvError when they leave no room for a completion."""
        return render_prompt(self.tokenizer, self.task.messages(row), max_tokens=context_length - 1)

    def train(self, position: int, context_length: int, make: Callable[[Row], Made]) -> tuple[Row, Made]:
        """Return what ``make`` makes of a training row; of another row, always the same, where it is too long.

        Raises EnvError where the stand-ins are too long as well.
        """
        first = None
        for number in range(_MOST_SKIPPED):
            row = self.task.row("train", position + number * _STRIDE)
            try:
                made = make(row)
            except PromptTooLongError as error:
                first = first or error
                continue
            if number:
                self._skipped[position, context_length] = number
            return row, made
        raise EnvError(f"none of {_MOST_SKIPPED} training rows of {self.task.name} fits; the first: {first}") from first

    def skipped(self, positions: Sequence[int], context_length: int) -> int:
        """Return those that ``train`` passed over."""
        return sum(self._skipped.get((position, context_length), 0) for position in positions)

    def levels(self, positions: Sequence[int]) -> list[int]:
        """Return those of the task."""
        return [level for level in map(self.task.level, positions) if level is not None]

    def panel(self, split: Split, context_length: int) -> Panel:
        """Return the rows of a fixed panel with their rendered prompts."""
        size = self.task.panel_size(split)
        key = (split, size, context_length)
        if key not in self._panels:
            rows = [self.task.row(split, i) for i in range(size)]
            self._panels[key] = [(row, self.render(row, context_length)) for row in rows]
        return self._panels[key]

    def prompt_lengths(self, split: Split, context_length: int) -> list[int]:
        """Return those of a whole panel."""
        return [len(ids) for _, ids in self.panel(split, context_length)]

    def row_length(self, split: Split, completion: int, context_length: int) -> int:
        """Return the longest prompt of the panel and a completion."""
        return min(max(self.prompt_lengths(split, context_length)) + completion, context_length)

    def row(self, ask: Ask) -> Row | None:
        """Return the row, of the stand-in where the ask's own is too long."""
        return self._request(ask).row

    def _request(self, ask: Ask) -> TaskRequest:
        if ask.split == "train":
            row, prompt = self.train(ask.index, ask.context_length, lambda row: self.render(row, ask.context_length))
        else:
            row, prompt = self.panel(ask.split, ask.context_length)[ask.index]
        sampling = ask.sampling(len(prompt))
        generation = GenerationRequest(ask.slot, prompt, ask.samples, sampling, ask.purpose, ask.key)
        return TaskRequest(row, generation, ask.group, ask.weights)


class EpisodeSource:
    """A multi-turn environment."""

    def __init__(self, task: EpisodeTask, tokenizer: Any) -> None:
        """Learn how the environment is talked to; raises ConfigError where the chat template does not allow it."""
        self.task, self.chat = task, task.chat(tokenizer)
        self._lengths: dict[tuple[Split, int], list[tuple[int, int]]] = {}

    def collect(self, engine: RolloutEngine, asks: Sequence[Ask]) -> tuple[list[list[Trajectory]], CollectReport]:
        """Return one trajectory a sample, or several where the context was rewritten on the way."""
        return collect_episodes(engine, self.task, self.chat, [self._request(ask) for ask in asks])

    def prompt_lengths(self, split: Split, context_length: int) -> list[int]:
        """Return those of the first few episodes."""
        return [first for first, _ in self._tried(split, context_length)]

    def row_length(self, split: Split, completion: int, context_length: int) -> int:
        """Return an estimate: as many turns as there can be, with replies as long as the first ones were."""
        tried = self._tried(split, context_length)
        first, reply = max(first for first, _ in tried), max(reply for _, reply in tried)
        return min(first + self.task.max_turns * (completion + reply), context_length)

    def skipped(self, positions: Sequence[int], context_length: int) -> int:
        """Return 0: an episode whose prompt is too long has no grade instead."""
        return 0

    def levels(self, positions: Sequence[int]) -> list[int]:
        """Return none: episodes have no curriculum."""
        return []

    def row(self, ask: Ask) -> Row | None:
        """Return None: what an episode was about is known when it has begun."""
        return None

    def _tried(self, split: Split, context_length: int) -> list[tuple[int, int]]:
        """Return, for the first few episodes, the lengths of the first prompt and of the reply to an empty action.

        Raises EnvError for an environment that cannot even do that.
        """
        known = self._lengths.get((split, context_length))
        if known is not None:
            return known
        size = _TRIED_EPISODES if split == "train" else min(_TRIED_EPISODES, self.task.panel_size(split))
        nothing = Completion([self.chat.tokenizer.eos_token_id], None, "stop")
        lengths = []
        for index in range(size):
            episode = self.task.episode(self.chat, context_length, 1)
            (error,) = call_all([partial(episode.begin, self.task.episode_seed(split, index))], self.task.step_timeout)
            first = 0 if error is not None else len(episode.prompt_ids)
            if error is None:
                (error,) = call_all([partial(episode.act, nothing, "")], self.task.step_timeout)
            if error is not None:
                what = str(error) if isinstance(error, AgileRLError) else f"{type(error).__name__}: {error}"
                raise EnvError(f"{self.task.name} failed in the first turn of an episode: {what}") from error
            lengths.append((first, max(len(episode.prompt_ids) - first - 1, 0)))
            self.task.give_back(episode.env)
        self._lengths[split, context_length] = lengths
        return lengths

    def _request(self, ask: Ask) -> EpisodeRequest:
        return EpisodeRequest(
            ask.slot,
            self.task.episode_seed(ask.split, ask.index),
            ask.samples,
            ask.sampling,
            ask.context_length,
            ask.reserve,
            ask.group,
            purpose=ask.purpose,
            key=ask.key,
        )
