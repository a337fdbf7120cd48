"""What happened to an agent, and why: its birth, what changed, how its exams went, what made it leave."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from agilerl.checks.arguments import counted
from agilerl.hpo.fitness import Fitness
from agilerl.report.load import AgentRecord, RunRecord


def lives(run: RunRecord) -> list[dict[str, Any]]:
    """Return every agent's life as plain data, in the order of birth."""
    standings, ranks, (elite, why) = _standings(run), places(run), explain_elite(run)
    return [
        {
            "agent": index,
            "parent": agent.parent,
            "born": agent.born,
            "left": agent.died,
            "reason": agent.reason,
            "iterations": len(agent.train),
            "idle": explain_idle(run, agent),
            "hyperparameters": agent.values(),
            "exams": [
                {"generation": exam.generation, "step": exam.step, "mean": exam.score.mean}
                | {"stderr": exam.score.stderr, "n": exam.score.n}
                | {"place": ranks[exam.generation, index]}
                for exam in agent.exams
            ],
            "outcomes": agent.trouble,
            "symptoms": [asdict(symptom) for symptom in agent.symptoms],
            "elite": why if index == elite else "",
            "events": [
                {"generation": generation, "sentence": sentence}
                for generation, sentence in _add_exams(agent, standings, ranks)
            ]
            + [{"generation": max([0, *agent.generations]), "sentence": why}] * (index == elite),
        }
        for index, agent in run.agents.items()
    ]


def explain_idle(run: RunRecord, agent: AgentRecord) -> str:
    """Return that an agent has not been trained, and so has no result of its own; "" for one that has."""
    if agent.generations:
        return ""
    return "never trained" if run.is_finished or agent.died is not None else "has not trained yet"


def explain_elite(run: RunRecord) -> tuple[int | None, str]:
    """Return the elite of a finished run and why it was chosen, with its test; (None, "") if there is none."""
    elite = run.summary.get("elite") or {}
    scores = [f"{who} {run.tests[who].score.mean:.3f}" for who in ("elite", "base") if who in run.tests]
    # Runs of earlier versions did not write the reason.
    reason = elite.get("reason") or "best exam"
    tested = f"; test: {', '.join(scores)}" * bool(scores)
    return (elite["index"], f"elite: {reason}{tested}") if elite else (None, "")


def _add_exams(
    agent: AgentRecord, standings: Mapping[int, Mapping[int, Fitness]], ranks: Mapping[tuple[int, int], int]
) -> Iterator[tuple[int, str]]:
    """Yield (generation, sentence) of what happened to an agent, its exams and their places included, in order."""
    birth, *rest = events(agent)
    exams = []
    for exam in agent.exams:
        scores = standings[exam.generation]
        rank = ranks[exam.generation, agent.index]
        alike = [i for i in sorted(scores) if ranks[exam.generation, i] == rank and i != agent.index]
        best = min(scores, key=lambda i: (ranks[exam.generation, i], i))
        ahead = f"; the best, agent {best}, had {format_score(scores[best])}" * (rank > 1)
        tie = f" (a tie with agent{'s' * (len(alike) > 1)} {', '.join(map(str, alike))})" * bool(alike)
        places = f"places {rank} to {rank + len(alike)}" if alike else f"place {rank}"
        where = f", {places} of {len(scores)}{tie}{ahead}" * (len(scores) > 1)
        exams.append((exam.generation, f"exam {format_score(exam.score)}{where}"))
    yield birth
    # An exam comes before what the selection after it did. Both parts are in order, and sorting keeps it.
    yield from sorted([*exams, *rest], key=lambda event: event[0])


def events(agent: AgentRecord) -> list[tuple[int, str]]:
    """Return (generation, sentence) of what happened to an agent, and why, in order; its birth comes first."""
    born = sentence({"event": "birth", "parent": agent.parent})
    later = [(mutation["generation"], sentence(mutation)) for mutation in agent.mutations]
    for outcome, steps in agent.trouble.items():
        first = next(line for line in agent.train if line["step"] == steps[0])
        generation = value if isinstance(value := first.get("generation"), int) else 0
        later.append((generation, f"{outcome} from iteration {steps[0]}, {counted(len(steps), 'iteration')}"))
    later += [(generation, reason) for generation, reason in agent.verdicts if generation != agent.died]
    # Symptoms are of the last iterations, whenever these were.
    last = agent.generations[-1] if agent.generations else agent.born or 0
    later += [(last, f"its last iterations: {symptom}") for symptom in agent.symptoms]
    if agent.died is not None:
        later.append((agent.died, describe_departure(agent.reason)))
    return [(agent.born or 0, born), *sorted(later, key=lambda event: event[0])]


def sentence(line: Mapping[str, Any]) -> str:
    """Return a birth, mutation, verdict or death of lineage.jsonl in the words of the report, the CLI and trackers."""
    match line["event"]:
        case "birth":
            return "founder of the population" if line["parent"] is None else f"born of {line['parent']}"
        case "mutation":
            details = line.get("details")
            why = details.get("reason") if isinstance(details, Mapping) else None
            return f"mutated: {line.get('effect') or describe_change(line)}" + (f" (by {why})" if why else "")
        case "death":
            return describe_departure(str(line.get("reason", "")))
    return str(line.get("reason", ""))


def describe_departure(reason: str) -> str:
    """Return that an agent left, and why if that is known: selections begin their reasons with the word."""
    return reason if reason.startswith("left") else f"left: {reason}" if reason else "left"


def describe_change(mutation: Mapping[str, Any]) -> str:
    """Return what a mutation changed."""
    changes = [
        f"{change.get('gene')} {short_value(change.get('old'))} → {short_value(change.get('new'))}"
        for change in mutation.get("changes") or []
    ]
    return ", ".join(changes) or str(mutation.get("kind"))


def short_value(value: Any, *, digits: int = 3) -> str:
    """Return a hyperparameter's value in a few characters."""
    if isinstance(value, float):
        return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")
    return str(value)


def format_score(score: Fitness, form: str = ".3f") -> str:
    """Return a score with its standard error."""
    if not score.is_finite:
        return "not finite"
    return f"{score.mean:{form}}" + (f" ± {score.stderr:{form}}" if math.isfinite(score.stderr) else "")


def _standings(run: RunRecord) -> dict[int, dict[int, Fitness]]:
    """Return the scores of each generation's exam, by agent."""
    standings: dict[int, dict[int, Fitness]] = defaultdict(dict)
    for index, agent in run.agents.items():
        for exam in agent.exams:
            standings[exam.generation][index] = exam.score
    return standings


def places(run: RunRecord) -> dict[tuple[int, int], int]:
    """Return the place of each (generation, agent) in the exam; equal means share one, what is not finite is last."""
    ranked: dict[tuple[int, int], int] = {}
    for generation, scores in _standings(run).items():
        means = {index: score.mean if score.is_finite else -math.inf for index, score in scores.items()}
        ranked |= {(generation, i): 1 + sum(other > mean for other in means.values()) for i, mean in means.items()}
    return ranked
