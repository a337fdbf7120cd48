"""The figures of a run for plotly (plain dicts): curves over steps and generations, and the family tree."""

import html
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from agilerl.checks.arguments import counted
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import LEARNING_RATES
from agilerl.report import life
from agilerl.report.life import short_value
from agilerl.report.load import AgentRecord, RunRecord, number, number_or

T = TypeVar("T")
Figure = dict[str, Any]
Trace = dict[str, Any]
Point = tuple[Any, ...]
"""x, y, and whatever else is known of it."""
Points = Callable[[AgentRecord], list[Point]]
"""An agent's points, each with its generation after x and y; one whose y is None or not finite is a gap."""

CURVES = {
    "reward": "Reward",
    "kl": "KL to the reference",
    "entropy": "Entropy",
    "completions/mean_length": "Completion length (tokens)",
    "completions/clipped_ratio": "Completions truncated at the limit",
    "env/turns_mean": "Turns per episode",
    "env/success_rate": "Successful episodes",
    "env/truncated_rate": "Truncated episodes",
    "frac_reward_zero_std": "Groups with equal rewards",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "clip_ratio/region_mean": "Clipped tokens",
    "learning_rate": "Learning rate",
    "num_tokens": "Tokens trained on",
    "value_loss": "Value loss",
    "explained_variance": "Explained variance of the values",
    "rewards/accuracies": "Pairs in the right order",
    "rewards/margins": "Margin between chosen and rejected",
    "rewards/chosen": "Implicit reward, chosen",
    "rewards/rejected": "Implicit reward, rejected",
    "logps/chosen": "Log-prob, chosen",
    "logps/rejected": "Log-prob, rejected",
    "mean_token_accuracy": "Token accuracy",
    "perplexity": "Perplexity",
}
"""Train metrics that the report draws, with their titles."""

_GREY = "rgba(135,140,150,0.75)"
_MOST_POINTS = 1000
_MANY = 40
"""Points from which a line is drawn without a mark at each."""
_PHASES = ("rollout", "reward", "logprob", "update", "eval", "evolve")


def describe(title: str, figure: Figure) -> str:
    """Return a chart in one sentence, for those who cannot see it: how many lines, and their range."""
    # Bands, which have a fill, are no lines.
    lines = [trace for trace in figure["data"] if "agent" in trace.get("meta", {}) and "fill" not in trace]
    drawn = (lines or figure["data"]) if figure["layout"]["yaxis"].get("visible", True) else []
    values = [value for trace in drawn for value in trace["y"] if math.isfinite(number(value))]
    count = f", {counted(len(lines), 'agent')}" if lines else ""
    spread = f", from {short_value(min(values))} to {short_value(max(values))}" if values else ""
    return f"{title}{count}{spread}"


def agent_colour(index: int, opacity: float = 1.0) -> str:
    """Return the colour of an agent, the same in every chart and table, as CSS.

    Each is the golden angle further around the colour wheel, so that neighbours differ however many there are; medium
    lightness can be told from white and from near-black.
    """
    return f"hsla({(210 + 137.508 * index) % 360:.0f},50%,47%,{opacity})"


def escape_label(text: Any) -> str:
    """Escape text for a label, in which plotly would otherwise read tags."""
    return html.escape(str(text), quote=False)


# -- what all figures are made of -------------------------------------------------------------------------------------


def _figure(
    data: list[Trace], x: str = "", y: str = "", *, height: int, xaxis: Any = (), yaxis: Any = (), **more: Any
) -> Figure:
    """Return a figure; the page sets the colours of text and grid."""
    axis = {"zeroline": False, "automargin": True}
    layout = {
        "height": height,
        "margin": {"l": 52, "r": 14, "t": 10, "b": 42},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {**axis, "title": {"text": x}, **dict(xaxis)},
        "yaxis": {**axis, "title": {"text": y}, **dict(yaxis)},
        **more,
    }
    return {"data": data, "layout": layout}


def _trace(kind: str, points: Iterable[Sequence[Any]], **more: Any) -> Trace:
    """Return a trace of points, of which only the first two values count."""
    pairs = [(_round(point[0]), _round(point[1])) for point in points]
    silent = {} if "hovertemplate" in more else {"hoverinfo": "skip"}
    return {"type": kind, "x": [x for x, _ in pairs], "y": [y for _, y in pairs], **more} | silent


def _scatter(mode: str, points: Iterable[Sequence[Any]], **more: Any) -> Trace:
    return _trace("scatter", points, mode=mode, **more)


