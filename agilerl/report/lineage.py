"""Which agent descends from which, and where each agent is placed in the family tree."""

import math
from dataclasses import dataclass
from typing import Any

from agilerl.report.load import AgentRecord, RunRecord


@dataclass(frozen=True)
class Family:
    """Ancestry of a run's agents, laid out in rows."""

    winner: int | None
    """The elite of the run, or the best agent so far."""
    line: list[int]
    """The winner's ancestors from the founder down, the winner last."""
    spans: dict[int, list[int]]
    """Generations in which each agent is shown; never empty."""
    rows: dict[int, int]
    """Row of each agent; no two agents of one generation share one."""

    @property
    def height(self) -> int:
        """Number of rows."""
        return max(self.rows.values(), default=-1) + 1

    def line_nodes(self) -> list[tuple[int, int]]:
        """Return (agent, generation) along the winning lineage: an ancestor up to the birth of its child."""
        nodes: list[tuple[int, int]] = []
        for position, agent in enumerate(self.line):
            child = self.line[position + 1] if position + 1 < len(self.line) else None
            end = self.spans[child][0] if child is not None else math.inf
            nodes += [(agent, generation) for generation in self.spans[agent] if generation < end]
        return nodes


def trace_family(run: RunRecord) -> Family:
    """Lay out the agents of a run; the run need not be finished, nor its events complete."""
    spans = _spans(run.agents)
    winner = _winner(run)
    line: list[int] = []
    agent = winner
    while agent is not None and agent not in line:
        line.insert(0, agent)
        agent = run.agents[agent].parent
    return Family(winner, line, spans, _rows(run.agents, spans, line))


def hyperparameter_at(agent: AgentRecord, name: str, generation: int, run: RunRecord) -> Any:
    """Return the value an agent had in a generation, from its birth, its mutations and the evolution lines."""
    value = agent.hyperparameters.get(name)
    for mutation in agent.mutations:
        if mutation["generation"] <= generation:
            for change in mutation.get("changes") or []:
                if change.get("gene") == name:
                    value = change.get("new")
    for evolution in run.evolutions:
        if evolution["generation"] <= generation:
            value = evolution.get(f"evo/hp/{name}/{agent.index}", value)
    return value


def _spans(agents: dict[int, AgentRecord]) -> dict[int, list[int]]:
    spans: dict[int, list[int]] = {}
    # Parents have smaller indices, so the span of a parent is known when its untrained child needs it.
    for index, agent in agents.items():
        found = agent.generations
        if not found:
            after = [spans[agent.parent][-1] + 1] if agent.parent in spans else []
            found = [max([agent.born or 0, *after])]
        spans[index] = found
    return spans


def _winner(run: RunRecord) -> int | None:
    index = (run.summary.get("elite") or {}).get("index")
    if index in run.agents:
        return int(index)
    if run.elites and run.elites[max(run.elites)] in run.agents:
        return run.elites[max(run.elites)]
    best = [(agent.best.score.mean, index) for index, agent in run.agents.items() if agent.best is not None]
    return max(best)[1] if best else None


def _rows(agents: dict[int, AgentRecord], spans: dict[int, list[int]], line: list[int]) -> dict[int, int]:
    """Give each agent a row for its whole life: near its parent's, the winning lineage placed first."""
    rows: dict[int, int] = {}
    ends: list[float] = []
    order = sorted(spans, key=lambda index: (spans[index][0], index not in line, index))
    for index in order:
        start, end = spans[index][0], spans[index][-1]
        parent = agents[index].parent
        wanted = len(ends) if parent is None else rows.get(parent, len(ends))
        free = [row for row, busy in enumerate(ends) if busy < start]
        if free:
            row = min(free, key=lambda row: (abs(row - wanted), row))
        else:
            row = len(ends)
            ends.append(-math.inf)
        rows[index], ends[row] = row, end
    return rows
