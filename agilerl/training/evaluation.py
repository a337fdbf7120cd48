"""An adapter and its base on the same questions: means with intervals, pass@k, the paired difference, every answer."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import fmean
from typing import Any

import numpy as np

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.checks.arguments import NotNegative, Whole, checked
from agilerl.envs.core import Task
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, difference_interval, paired_difference, probability_better
from agilerl.population import Population
from agilerl.rollouts.engine import check_error_rate
from agilerl.runs.diagnosis import Symptom
from agilerl.runs.hacks import FEWEST, hacks
from agilerl.text.templates import at_date
from agilerl.training.probe import Answer, answers_of, finite
from agilerl.training.setup import Session


@dataclass(frozen=True)
class Results:
    """What one policy scored."""

    greedy: list[Answer]
    """Its most likely answer to each question."""
    samples: list[list[Answer]]
    """Answers drawn for each question; empty lists if none were."""

    @property
    def fitness(self) -> Fitness:
        """The mean of the greedy answers, over the questions that have a grade; ``n`` counts those."""
        known = [answer.score for answer in self.greedy if math.isfinite(answer.score)]
        return Fitness.from_scores(known) if known else Fitness(math.nan, n=0)

    @property
    def cut(self) -> float:
        """The share of the greedy answers that ended at the limit of tokens, and not by themselves."""
        return sum(answer.finish_reason in ("length", "context") for answer in self.greedy) / max(1, len(self.greedy))

    def passed(self, full: float) -> dict[int, Fitness]:
        """Return pass@k for k = 1, 2, 4, ... up to the number of samples: the chance that one of k earns ``full``.

        Of n graded samples with c right ones a question's estimate is 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374),
        unbiased; questions with fewer than k grades are left out.
        """
        most = max(map(len, self.samples), default=0)
        passed = {}
        for k in (1 << power for power in range(most.bit_length())):
            counts = [
                # A full score may be a sum of weighted parts, rounded to just below.
                (len(graded), sum(score >= full - 1e-9 for score in graded))
                for one in self.samples
                if len(graded := [a.score for a in one if math.isfinite(a.score)]) >= k
            ]
            if counts:
                passed[k] = Fitness.from_scores([1 - comb(n - c, k) / comb(n, k) for n, c in counts])
        return passed

    def answers(self, number: int) -> dict[str, Any]:
        """Return the answers to a question as plain data."""
        return {"greedy": asdict(self.greedy[number]), "samples": [asdict(one) for one in self.samples[number]]}

    def document(self, full: float) -> dict[str, Any]:
        """Return the means as plain data."""
        passed = {f"pass@{k}": _shown(value) for k, value in self.passed(full).items()}
        return {"greedy": _shown(self.fitness), **passed}


@dataclass(frozen=True)
class Evaluation:
    """An adapter, and the base on the same questions."""

    task: str
    rows: list[dict[str, Any]]
    """The questions: ``question`` and ``answer``, or the ``seed`` of an episode."""
    adapter: Results
    base: Results | None
    """None if only the adapter was asked."""
    full: float
    """The score from which on an answer counts as right for pass@k."""
    temperature: float
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was evaluated with."""

    @property
    def difference(self) -> Fitness | None:
        """Adapter less base, question by question."""
        if self.base is None:
            return None
        adapter, base = (tuple(answer.score for answer in one.greedy) for one in (self.adapter, self.base))
        # Only scores count here, and those without a grade (NaN) drop out in pairs: the means need not be known.
        return paired_difference(Fitness(math.nan, scores=adapter), Fitness(math.nan, scores=base))

    @property
    def probability_better(self) -> float:
        """Probability that the adapter's mean is truly above the base's (see ``agilerl.hpo.fitness``)."""
        if self.base is None:
            return math.nan
        pairs = [(a.score, b.score) for a, b in zip(self.adapter.greedy, self.base.greedy)]
        # One answer without a grade would leave the whole exam without a mean.
        known = [pair for pair in pairs if all(map(math.isfinite, pair))]
        if not known:
            return math.nan
        adapter, base = map(Fitness.from_scores, zip(*known))
        return probability_better(adapter, base)

    @property
    def hacks(self) -> list[Symptom]:
        """The alarms if the adapter's greedy answers earn more than the base's and look like none."""
        if self.base is None or "question" not in self.rows[0]:
            return []
        of_adapter, of_base = ([*map(_written, self.rows, one.greedy)] for one in (self.adapter, self.base))
        return hacks(of_adapter, of_base)

    def worst(self, count: int) -> list[int]:
        """Return the questions with the least mean score, greedy and samples together; first those that the base does
        better. Questions whose every answer is right, or without a grade, are left out.
        """

        def means(results: Results | None) -> list[float]:
            if results is None:
                return [0.0] * len(self.rows)
            answers = [[first, *more] for first, more in zip(results.greedy, results.samples)]
            scores = [[answer.score for answer in one if math.isfinite(answer.score)] for one in answers]
            return [float(np.mean(known)) if known else math.nan for known in scores]

        adapter, base = means(self.adapter), means(self.base)
        missed = [number for number, score in enumerate(adapter) if score < self.full - 1e-9]  # False for NaN
        return sorted(missed, key=lambda number: (adapter[number], -base[number], number))[:count]

    def document(self) -> dict[str, Any]:
        """Return all of it as plain data for JSON; numbers that are not finite become None."""
        both = {"adapter": self.adapter, "base": self.base}
        gain = self.difference
        difference = None if gain is None else {**gain.to_dict(), "ci95": list(difference_interval(gain))}
        if difference is not None:
            difference["probability_better"] = self.probability_better
        document: dict[str, Any] = {
            "task": self.task,
            "settings": self.settings,
            "questions": len(self.rows),
            **{who: results and results.document(self.full) for who, results in both.items()},
            "cut": {who: results and results.cut for who, results in both.items()},
            "difference": difference,
            "hacks": [asdict(symptom) for symptom in self.hacks],
            "answers": [
                {**_question(row), **{who: results and results.answers(number) for who, results in both.items()}}
                for number, row in enumerate(self.rows)
            ],
        }
        return {name: finite(value) for name, value in document.items()}


