"""The end of a run: which agent is the elite, its test, and the summary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.exams import Panels
from agilerl.algorithms.state import AgentState, soup
from agilerl.checks.arguments import counted
from agilerl.hpo.fitness import Fitness, probability_better, ranking
from agilerl.population import Population
from agilerl.training.evaluation import before_and_after, constant_answer
from agilerl.training.progress import Kept, Progress
from agilerl.training.records import RunWriter
from agilerl.training.setup import Session

CANDIDATE = 0.8
"""Probability of being better, by the second panel, needed to prefer an earlier agent to the last."""


def tested_elite(
    session: Session, writer: RunWriter | None, progress: Progress
) -> tuple[dict[str, Any], Fitness, list[dict[str, Any]]] | None:
    """Save and test the best agent; return its part of the summary, its result, some answers."""
    population = session.population
    if progress.best == -math.inf:
        return None
    # The last exams of agents that have left are still there.
    present = {agent.index for agent in population.agents}
    best = ranking({i: f for i, f in progress.fitness.items() if i in present} or progress.fitness)[0]
    last = Kept(agent=best, iteration=progress.iteration, fitness=progress.fitness[best])
    if session.config.candidates > 1:
        last.state = population.agent(best).state()
    agent, choice = _chosen(session, progress, last)
    population.runtime.processes.first(lambda: writer.elite(agent) if writer is not None else None)
    fitness = population.evaluate("test", agents=[agent])[agent.index]
    assert progress.base is not None
    choice["constant_answer"] = constant_answer(population, progress.base.mean)
    answers = before_and_after(population, agent)
    agent.clean_up()
    choice |= {"index": agent.index, "adapter": "elite", "exam": progress.best, "step": progress.elite_iteration}
    return {**choice, "hyperparameters": dict(agent.hyperparameters)}, fitness, answers


def _chosen(session: Session, progress: Progress, last: Kept) -> tuple[LLMAlgorithm, dict[str, Any]]:
    """Return the agent of the best exam or, with candidates, the one that a second panel shows to be best.

    The best of many exams is partly luck, and an agent is on average better at the end of its training than before. So
    the best agent of the last exam is a candidate too, and an earlier one takes its place only on evidence. So does the
    soup of all candidates, if there is to be one. The second value reports its result, the ``reason`` of the choice,
    and what decided it: the score of the elite and that of the best agent of the last exam.
    """
    population, wanted = session.population, session.config.selection_strategy.soup

    def assess(state: AgentState | None) -> Fitness:
        agent = population.revived(state)
        # A revived agent counts on from its saved tokens, so only the difference is new.
        before = agent.tokens["evaluated"]
        fitness = population.evaluate("second", agents=[agent])[agent.index]
        progress.tokens["evaluated"] += agent.tokens["evaluated"] - before
        # At once: every candidate that stays open would hold slots of the adapter bank.
        agent.clean_up()
        return fitness

    candidates = [last]
    # The last exam may itself be one of the best ones.
    # Iteration 0 is an agent before any training, kept without an exam.
    candidates += [k for k in progress.kept if (k.agent, k.iteration) != (last.agent, last.iteration) and k.iteration]
    best_at_end = "best of the last exam" if len(population.agents) > 1 else "the only agent at the end"
    choice: dict[str, Any] = {"reason": f"{best_at_end}, {progress.best:.3f}"}
    if progress.elite_iteration != last.iteration:
        choice["reason"] = f"best exam, {progress.best:.3f}; the last one's best had {last.fitness.mean:.3f}"
    decided = {"panel": "exam", "elite": progress.best, "last": last.fitness.mean, "n": last.fitness.n}
    # A task with few questions may have none left for a second panel.
    if session.config.candidates > 1 and len(candidates) > 1 and population.examiner.places("second"):
        panel = [assess(kept.state) for kept in candidates]
        # At equal results the better exam's; kept exams are in that order.
        best = max(range(1, len(panel)), key=lambda number: panel[number].value)
        sure = probability_better(panel[best], panel[0])
        number = best if sure >= CANDIDATE else 0
        chosen = candidates[number]
        earlier, at_end = (f"{one.mean:.3f} on a second panel" for one in (panel[best], panel[0]))
        rival = f"agent {candidates[best].agent} after iteration {candidates[best].iteration}"
        choice["reason"] = f"{best_at_end}, {at_end}; {rival} had {panel[best].mean:.3f}"
        if number:
            choice["reason"] = f"best candidate, {earlier}; the last exam's best had {panel[0].mean:.3f}"
        choice["reason"] += f" (P = {sure:.2f}{f' < {CANDIDATE:g}' * (not number)} that it is better)"
        decided = {"panel": "second", "elite": panel[number].mean, "last": panel[0].mean, "n": panel[0].n}
        progress.elite, progress.elite_iteration, progress.best = chosen.state, chosen.iteration, chosen.fitness.mean
        if wanted is not None:
            # The soup has the state of the first one apart from the adapter.
            # sorted() is stable: the chosen one comes first, and the others keep their order.
            first = sorted(candidates, key=lambda kept: kept is not chosen)
            states = [kept.state for kept in first if kept.state is not None]
            mixed = soup(states, [1 / len(states)] * len(states))
            fitness = assess(mixed)
            sure = probability_better(fitness, panel[number])
            choice["soup"] = {
                "of": [{"agent": kept.agent, "step": kept.iteration} for kept in candidates],
                "second": fitness.to_dict(),
                "candidate": panel[number].to_dict(),
                "probability_better": sure,
                # A tie is no evidence, even where 0.5 is asked for.
                "is_elite": sure >= wanted and sure > 0.5,
            }
            if choice["soup"]["is_elite"]:
                progress.elite = mixed
                choice["reason"] = f"soup of all candidates, {fitness.mean:.3f} on a second panel; the best one had "
                choice["reason"] += f"{panel[number].mean:.3f} (P = {sure:.2f} that the soup is better)"
    return population.revived(progress.elite), {**choice, "decided_by": decided}


def left_out(population: Population, results: Mapping[Panels, Sequence[Fitness]]) -> list[str]:
    """Return a sentence for each panel of which questions are left out of results, since they got no grade."""
    sentences = []
    for split, each in results.items():
        counts, size = {fitness.n for fitness in each}, len(population.examiner.places(split))
        if size > min(counts, default=size):
            some = f"{'up to ' * (len(counts) > 1)}{size - min(counts)} of {counted(size, f'{split} question')}"
            sentences.append(f"{some} got no grade and are left out of the results of the {split}")
    return sentences


def summary_of(session: Session, progress: Progress) -> dict[str, Any]:
    """Return the summary of the run, as far as it goes without an elite."""
    base, median = progress.base, progress.median
    assert base is not None
    summary: dict[str, Any] = {
        "generations": progress.generation,
        "iterations": progress.iteration,
        "agents": len(session.population.agents),
        "tokens": progress.tokens,
        "test": {"base": base.to_dict()},
        "fitness": {str(index): f.to_dict() for index, f in sorted(progress.fitness.items())},
        "elite": None,
    }
    if median is not None:
        summary["test"]["median_first_generation"] = {"index": median.index, **median.fitness.to_dict()}
    return summary
