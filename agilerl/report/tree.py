"""The family tree of a run as a plotly figure: generations from left to right, agents in rows."""

import math
from itertools import pairwise
from typing import Any

from agilerl.report.figures import Figure, layout, plain, row_colour
from agilerl.report.lineage import Family
from agilerl.report.load import AgentRecord, RunRecord

_ROW_HEIGHT = 104
_COLUMN_WIDTH = 104
_LABEL_CHARACTERS = 17
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def tree_width(family: Family) -> int:
    """Return the width in pixels below which the tree is not legible; on narrower screens the page scrolls it."""
    columns = len({generation for span in family.spans.values() for generation in span})
    return 90 + _COLUMN_WIDTH * columns


def tree_figure(run: RunRecord, family: Family) -> Figure | None:
    """Draw births, deaths and mutations, the winning lineage highlighted; None without agents."""
    if not run.agents:
        return None
    data = [
        _edges(_winning_edges(run, family), {"color": "rgba(245,190,40,0.55)", "width": 16}),
        *_life_lines(run, family),
        _edges(_births(run, family), {"color": "rgba(135,140,150,0.9)", "width": 1.8}, curved=True),
        _nodes(run, family),
        _labels(run, family),
        _deaths(run, family),
        _stars(run, family),
    ]
    generations = [generation for span in family.spans.values() for generation in span]
    figure_layout = layout("generation", "", height=70 + _ROW_HEIGHT * max(family.height, 1))
    figure_layout["margin"] = {"l": 16, "r": 16, "t": 4, "b": 42}
    figure_layout["xaxis"] |= {
        "dtick": 1 if max(generations) - min(generations) < 40 else 5,
        "range": [min(generations) - 0.5, max(generations) + 0.5],
        "showgrid": False,
    }
    figure_layout["yaxis"] = {"visible": False, "range": [family.height - 0.35, -0.5], "fixedrange": True}
    return {"data": data, "layout": figure_layout}


def short_value(value: Any, *, digits: int = 3) -> str:
    """Return a hyperparameter's value in a few characters."""
    if isinstance(value, float):
        return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")
    return str(value)


Edge = tuple[tuple[float, float], tuple[float, float]]


def _births(run: RunRecord, family: Family) -> list[Edge]:
    edges: list[Edge] = []
    for index, agent in run.agents.items():
        if agent.parent is not None:
            start = family.spans[index][0]
            before = [g for g in family.spans[agent.parent] if g < start] or family.spans[agent.parent][:1]
            edges.append(((before[-1], family.rows[agent.parent]), (start, family.rows[index])))
    return edges


def _winning_edges(run: RunRecord, family: Family) -> list[Edge]:
    nodes = [(generation, family.rows[agent]) for agent, generation in family.line_nodes()]
    return list(pairwise(nodes))


def _life_lines(run: RunRecord, family: Family) -> list[dict[str, Any]]:
    return [
        _edges(
            [((a, family.rows[index]), (b, family.rows[index])) for a, b in pairwise(span)],
            {"color": row_colour(family.rows[index]), "width": 4},
        )
        for index, span in family.spans.items()
        if len(span) > 1
    ]


