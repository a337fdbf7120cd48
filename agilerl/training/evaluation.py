"""An adapter and its base on the same questions: means with intervals, pass@k, the paired difference, every answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from typing import Any

import numpy as np

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.arguments import NotNegative, Whole, checked
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, paired_difference, probability_better
from agilerl.population import Population
from agilerl.rollouts.engine import check_error_rate
from agilerl.runs.diagnosis import Symptom
from agilerl.runs.hacks import hacks
from agilerl.templates import at_date
from agilerl.training.probe import Answer, answers_of
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
        found = {}
        for k in (1 << power for power in range(most.bit_length())):
            counts = [
                (len(graded), sum(score >= full - 1e-9 for score in graded))
                for one in self.samples
                if len(graded := [a.score for a in one if math.isfinite(a.score)]) >= k
            ]
            if counts:
                found[k] = Fitness.from_scores([1 - comb(n - c, k) / comb(n, k) for n, c in counts])
        return found


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
        own, other = ([a.score for a in one.greedy] for one in (self.adapter, self.base))
        return paired_difference(Fitness(math.nan, scores=tuple(own)), Fitness(math.nan, scores=tuple(other)))

    @property
    def probability_better(self) -> float:
        """Probability that the adapter's mean is truly above the base's (see ``agilerl.hpo.fitness``)."""
        if self.base is None:
            return math.nan
        pairs = [(a.score, b.score) for a, b in zip(self.adapter.greedy, self.base.greedy)]
        known = [pair for pair in pairs if all(map(math.isfinite, pair))]
        if not known:
            return math.nan
        own, other = map(Fitness.from_scores, zip(*known))
        return probability_better(own, other)

    @property
    def hacks(self) -> list[Symptom]:
        """The alarms if the adapter's greedy answers earn more than the base's and look like none."""
        if self.base is None or "question" not in self.rows[0]:
            return []
        of_adapter, of_base = ([*map(_as_written, self.rows, one.greedy)] for one in (self.adapter, self.base))
        return hacks(of_adapter, of_base)

    def worst(self, count: int) -> list[int]:
        """Return the questions with the least mean score, greedy and samples together; first those that the base does
        better. Questions whose every answer is right, or without a grade, are left out.
        """

        def mean(results: Results, place: int) -> float:
            answers = [results.greedy[place], *results.samples[place]]
            known = [a.score for a in answers if math.isfinite(a.score)]
            return float(np.mean(known)) if known else math.nan

        own = {place: mean(self.adapter, place) for place in range(len(self.rows))}
        base = {place: mean(self.base, place) if self.base is not None else 0.0 for place in own}
        missed = [place for place, score in own.items() if score < self.full - 1e-9]  # False for NaN
        return sorted(missed, key=lambda place: (own[place], -base[place], place))[:count]

    def document(self) -> dict[str, Any]:
        """Return all of it as plain data for JSON; numbers that are not finite become None."""
        base, difference = self.base, self.difference
        result: dict[str, Any] = {"task": self.task, "settings": self.settings, "questions": len(self.rows)}
        result["adapter"] = self._of(self.adapter)
        result["base"] = None if base is None else self._of(base)
        result["cut"] = {"adapter": self.adapter.cut, "base": None if base is None else base.cut}
        result["difference"] = None
        if difference is not None:
            result["difference"] = {**_shown(difference), "probability_better": _number(self.probability_better)}
        result["hacks"] = [asdict(symptom) for symptom in self.hacks]
        result["answers"] = [
            {
                **_question(row),
                "adapter": _answers(self.adapter, place),
                "base": None if base is None else _answers(base, place),
            }
            for place, row in enumerate(self.rows)
        ]
        return result

    def _of(self, results: Results) -> dict[str, Any]:
        passed = {f"pass@{k}": _shown(value) for k, value in results.passed(self.full).items()}
        return {"greedy": _shown(results.fitness), **passed}


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
    agent, rows = population.agents[0], [dict(place.row) for place in population.places("test")]
    who = [(agent.selected_slot, agent), *([(None, None)] if with_base else [])]
    with at_date(session.date):
        greedy = _asked(session, who, 1, 0.0)
        drawn = _asked(session, who, samples, temperature) if samples else [[[] for _ in rows] for _ in who]
    results = [Results([one[0] for one in first], more) for first, more in zip(greedy, drawn)]
    return Evaluation(
        session.task.name, rows, results[0], results[1] if with_base else None, full, temperature if samples else 0.0
    )


def before_and_after(population: Population, elite: LLMAlgorithm, count: int = 10) -> list[dict[str, Any]]:
    """Return the first test questions with the greedy answers of the base and of an agent, as plain data."""
    rows = [place.row for place in population.places("test")[:count]]
    groups, _ = population.answers("test", [(None, None), (elite.selected_slot, elite)], first=count)
    answers = [_plain(answers_of(group, 1)[0]) for group in groups]
    return [
        {**_question(row), "base": base, "elite": after}
        for row, base, after in zip(rows, answers[: len(rows)], answers[len(rows) :])
    ]


def _asked(session: Session, who: Sequence[Any], samples: int, temperature: float) -> list[list[list[Answer]]]:
    """Return the answers of each one to each question."""
    population = session.population
    size = len(population.places("test"))
    groups, report = population.answers("test", who, samples=samples, temperature=temperature)
    check_error_rate(
        len(groups) * samples, report.failures, population.max_error_rate, episodes=population.task.multi_turn
    )
    return [[answers_of(group, samples) for group in groups[k * size : (k + 1) * size]] for k in range(len(who))]


def _as_written(row: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Return an answer as a row of a completions file."""
    right = row.get("answer")
    return {
        "prompt": str(row["question"]),
        "completion": answer.text,
        "answer": "" if right is None else str(right),
        "reward": _number(answer.score),
        "finish_reason": answer.finish_reason,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(fitness: Fitness) -> dict[str, Any]:
    return {**fitness.to_dict(), "ci95": [_number(end) for end in fitness.interval]}


def _question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "question": str(row.get("question", f"seed {row.get('seed')}")),
        "answer": None if row.get("answer") is None else str(row["answer"]),
    }


def _plain(answer: Answer) -> dict[str, Any]:
    return {**asdict(answer), "score": _number(answer.score)}


def _answers(results: Results, place: int) -> dict[str, Any]:
    return {"greedy": _plain(results.greedy[place]), "samples": [_plain(one) for one in results.samples[place]]}