def _draw_agent(
    agent: AgentRecord, run: RunRecord, points: Sequence[Sequence[Any]], hover: str, *, mode: str, **more: Any
) -> Trace:
    """Return an agent's trace in its colour."""
    values = {
        "name": f"agent {agent.index}",
        "line": {"color": agent_colour(agent.index), "width": 2},
        "marker": {"color": agent_colour(agent.index), "size": 7},
        "meta": {"agent": agent.index, "winning": agent.index in run.family.line},
        "hovertemplate": f"agent {agent.index}{hover}<extra></extra>",
    }
    return _scatter(mode, points, **{**values, **more})


def _last_before(run: RunRecord, agent: AgentRecord, points: Points, x: float) -> Point | None:
    """Return the last of an ancestor's points before ``x``, of the closest ancestor that has one."""
    # A damaged lineage may run in a circle.
    seen, parent = {agent.index}, agent.parent
    while parent is not None and parent not in seen:
        seen.add(parent)
        before = [point for point in _drop_gaps(points(run.agents[parent])) if point[0] < x]
        if before:
            return before[-1]
        parent = run.agents[parent].parent
    return None


def _exam_points(agent: AgentRecord) -> list[Point]:
    """Return (step, mean, generation, standard error, n) of an agent's exams with a finite mean."""
    return [
        (e.step, e.score.mean, e.generation, number_or(e.score.stderr, 0.0), e.score.n)
        for e in agent.exams
        if e.score.is_finite
    ]


def _round(value: Any) -> Any:
    """Round to six digits, more than a screen shows; None for NaN, which JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, 0 to 1; 0.5 if these are equal."""
    width = high / 2 - low / 2  # halves: the difference of the largest floats is infinite
    return (value / 2 - low / 2) / width if width > 0 else 0.5


def _value_axis(values: Iterable[Any]) -> dict[str, Any]:
    """Return an axis of values: logarithmic with plain labels if numbers span a decade or more, names as they are."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return {"type": "category"}
    if min(numbers) <= 0 or (ratio := max(numbers) / min(numbers)) < 10:
        return {}
    # Plotly would label all digits of a decade; D2 are 1, 2 and 5, and 1 is the powers of ten.
    ticks = {"dtick": "D2"} if ratio < 100 else {"dtick": 1} if ratio < 1e10 else {}
    return {"type": "log", "tickformat": "~g", **ticks}


def _drop_gaps(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if _round(point[1]) is not None]


def thin_out(items: Sequence[T], count: int) -> list[T]:
    """Return at most ``count`` items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# -- curves over steps and generations --------------------------------------------------------------------------------


def _curves(run: RunRecord, points: Points, hover: str, axes: tuple[str, str], **more: Any) -> Figure:
    """Draw a line for each agent, a dotted one from each parent to its child, and a broad one under the winner's.

    Without an agent that has points the figure has no data.
    """
    lines, inherited, path, winning = [], list[Point](), list[Point](), set(run.family.line_nodes())
    for agent in run.agents.values():
        every = points(agent)
        if not (finite := _drop_gaps(every)):
            continue
        before = _last_before(run, agent, points, finite[0][0])
        # The point without coordinates lifts the pen.
        inherited += [] if before is None else [before, finite[0], (None, None)]
        path += [point for point in every if (agent.index, point[2]) in winning]
        thinned = thin_out(every, _MOST_POINTS)
        details = {"customdata": [point[2:] for point in thinned]} if "customdata" in hover else {}
        mode = "lines" if len(finite) >= _MANY else "lines+markers"
        lines.append(_draw_agent(agent, run, thinned, hover, mode=mode, **details))
    if not lines:
        return _figure([], *axes, **more)
    path.sort(key=lambda point: point[0])
    pen = _scatter("lines", path, line={"color": "rgba(245,190,40,0.45)", "width": 10})
    dotted = _scatter("lines", inherited, line={"color": _GREY, "width": 1, "dash": "dot"}, meta={"inheritance": True})
    if not any(value for line in lines for value in line["y"]):  # plotly would draw a constant 0 from -1 to 1
        more["yaxis"] = {**more.get("yaxis", {}), "range": [-0.05, 1]}
    return _figure([pen, dotted, *lines], *axes, **more)


