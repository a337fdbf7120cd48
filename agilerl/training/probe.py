"""Where learning would start: what agents answer to training questions before any update."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from agilerl.algorithms.config import GroupConfig
from agilerl.checks.arguments import Count, Whole, checked, counted, shown
from agilerl.data import Trajectory
from agilerl.envs.core import Task
from agilerl.population import Population
from agilerl.rollouts.engine import check_error_rate

OFTEN = 0.1
"""Share of groups with a signal from which on a run learns at once: of 32 prompts three teach something."""


@dataclass(frozen=True)
class Answer:
    """One completion, or one episode."""

    text: str
    """The completion; of an episode the last one."""
    score: float
    """Its grade; NaN if it has none."""
    length: int
    """Tokens that the model said."""
    finish_reason: str


@dataclass(frozen=True)
class Group:
    """The answers to one question."""

    prompt: str
    """The prompt as the model reads it; of an episode its seed."""
    expected: str | None
    """The right answer, if there is one."""
    answers: list[Answer]
    graded: list[str]
    """What graders read of each answer."""
    fault: str = ""
    """The first answer that could not be graded, and why; empty if there is none."""

    @property
    def scores(self) -> list[float]:
        """The rewards of the answers that have a grade."""
        return [answer.score for answer in self.answers if math.isfinite(answer.score)]


@dataclass(frozen=True)
class Probe:
    """What was asked, and how it was answered."""

    groups: list[Group]
    by_group: bool = True
    """Whether the algorithm compares the answers to a question with each other, and not all answers of a batch."""

    @cached_property
    def answers(self) -> list[Answer]:
        """All answers."""
        return [answer for group in self.groups for answer in group.answers]

    @property
    def ungraded(self) -> int:
        """Number of answers without a grade."""
        return sum(not math.isfinite(answer.score) for answer in self.answers)

    @property
    def fault(self) -> str:
        """How many answers got no grade, and why; empty if all did."""
        if not self.ungraded:
            return ""
        none = "because the grader returned None; return a number for every completion, 0.0 for a wrong one"
        why = next((f"the first, {group.fault}" for group in self.groups if group.fault), none)
        return f"{self.ungraded} of {counted(len(self.answers), 'answer')} got no grade, {why}"

    @property
    def reward(self) -> float:
        """Mean reward of the answers that have a grade; NaN if none has."""
        scores = [score for group in self.groups for score in group.scores]
        return fmean(scores) if scores else math.nan

    @property
    def differ(self) -> float:
        """Share of questions whose answers earned different rewards: those that teach."""
        return fmean(len(set(group.scores)) > 1 for group in self.groups)

    @property
    def cut(self) -> float:
        """Share of answers that ended at the limit of tokens, and not by themselves."""
        return fmean(answer.finish_reason in ("length", "context") for answer in self.answers)

    @property
    def length(self) -> float:
        """Mean tokens of an answer."""
        return fmean(answer.length for answer in self.answers)

    @property
    def empty(self) -> float:
        """Share of answers of which graders read nothing: where the format asks for an answer, none was found."""
        return fmean(not text for group in self.groups for text in group.graded)

    @property
    def has_signal(self) -> bool:
        """Whether some rewards differ that the algorithm compares."""
        return self.differ > 0 or (not self.by_group and len({s for group in self.groups for s in group.scores}) > 1)

    @property
    def start(self) -> str:
        """Where learning would start, in a word or two."""
        if not self.has_signal:
            return "no signal"
        return "at once" if self.differ >= OFTEN or not self.by_group else "slowly"

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers under their names in metrics.jsonl."""
        return {
            "preflight/questions": len(self.groups),
            "preflight/samples": len(self.answers),
            "preflight/reward": self.reward,
            "preflight/groups_differ": self.differ,
            "preflight/cut": self.cut,
            "preflight/no_answer": self.empty,
            "preflight/tokens": self.length,
        }

    def __str__(self) -> str:
        numbers = f"reward {self.reward:.3f}, {self.differ:.0%} of groups differ, {self.cut:.0%} cut"
        return f"{numbers}, {self.length:.0f} tokens"

    def document(self) -> dict[str, Any]:
        """Return the numbers, and the first question with an answer, as plain data for JSON."""
        numbers: dict[str, Any] = {name.partition("/")[2]: value for name, value in self.metrics.items()}
        first = self.groups[0]
        sample = {**asdict(first.answers[0]), "graded": first.graded[0]} if first.answers else {}
        shown = {"start": self.start, "prompt": first.prompt, "expected": first.expected, "answer": sample}
        document: dict[str, Any] = finite(numbers | shown)
        return document


def finite(values: Any) -> Any:
    """Return nested plain data with None in place of numbers that are not finite."""
    if isinstance(values, dict):
        return {name: finite(value) for name, value in values.items()}
    if isinstance(values, list):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


@checked
def probe(population: Population, questions: Count = 16, samples: Count | None = None, first: Whole = 0) -> Probe:
    """Let agents answer training questions as they would in training, in turn; nothing about them changes.

    The questions are those at the places from ``first`` on, each with ``samples`` answers (None: the agent's group),
    drawn from random streams that nothing else uses. Raises RewardError, or EnvError for episodes, if more answers than
    the population allows could not be graded.
    """
    asks = population.trial(first, questions, samples)
    task, tokenizer = population.task, population.tokenizer
    groups, report = population.examiner.collect(asks)
    check_error_rate(
        sum(ask.samples for ask in asks), report.failures, population.max_error_rate, episodes=task.multi_turn
    )
    faults = {failure.request: failure.message for failure in reversed(report.failures)}  # the first of each
    results = []
    for number, (ask, group) in enumerate(zip(asks, groups)):
        answers, row = answers_of(group, ask.samples), ask.place.row
        read = [task.graded_text(a.text, row) if isinstance(task, Task) else a.text for a in answers]
        ids = ask.place.prompt_ids
        # Episodes have no prompt before they begin.
        prompt = tokenizer.decode(ids) if ids else str(row.get("question", f"seed {row.get('seed')}"))
        expected = None if row.get("answer") is None else str(row["answer"])
        broken = (t.finish_reason in ("error", "oom") or (t.failed and math.isnan(t.episode_return)) for t in group)
        text = next((t.text for t, is_broken in zip(group, broken) if is_broken), "")
        text = text if len(text) <= 40 else f"{text[:37]}..."
        fault = f"{shown(text)}, because {faults[number]}" if number in faults else ""
        results.append(Group(prompt, expected, answers, read, fault))
    return Probe(results, isinstance(population.agents[0].config, GroupConfig))


def answers_of(group: Sequence[Trajectory], samples: int) -> list[Answer]:
    """Return an answer for each sample; an episode may have several rows, each with the whole return."""
    rows: dict[int, list[Trajectory]] = {}
    for number, trajectory in enumerate(group):
        rows.setdefault(number if trajectory.episode is None else trajectory.episode, []).append(trajectory)
    answers = []
    for _, turns in sorted(rows.items()):
        failed = any(row.finish_reason in ("error", "oom") for row in turns)
        score = math.nan if failed else turns[0].episode_return
        length = sum(sum(row.action_mask) for row in turns)
        answers.append(Answer(turns[-1].text, score, length, turns[-1].finish_reason))
    # An episode that failed before the model said anything has no row.
    return answers + [Answer("", math.nan, 0, "error")] * (samples - len(rows))