def _edges(edges: list[Edge], line: dict[str, Any], *, curved: bool = False) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for (x0, y0), (x1, y1) in edges:
        # A smooth step that leaves the parent and reaches the child horizontally, so that crossings stay readable.
        steps = [i / 12 for i in range(13)] if y0 != y1 else [0.0, 1.0]
        x += [round(x0 + t * (x1 - x0), 4) for t in steps] + [None]
        y += [round(y0 + t * t * (3 - 2 * t) * (y1 - y0), 4) for t in steps] + [None]
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _nodes(run: RunRecord, family: Family) -> dict[str, Any]:
    means = {(i, e.generation): e.score.mean for i, agent in run.agents.items() for e in agent.exams}
    finite = [mean for mean in means.values() if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    x, y, text, fill, ink, edge, hover = [], [], [], [], [], [], []
    for index, span in family.spans.items():
        for generation in span:
            mean = means.get((index, generation), math.nan)
            # Halves: the difference of the largest floats is infinite.
            width = high / 2 - low / 2
            colour = _shade((mean / 2 - low / 2) / width if width > 0 else 0.5) if math.isfinite(mean) else None
            x.append(generation)
            y.append(family.rows[index])
            text.append(str(index))
            fill.append("rgb({},{},{})".format(*colour) if colour else "rgb(205,205,210)")
            ink.append("#fff" if colour and 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 140 else "#111")
            edge.append(row_colour(family.rows[index]))
            hover.append(_story(run.agents[index], generation))
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": x,
        "y": y,
        "text": text,
        "textfont": {"color": ink, "size": 13},
        "marker": {"size": 32, "color": fill, "opacity": 1, "line": {"color": edge, "width": 3}},
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _labels(run: RunRecord, family: Family) -> dict[str, Any]:
    """The fitness under each node, and below it what changed at birth."""
    x, y, text = [], [], []
    for index, span in family.spans.items():
        agent = run.agents[index]
        means = {exam.generation: exam.score.mean for exam in agent.exams}
        for generation in span:
            mean = means.get(generation)
            shown = "not evaluated" if mean is None else f"{mean:.3f}" if math.isfinite(mean) else "<b>not finite</b>"
            changes = _changes(agent) if generation == span[0] else []
            x.append(generation)
            y.append(family.rows[index] + 0.22)
            text.append("<br>".join([shown, *changes]))
    label = {"type": "scatter", "mode": "text", "x": x, "y": y, "text": text, "hoverinfo": "skip"}
    return {**label, "textposition": "bottom center", "textfont": {"size": 11}}


def _changes(agent: AgentRecord) -> list[str]:
    """Return how an agent was mutated at birth, in at most two short lines."""
    if not agent.mutations:
        return []
    mutation = agent.mutations[0]
    changes = mutation.get("changes") or []
    if len(changes) > 2:
        return [f"{len(changes)} genes"]
    if not changes and mutation.get("kind") not in (None, "none"):
        return [_fitting(str(mutation["kind"]), _LABEL_CHARACTERS)]
    lines = []
    for change in changes:
        value = _fitting(short_value(change.get("new"), digits=2), 9)
        lines.append(f"{_fitting(str(change.get('gene')), _LABEL_CHARACTERS - 1 - len(value))} {value}")
    return lines


def _fitting(text: str, most: int) -> str:
    return plain(text if len(text) <= most else text[: most - 1] + "…")


def _deaths(run: RunRecord, family: Family) -> dict[str, Any]:
    dead = [agent for agent in run.agents.values() if agent.died is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [family.spans[agent.index][-1] + 0.2 for agent in dead],
        "y": [family.rows[agent.index] - 0.25 for agent in dead],
        "marker": {"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": "rgba(205,75,75,0.95)"}},
        "hovertext": [f"agent {agent.index} died<br>{plain(agent.reason)}" for agent in dead],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _stars(run: RunRecord, family: Family) -> dict[str, Any]:
    elites = dict(run.elites)
    if run.is_finished and family.winner is not None:
        elites.setdefault(family.spans[family.winner][-1], family.winner)  # No selection follows the last exam.
    crowned = [(g, i) for g, i in elites.items() if i in run.agents and g in family.spans[i]]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [generation for generation, _ in crowned],
        "y": [family.rows[index] - 0.29 for _, index in crowned],
        "marker": {"symbol": "star", "size": 11, "color": "#e8a91c"},
        "hovertext": [f"agent {index} is the elite of generation {generation}" for generation, index in crowned],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _story(agent: AgentRecord, generation: int) -> str:
    lines = [f"<b>agent {agent.index}</b>, generation {generation}"]
    lines += [
        f"fitness {exam.score.mean:.4f} ± {exam.score.stderr:.4f}, n {exam.score.n}"
        for exam in agent.exams
        if exam.generation == generation
    ]
    lines.append("founder" if agent.parent is None else f"child of agent {agent.parent}")
    for mutation in agent.mutations:
        kind, changes = plain(mutation.get("kind")), mutation.get("changes") or []
        lines.append(f"mutation: {kind}")
        for change in changes:
            old, new = short_value(change.get("old")), short_value(change.get("new"))
            lines.append(plain(f"  {change.get('gene')} {old} → {new}"))
    if agent.died is not None:
        lines.append(f"died in generation {agent.died}: {plain(agent.reason)}")
    return "<br>".join(lines)


def _shade(position: float) -> tuple[int, int, int]:
    """Return the colour at ``position`` in [0, 1] of a perceptually even scale, dark to bright."""
    place = min(max(position, 0.0), 1.0) * (len(_SCALE) - 1)
    left = min(int(place), len(_SCALE) - 2)
    part = place - left
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(_SCALE[left], _SCALE[left + 1]))
    return red, green, blue