def fitness_figure(run: RunRecord) -> Figure | None:
    """Draw the fitness of each agent over steps with a band of one standard error; None if there is no fitness."""
    hover = "<br>iteration %{x}<br>%{y:.4f} ± %{customdata[1]:.4f}<br>n %{customdata[2]}"
    figure = _curves(run, _exam_points, hover, ("iteration", "fitness"), height=380)
    bands = []
    for agent in run.agents.values():
        if points := _exam_points(agent):
            before = _last_before(run, agent, _exam_points, points[0][0])
            points = points if before is None else [before, *points]
            bands.append(_band(points, agent.index, agent=agent.index, winning=agent.index in run.family.line))
    if bands and "base" in run.tests and (score := run.tests["base"].score).is_finite:
        steps = [step for line in figure["data"] for step in line["x"] if step is not None]
        hover = f"the base on the test: {life.format_score(score, '.4f')}<extra></extra>"
        names = {"name": "base", "text": ["base", ""], "textposition": "top right", "hovertemplate": hover}
        line = {"color": _GREY, "width": 2, "dash": "dash"}
        bands.append(_scatter("lines+text", [(0, score.mean), (max(steps), score.mean)], line=line, **names))
    # Bands first, so that the lines lie over them.
    figure["data"] = [*bands, *figure["data"]]
    return figure if bands else None


def _band(points: Sequence[Point], index: int, **meta: Any) -> Trace:
    """Return an area of one standard error on either side of exams, in the colour of an agent."""
    colour = agent_colour(index, 0.16)
    ends = [(x, *Fitness(y, error, n).band) for x, y, _, error, n in points]
    outline = [(x, high) for x, _, high in ends] + [(x, low) for x, low, _ in reversed(ends)]
    # Of a single exam the band is a vertical line, which must be as broad as the mark to be seen.
    line = {"color": colour, "width": 1 if len(points) > 1 else 7}
    return _scatter("lines", outline, fill="toself", fillcolor=colour, line=line, meta=meta, showlegend=False)


def overlay_figure(runs: Mapping[str, RunRecord]) -> Figure | None:
    """Draw the fitness along the winning lineage of each run, by the runs' names; None if no agent has one."""
    data = []
    for position, (name, run) in enumerate(runs.items()):
        winning = set(run.family.line_nodes())
        points = [p for index in run.family.line for p in _exam_points(run.agents[index]) if (index, p[2]) in winning]
        if points:
            hover = f"{escape_label(name)}<br>%{{x}}<br>%{{y:.4f}} ± %{{customdata[1]:.4f}}<extra></extra>"
            line = {"color": agent_colour(position), "width": 3}
            more = {
                "name": escape_label(name),
                "customdata": [p[2:] for p in points],
                "hovertemplate": hover,
                "line": line,
            }
            data.append(_band(points, position, run=position))
            data.append(_scatter("lines+markers", points, meta={"run": position}, **more))
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return _figure(data, "iteration", "fitness", height=380, showlegend=True, legend=legend) if data else None


def hyperparameter_names(run: RunRecord) -> tuple[list[str], dict[str, Any]]:
    """Return the hyperparameters that differ between agents or generations, and those that never do."""
    names = dict.fromkeys(name for agent in run.agents.values() for name in agent.hyperparameters)
    moving, constant = [], {}
    training: Mapping[str, Any] = run.info["config"].get("training") or {}
    for name in names:
        values = {
            repr(agent.values(generation).get(name))
            for agent in run.agents.values()
            for generation in [*agent.generations, math.inf]
        }
        if len(values) > 1:
            moving.append(name)
        else:
            value, course = next(iter(run.agents.values())).hyperparameters.get(name), training.get("lr_schedule") or {}
            annealed = name in LEARNING_RATES and course.get("name", "constant") != "constant"
            constant[name] = f"{value} (before annealing)" if annealed else value
    return moving, constant


