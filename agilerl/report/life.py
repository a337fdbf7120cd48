"""What happened to an agent, and why: whence it came, what changed, how its exams went, what made it leave."""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agilerl.report.figures import changed_gene
from agilerl.report.load import AgentRecord, RunRecord, Score, hyperparameter_at


def lives(run: RunRecord) -> list[dict[str, Any]]:
    """Return every agent's life as plain data, in the order of birth."""
    standings, place = _standings(run), places(run)
    return [
        {
            "agent": index,
            "parent": agent.parent,
            "mate": agent.mate,
            "born": agent.born,
            "left": agent.died,
            "reason": agent.reason,
            "iterations": len(agent.train),
            "hyperparameters": {
                name: hyperparameter_at(agent, name, sys.maxsize, run) for name in sorted(agent.hyperparameters)
            },
            "exams": [
                {"generation": exam.generation, "step": exam.step, "mean": exam.score.mean, "stderr": exam.score.stderr}
                | {"n": exam.score.n, "place": place[exam.generation, index]}
                for exam in agent.exams
            ],
            "outcomes": agent.trouble,
            "symptoms": [asdict(symptom) for symptom in agent.symptoms],
            "events": [
                {"generation": generation, "sentence": said} for generation, said in _told(run, index, standings, place)
            ],
        }
        for index, agent in run.agents.items()
    ]


def told_life(run: RunRecord, index: int) -> list[tuple[int, str]]:
    """Return (generation, sentence) of what happened to an agent, its exams and their places included, in order."""
    return _told(run, index, _standings(run), places(run))


def _told(
    run: RunRecord, index: int, standings: Mapping[int, Mapping[int, float]], place: Mapping[tuple[int, int], int]
) -> list[tuple[int, str]]:
    agent = run.agents[index]
    birth, *rest = events(agent)
    exams = []
    for exam in agent.exams:
        taken = standings[exam.generation]
        best = max(taken, key=lambda i: (taken[i], -i))
        leader = next(plus(e.score) for e in run.agents[best].exams if e.generation == exam.generation)
        ahead = "" if best == index else f"; the best, agent {best}, had {leader}"
        where = f", place {place[exam.generation, index]} of {len(taken)}{ahead}" if len(taken) > 1 else ""
        exams.append((exam.generation, f"exam {plus(exam.score)}{where}"))
    # An exam comes before what the selection after it did. Both parts are in order, and sorting keeps it.
    return [birth, *sorted([*exams, *rest], key=lambda event: event[0])]


def events(agent: AgentRecord) -> list[tuple[int, str]]:
    """Return (generation, sentence) of what happened to an agent, and why, in order; its birth comes first."""
    born = "founder of the population" if agent.parent is None else f"child of agent {parents(agent)}"
    found: list[tuple[int, str]] = []
    for mutation in agent.mutations:
        details = mutation.get("details")
        why = details.get("reason") if isinstance(details, Mapping) else None
        said = mutation.get("effect") or changed(mutation)
        found.append((mutation["generation"], f"mutation: {said}" + (f" (by {why})" if why else "")))
    for outcome, steps in agent.trouble.items():
        first = next(line for line in agent.train if line["step"] == steps[0])
        times = f"{len(steps)} iteration{'s' * (len(steps) > 1)}"
        generation = first.get("generation")
        found.append(
            (generation if isinstance(generation, int) else 0, f"{outcome} from iteration {steps[0]}, {times}")
        )
    found += [(generation, reason) for generation, reason in agent.verdicts if generation != agent.died]
    last = agent.generations[-1] if agent.generations else agent.born or 0
    found += [(last, f"its last iterations: {symptom}") for symptom in agent.symptoms]
    if agent.died is not None:
        why = agent.reason if agent.reason.startswith("left") else f"died: {agent.reason}" if agent.reason else "died"
        found.append((agent.died, why))
    return [(agent.born or 0, born), *sorted(found, key=lambda event: event[0])]


def parents(agent: AgentRecord) -> str:
    """Return the index of the parent, or both."""
    first = "founder" if agent.parent is None else str(agent.parent)
    return first if agent.mate is None else f"{first} and {agent.mate}"


def changed(mutation: Mapping[str, Any]) -> str:
    """Return what a mutation changed."""
    changes = map(changed_gene, mutation.get("changes") or [])
    return ", ".join(changes) or str(mutation.get("kind"))


def plus(score: Score) -> str:
    """Return a score with its standard error."""
    if not score.is_finite:
        return "not finite"
    return f"{score.mean:.3f}" + (f" ± {score.stderr:.3f}" if math.isfinite(score.stderr) else "")


def _standings(run: RunRecord) -> dict[int, dict[int, float]]:
    """Return the means of each generation's exam, by agent; what is not finite ranks last."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for index, agent in run.agents.items():
        for exam in agent.exams:
            found[exam.generation][index] = exam.score.mean if exam.score.is_finite else -math.inf
    return found


def places(run: RunRecord) -> dict[tuple[int, int], int]:
    """Return the place of each (generation, agent) in the exam; equal means share one."""
    return {
        (generation, index): 1 + sum(other > mean for other in means.values())
        for generation, means in _standings(run).items()
        for index, mean in means.items()
    }