@checked
def evaluate(
    session: Session, *, samples: Whole = 0, temperature: NotNegative = 1.0, full: float = 1.0, with_base: bool = True
) -> Evaluation:
    """Ask the first agent of a session, and the base, the questions of the test, greedy and ``samples`` times each.

    Both draw from the same random streams. The greedy mean is that of ``Population.evaluate("test")``. Raises
    RewardError, or EnvError for episodes, if more than ``training.max_error_rate`` of the answers could not be graded.
    """
    if samples and not temperature:
        raise ConfigError("samples at temperature 0 are all alike; raise the temperature, or draw no samples")
    population = session.population
    agent, rows = population.agents[0], [dict(question.row) for question in population.examiner.places("test")]
    who = [(agent.selected_slot, agent), *([(None, None)] if with_base else [])]
    with at_date(session.date):
        greedy = _asked(session, who, 1, 0.0)
        drawn = _asked(session, who, samples, temperature) if samples else [[[] for _ in rows] for _ in who]
    results = [Results([one[0] for one in first], more) for first, more in zip(greedy, drawn)]
    return Evaluation(
        session.task.name, rows, results[0], results[1] if with_base else None, full, temperature if samples else 0.0
    )


def constant_answer(population: Population, base: float) -> str:
    """Return a sentence if an agent, in the test just taken, gave one answer to most questions that it does not fit.

    Nothing is said of an agent that earns no more than the ``base`` does on average.
    """
    # It fits where it earns 1, or more than the base does on average.
    task = population.task
    if not isinstance(task, Task):
        return ""
    graded = [t.episode_return for t in population.examiner.answered if not math.isnan(t.episode_return)]
    if not graded or fmean(graded) <= base:  # it has learned nothing that pays
        return ""
    texts = [" ".join(task.graded_text(t.text, t.row).split()) for t in population.examiner.answered]
    ((answer, count),) = Counter(texts).most_common(1)
    scores = [t.episode_return for t, one in zip(population.examiner.answered, texts) if one == answer]
    wrong = sum(score < 1 and score <= base for score in scores)  # not those without a grade
    # Most: at least half of the questions, not counting those that it answered right.
    if wrong < FEWEST or 2 * wrong < len(texts) - count + wrong:
        return ""
    return (
        f'{count / len(texts):.0%} of the elite\'s answers in the test are "{answer[:60]}", and '
        f"{1 - wrong / count:.0%} of these earn more than the base does on average: it may have learned which answer "
        "is right most often, not how to find it"
    )


def before_and_after(population: Population, elite: LLMAlgorithm, count: int = 10) -> list[dict[str, Any]]:
    """Return the first test questions with the greedy answers of the base and of an agent, as plain data."""
    rows = [question.row for question in population.examiner.places("test")[:count]]
    groups, _ = population.examiner.answers("test", [(None, None), (elite.selected_slot, elite)], first=count)
    # All questions as the base answers them, then all as the agent does.
    answers = [finite(asdict(answers_of(group, 1)[0])) for group in groups]
    if population.task.multi_turn:
        answers = [{**answer, "text": _last_reply(answer["text"])} for answer in answers]
    return [
        {**_question(row), "base": base, "elite": after}
        for row, base, after in zip(rows, answers[: len(rows)], answers[len(rows) :])
    ]


def _last_reply(log: str) -> str:
    """Return what the model said last in the log of an episode."""
    # In a log what the model says begins with "> ", and what the environment answers with "< ".
    return f"\n{log}".rpartition("\n> ")[2].partition("\n< ")[0].removeprefix("\n")


def _asked(session: Session, who: Sequence[Any], samples: int, temperature: float) -> list[list[list[Answer]]]:
    """Return the answers of each one to each question."""
    population = session.population
    size = len(population.examiner.places("test"))
    groups, report = population.examiner.answers("test", who, samples=samples, temperature=temperature)
    check_error_rate(
        len(groups) * samples, report.failures, population.max_error_rate, episodes=population.task.multi_turn
    )
    return [[answers_of(group, samples) for group in groups[k * size : (k + 1) * size]] for k in range(len(who))]


def _written(row: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Return an answer as a row of a completions file."""
    return {
        "prompt": str(row["question"]),
        "completion": answer.text,
        "answer": _question(row)["answer"] or "",
        "reward": finite(answer.score),
        "finish_reason": answer.finish_reason,
    }


def _shown(fitness: Fitness) -> dict[str, Any]:
    return {**fitness.to_dict(), "ci95": list(fitness.interval)}


def _question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "question": str(row.get("question", f"seed {row.get('seed')}")),
        "answer": None if row.get("answer") is None else str(row["answer"]),
    }