def hyperparameter_figure(run: RunRecord, name: str) -> Figure:
    """Draw the values of one hyperparameter that each agent was trained with in each generation."""

    def points(agent: AgentRecord) -> list[Point]:
        # A selection changes values after its generation was trained.
        return [(g, _drawable(agent.values(g - 1).get(name)), g) for g in run.family.spans[agent.index]]

    last = max((generation for span in run.family.spans.values() for generation in span), default=1)
    values = [value for agent in run.agents.values() for _, value, _ in points(agent) if value is not None]
    # Rounded up, so that there are at most 12 ticks.
    axes = {"xaxis": {"dtick": max(1, -(-last // 12))}, "yaxis": _value_axis(values)}
    return _curves(
        run, points, f"<br>generation %{{x}}<br>{escape_label(name)} %{{y}}", ("generation", ""), height=260, **axes
    )


def _drawable(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if math.isfinite(number(value)) else None
    return escape_label(value)


def curve_figure(run: RunRecord, metric: str) -> Figure | None:
    """Draw one train metric over steps, one line per agent; None if no agent has a finite value of it."""

    def points(agent: AgentRecord) -> list[Point]:
        return [(line["step"], number(line[metric]), line.get("generation")) for line in agent.train if metric in line]

    rates = [line[metric] for agent in run.agents.values() for line in agent.train if metric in line]
    yaxis = _value_axis(rates) if metric == "learning_rate" else {}
    figure = _curves(run, points, "<br>iteration %{x}<br>%{y:.4g}", ("iteration", ""), height=240, yaxis=yaxis)
    return figure if figure["data"] else None


def throughput_figure(run: RunRecord) -> Figure | None:
    """Draw tokens per second of the whole population over steps; None if the metrics do not have them."""
    points = sorted((step, value) for (_, step), value in _add_by_step(run, "tokens_per_second").items())
    if not points:
        return None
    hover = "iteration %{x}<br>%{y:,.0f} tokens/s<extra></extra>"
    mode = "lines+markers" if len(points) < _MANY else "lines"
    line = _scatter(mode, points, hovertemplate=hover, line={"color": agent_colour(0)})
    return _figure([line], "iteration", "tokens per second", height=260, yaxis={"rangemode": "tozero"})


def clock(run: RunRecord) -> dict[str, dict[int, float]]:
    """Return what the step axis can be exchanged for: ``tokens`` trained on by all agents, and ``seconds``, by step."""
    tokens: dict[int, float] = defaultdict(float)

    def counts(agent: AgentRecord) -> list[Point]:
        return [(line["step"], number(line.get("num_tokens"))) for line in agent.train]

    for agent in run.agents.values():
        finite = _drop_gaps(counts(agent))
        # A clone continues its parent's count.
        before = _last_before(run, agent, counts, finite[0][0]) if finite else None
        for (_, earlier), (step, count) in pairwise([before or (0, 0.0), *finite]):
            tokens[step] += max(0.0, count - earlier)
    steps = sorted(tokens)
    totals = dict(zip(steps, accumulate(tokens[step] for step in steps)))
    seconds = {step: value for (_, step), value in sorted(_add_by_step(run, "time/elapsed").items())}
    return {name: {0: 0.0, **course} for name, course in (("tokens", totals), ("seconds", seconds)) if course}


def phase_seconds(run: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase that was timed."""
    phases = {phase: sum(_add_by_step(run, f"time/{phase}").values()) for phase in _PHASES}
    return {phase: seconds for phase, seconds in phases.items() if seconds}


def _add_by_step(run: RunRecord, key: str) -> dict[tuple[int, int], float]:
    """Return a metric of the whole population by (generation, step).

    If all agents report the same value, it is the value of their common batch and counts once; otherwise each reports
    its own share, and the shares are added.
    """
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    lines = [line for agent in run.agents.values() for line in agent.train]
    for line in [*lines, *run.timed]:
        value = number(line.get(key))
        if math.isfinite(value) and "step" in line:
            values[int(number_or(line.get("generation"), 0)), line["step"]].append(value)
    return {moment: each[0] if len(set(each)) == 1 else sum(each) for moment, each in values.items()}


# -- the family tree: generations from left to right, agents in rows --------------------------------------------------


_ROW_HEIGHT = 104
_COLUMN_WIDTH = 38
_LABEL_CHARACTERS = 17


def tree_width(run: RunRecord) -> int:
    """Return the width in pixels below which the tree is not legible; on narrower screens the page scrolls it."""
    columns = len({generation for span in run.family.spans.values() for generation in span})
    return 90 + _COLUMN_WIDTH * columns


def tree_figure(run: RunRecord) -> Figure | None:
    """Draw births, deaths and mutations, the winning lineage highlighted; None without agents."""
    if not run.agents:
        return None
    rows, spans = run.family.rows, run.family.spans
    winning = [(generation, rows[agent]) for agent, generation in run.family.line_nodes()]
    lives = [
        _edges(pairwise([(generation, rows[index]) for generation in span]), agent_colour(index), 4)
        for index, span in spans.items()
        if len(span) > 1
    ]
    births = []
    for index, agent in run.agents.items():
        if agent.parent is not None:
            start = spans[index][0]
            # A damaged lineage may show no generation of the parent before the child's.
            before = [g for g in spans[agent.parent] if g < start] or spans[agent.parent][:1]
            births.append(((before[-1], rows[agent.parent]), (start, rows[index])))
    generations = [generation for span in spans.values() for generation in span]
    first, last = min(generations), max(generations)
    return _figure(
        [
            _edges(pairwise(winning), "rgba(245,190,40,0.55)", 16),
            *lives,
            _edges(births, "rgba(135,140,150,0.9)", 1.8),
            *_circles(run),
            _departures(run),
            _stars(run),
        ],
        "generation",
        height=70 + _ROW_HEIGHT * max(run.family.height, 1),
        margin={"l": 16, "r": 16, "t": 4, "b": 42},
        xaxis={"dtick": 1 if last - first < 40 else 5, "range": [first - 0.5, last + 0.5], "showgrid": False},
        # From high to low: row 0 is at the top.
        yaxis={"visible": False, "range": [run.family.height - 0.35, -0.5], "fixedrange": True},
    )


def _edges(edges: Iterable[tuple[Point, Point]], colour: str, width: float) -> Trace:
    points: list[Point] = []
    for (x0, y0), (x1, y1) in edges:
        # A smooth step that leaves the parent and reaches the child horizontally, so that crossings stay readable.
        steps = [i / 12 for i in range(13)] if y0 != y1 else [0.0, 1.0]
        points += [(round(x0 + t * (x1 - x0), 4), round(y0 + t * t * (3 - 2 * t) * (y1 - y0), 4)) for t in steps]
        points.append((None, None))
    return _scatter("lines", points, line={"color": colour, "width": width})


def _circles(run: RunRecord) -> list[Trace]:
    """An agent in a generation; below it its fitness, and what changed at its birth."""
    finite = [exam.score.mean for agent in run.agents.values() for exam in agent.exams if exam.score.is_finite]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    nodes, labels = [], []
    for index, span in run.family.spans.items():
        agent, row = run.agents[index], run.family.rows[index]
        exams = {exam.generation: exam for exam in agent.exams}
        (_, birth), *later = life.events(agent)
        for before, generation in zip([-1, *span], span):
            exam = exams.get(generation)
            fill: Any = "rgb(205,205,210)"
            ink, fitness = "#111", "not evaluated" if exam is None else "<b>not finite</b>"
            if exam is not None and exam.score.is_finite:
                fill, fitness = _share(exam.score.mean, low, high), f"{exam.score.mean:.3f}"
                ink = "#fff" if fill < 0.6 else "#111"  # the scale is dark at its lower end
            exact = [] if exam is None else [f"fitness {life.format_score(exam.score, '.4f')}, n {exam.score.n}"]
            story = [f"<b>agent {index}</b>, generation {generation}", *exact, escape_label(birth)]
            # What happened to it since the circle before.
            story += [escape_label(sentence) for moment, sentence in later if before < moment <= generation]
            nodes.append((generation, row, "<br>".join(story), index, fill, ink, agent_colour(index)))
            changes = _changes(agent) if generation == span[0] else []
            labels.append((generation, row + 0.22, "<br>".join([fitness, *changes])))
    _, _, _, agents, fills, inks, edges = map(list, zip(*nodes))
    scale = {"colorscale": "Viridis", "cmin": 0, "cmax": 1}
    marker = {"size": 32, "color": fills, "opacity": 1, "line": {"color": edges, "width": 3}, **scale}
    inside = {"text": [str(index) for index in agents], "textfont": {"color": inks, "size": 13}}
    circles = _marks(nodes, **marker) | {"mode": "markers+text", "customdata": agents, **inside}
    texts = [text for _, _, text in labels]
    return [circles, _scatter("text", labels, text=texts, textposition="bottom center", textfont={"size": 11})]


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


def _fitting(text: str, length: int) -> str:
    return escape_label(text if len(text) <= length else text[: length - 1] + "…")


def _departures(run: RunRecord) -> Trace:
    marks = [
        (
            run.family.spans[i][-1] + 0.2,
            run.family.rows[i] - 0.25,
            f"agent {i} {escape_label(life.describe_departure(agent.reason))}",
        )
        for i, agent in run.agents.items()
        if agent.died is not None
    ]
    return _marks(marks, symbol="x-thin", size=8, line={"width": 2, "color": "rgba(205,75,75,0.95)"})


def _stars(run: RunRecord) -> Trace:
    stars = {generation: (i, f"had the best exam of generation {generation}") for generation, i in run.elites.items()}
    if run.is_finished and run.family.winner is not None:
        # No selection follows the last exam.
        stars.setdefault(run.family.spans[run.family.winner][-1], (run.family.winner, "is the elite"))
    marks = [
        (generation, run.family.rows[index] - 0.29, f"agent {index} {what}")
        for generation, (index, what) in stars.items()
        if generation in run.family.spans.get(index, ())
    ]
    return _marks(marks, symbol="star", size=11, color="#e8a91c")


def _marks(marks: Sequence[tuple[Any, ...]], **marker: Any) -> Trace:
    """Return points, each (x, y, what is shown when the mouse is over it)."""
    texts = [mark[2] for mark in marks]
    return _scatter("markers", marks, marker=marker, hovertext=texts, hovertemplate="%{hovertext}<extra></extra>")
