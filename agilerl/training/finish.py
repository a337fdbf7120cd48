"""The end of a run: which agent is the elite, its test, and the summary."""

from pathlib import Path
from typing import Any

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.state import AgentState, soup
from agilerl.hpo.fitness import Fitness, pareto_front, probability_better, ranking
from agilerl.hpo.guard import quarantined
from agilerl.runs.checkpoints import agent_folder
from agilerl.training.evaluation import before_and_after
from agilerl.training.progress import Kept, Progress
from agilerl.training.records import RunWriter
from agilerl.training.setup import Session

CANDIDATE = 0.8
"""Probability of being better, by the second panel, needed to prefer an earlier agent to the last."""


def tested_elite(
    session: Session, writer: RunWriter | None, progress: Progress
) -> tuple[dict[str, Any], Fitness, list[dict[str, Any]]] | None:
    """Save and test the best agent, on the first island; return its part of the summary, its result, some answers."""
    peers, population = session.topology.peers, session.population
    if progress.elite_iteration is None:
        return None
    last = None
    if session.config.candidates > 1:  # the agent that was best in the last exam, as it is now
        # The last exams of agents that have left are still there.
        present = {agent.index for agent in population.everyone}
        best = ranking({index: fitness for index, fitness in progress.fitness.items() if index in present})[0]
        # Every process takes part in this: an agent's state may be on another one.
        state = population.state_of(best)
        last = Kept(agent=best, iteration=progress.iteration, fitness=progress.fitness[best], state=state)
    if peers.rank > 0:
        return None
    agent, mixed = _chosen(session, progress, last)
    if writer is not None:
        writer.elite(agent)
    fitness = population.evaluate("test", agents=[agent])[agent.index]
    answers = before_and_after(population, agent)
    agent.clean_up()
    elite = {
        "index": agent.index,
        "adapter": "elite",
        "exam": progress.best,
        "step": progress.elite_iteration,
        "hyperparameters": dict(agent.hyperparameters),
    }
    return elite | ({} if mixed is None else {"soup": mixed}), fitness, answers


def _chosen(session: Session, progress: Progress, last: Kept | None) -> tuple[LLMAlgorithm, dict[str, Any] | None]:
    """Return the agent of the best exam or, with candidates, the one that a second panel shows to be best.

    The best of many exams is partly luck, and an agent is on average better at the end of its training than before. So
    the best agent of the last exam is a candidate too, and an earlier one takes its place only on evidence. So does the
    soup of all candidates, if there is to be one; the second value reports its result.
    """
    population, wanted, result = session.population, session.config.selection_strategy.soup, None

    def assess(state: AgentState | None) -> Fitness:
        agent = population.revived(state)
        # A revived agent counts on from its saved tokens, so only the difference is new.
        before = agent.tokens["evaluated"]
        fitness = population.evaluate("second", agents=[agent])[agent.index]
        progress.tokens["evaluated"] += agent.tokens["evaluated"] - before
        # At once: every candidate that stays open would hold slots of the adapter bank.
        agent.clean_up()
        return fitness

    candidates = [] if last is None else [last]
    # The last exam may itself be one of the best ones.
    candidates += [k for k in progress.kept if last and (k.agent, k.iteration) != (last.agent, last.iteration)]
    # A task with few questions may have none left for a second panel.
    if len(candidates) > 1 and population.places("second"):
        panel = [assess(kept.state) for kept in candidates]
        # At equal results the better exam's; kept exams are in that order.
        best = max(range(1, len(panel)), key=lambda number: panel[number].value)
        number = best if probability_better(panel[best], panel[0]) >= CANDIDATE else 0
        chosen = candidates[number]
        progress.elite, progress.elite_iteration, progress.best = chosen.state, chosen.iteration, chosen.fitness.mean
        if wanted is not None:
            # The soup has the state of the first one apart from the adapter.
            first = sorted(candidates, key=lambda kept: kept is not chosen)
            states = [kept.state for kept in first if kept.state is not None]
            mixed = soup(states, [1 / len(states)] * len(states))
            fitness = assess(mixed)
            sure = probability_better(fitness, panel[number])
            result = {
                "of": [{"agent": kept.agent, "step": kept.iteration} for kept in candidates],
                "second": fitness.to_dict(),
                "candidate": panel[number].to_dict(),
                "probability_better": sure,
                # A tie is no evidence, even where 0.5 is asked for.
                "is_elite": sure >= wanted and sure > 0.5,
            }
            if result["is_elite"]:
                progress.elite = mixed
    return population.revived(progress.elite), result


def _front(session: Session, progress: Progress) -> list[dict[str, Any]]:
    """Return the members of the last exam's front, best reward first; none if the exam has one objective."""
    population = session.population
    if len(population.objectives) < 2:
        return []
    everyone = {agent.index: agent for agent in population.everyone}
    fitness = {index: exam for index, exam in progress.fitness.items() if index in everyone}
    sick = population.sick(fitness, collapse_guard=False) if fitness else {}
    checkpoint = Path("checkpoints") / f"{progress.iteration:06d}"
    return [
        {
            "agent": index,
            "adapter": str(agent_folder(checkpoint, index) / "actor"),
            **fitness[index].to_dict(),
            "hyperparameters": dict(everyone[index].hyperparameters),
        }
        for index in pareto_front(quarantined(fitness, sick))
    ]


def summary_of(session: Session, progress: Progress) -> dict[str, Any]:
    """Return the summary of the run, as far as it goes without an elite."""
    base, median = progress.base, progress.median
    assert base is not None
    summary: dict[str, Any] = {
        "generations": progress.generation,
        "iterations": progress.iteration,
        "agents": len(session.population.everyone),
        "tokens": progress.tokens,
        "test": {"base": base.to_dict()},
        "fitness": {str(index): f.to_dict() for index, f in sorted(progress.fitness.items())},
        "elite": None,
    }
    if front := _front(session, progress):
        summary["front"] = front
    if median is not None:
        summary["test"]["median_first_generation"] = {"index": median[0], **median[1].to_dict()}
    return summary
