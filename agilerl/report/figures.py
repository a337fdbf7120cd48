"""The figures of a run for plotly (plain dicts): curves over steps and generations, and the family tree."""

import html
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from agilerl.hpo.strategies import UNITS
from agilerl.report.load import AgentRecord, Exam, Family, RunRecord, front_exams, hyperparameter_at, number, number_or

Figure = dict[str, Any]

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

# Mid-tones that are easy to distinguish on white and on near-black.
_COLOURS = (
    "#3f8fd2",
    "#e0803a",
    "#35a36b",
    "#cf5a87",
    "#8d78d6",
    "#b38a2e",
    "#2ba3a8",
    "#8a9099",
    "#b0603c",
    "#6a9a2b",
)
_GREY = "rgba(135,140,150,0.75)"
_MARKER_PEN = "rgba(245,190,40,0.45)"
_MOST_POINTS = 1000
_LEAST_FREEDOM = 5
_PHASES = ("rollout", "reward", "logprob", "update", "eval", "evolve")


def described(title: str, figure: Figure) -> str:
    """Return a chart in one sentence, for those who cannot see it: how many lines, and their range."""
    lines = [trace for trace in figure["data"] if "agent" in (trace.get("meta") or {}) and "fill" not in trace]
    drawn = (lines or figure["data"]) if figure["layout"]["yaxis"].get("visible", True) else []
    values = [
        value
        for trace in drawn
        for value in trace.get("y") or []
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    count = f", {len(lines)} agent{'s' * (len(lines) > 1)}" if lines else ""
    spread = f", from {short_value(min(values))} to {short_value(max(values))}" if values else ""
    return f"{title}{count}{spread}"


def row_colour(row: int, opacity: float = 1.0) -> str:
    """Return the colour of a row of the family tree, as CSS."""
    colour = _COLOURS[row % len(_COLOURS)]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return colour if opacity == 1.0 else f"rgba({red},{green},{blue},{opacity})"


def plain(text: Any) -> str:
    """Escape text for a label, in which plotly would otherwise read tags."""
    return html.escape(str(text), quote=False)


def layout(x: str, y: str, *, height: int = 300, **more: Any) -> dict[str, Any]:
    """Return the layout that all figures share; the page sets the colours of text and grid."""
    axis = {"zeroline": False, "automargin": True}
    return {
        "height": height,
        "margin": {"l": 52, "r": 14, "t": 10, "b": 42},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        **more,
    }


def fitness_figure(run: RunRecord, family: Family, *, y_range: tuple[float, float] | None = None) -> Figure | None:
    """Draw the fitness of each agent over steps with a band of one standard error; None if there is no fitness."""
    bands: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    inherited: list[tuple[float | None, float | None]] = []
    for agent in run.agents.values():
        points = [(e.step, e.score.mean, number_or(e.score.stderr, 0.0), e.score.n) for e in agent.exams]
        points = [point for point in points if math.isfinite(point[1])]
        if not points:
            continue
        before = _last_exam(run, agent, points[0][0])
        if before is not None:
            inherited += [before[:2], (points[0][0], points[0][1]), (None, None)]
        colour = row_colour(family.rows[agent.index])
        band = ([before] if before is not None else []) + [point[:3] for point in points]
        bands.append(_band(band, agent, family))
        lines.append(
            {
                **_trace(agent, family, [p[0] for p in points], [p[1] for p in points]),
                "mode": "lines+markers",
                "marker": {"size": 7, "color": colour},
                # The band of a single point would be invisible.
                "error_y": {"array": [_rounded(p[2]) for p in points], "visible": len(band) == 1, "thickness": 1.5},
                "customdata": [[p[2], p[3]] for p in points],
                "hovertemplate": f"agent {agent.index}<br>step %{{x}}<br>%{{y:.4f}} ± %{{customdata[0]:.4f}}"
                "<br>n %{customdata[1]}<extra></extra>",
            }
        )
    if not lines:
        return None
    winning = {(a, g) for a, g in family.line_nodes()}
    path = sorted(
        (e.step, e.score.mean) for a, agent in run.agents.items() for e in agent.exams if (a, e.generation) in winning
    )
    if "base" in run.tests and math.isfinite(run.tests["base"][1].mean):
        lines.insert(0, _base_line(run, lines))
    figure_layout = layout("step", "fitness", height=380)
    if y_range is not None:
        figure_layout["yaxis"]["range"] = list(y_range)
    return {"data": [*bands, _marker_pen(path), _inheritance(inherited), *lines], "layout": figure_layout}


def _base_line(run: RunRecord, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    score = run.tests["base"][1]
    steps = [step for line in lines for step in line["x"]]
    return {
        "type": "scatter",
        "name": "base",
        "mode": "lines+text",
        "x": [min(0, *steps), max(steps)],
        "y": [_rounded(score.mean)] * 2,
        "text": ["base", ""],
        "textposition": "top right",
        "line": {"color": _GREY, "width": 2, "dash": "dash"},
        "hovertemplate": f"the base on the test: {score.mean:.4f} ± {number_or(score.stderr, 0.0):.4f}<extra></extra>",
    }


def objective_figure(run: RunRecord, family: Family, cost: str) -> Figure | None:
    """Draw each agent's exams, reward against a cost, and mark the front; None if no exam has both."""
    data: list[dict[str, Any]] = []
    for index, agent in run.agents.items():
        exams = [e for e in agent.exams if cost in e.costs]
        exams = [e for e in exams if math.isfinite(e.costs[cost].mean) and math.isfinite(e.score.mean)]
        if not exams:
            continue
        colour = row_colour(family.rows[index], 0.45)
        data.append(
            {
                **_trace(agent, family, [_rounded(e.costs[cost].mean) for e in exams], [e.score.mean for e in exams]),
                "mode": "lines+markers",
                "line": {"color": row_colour(family.rows[index], 0.25), "width": 1},
                # The last exam is full, the earlier ones are pale.
                "marker": {
                    "size": [6] * (len(exams) - 1) + [10],
                    "color": [colour] * (len(exams) - 1) + [row_colour(family.rows[index])],
                },
                "customdata": [[e.generation, *_errors(e.score.stderr, e.costs[cost].stderr)] for e in exams],
                "hovertemplate": f"agent {index}, generation %{{customdata[0]}}<br>reward %{{y:.4f}} ± "
                f"%{{customdata[1]:.4f}}<br>{plain(cost)} %{{x:.4g}} ± %{{customdata[2]:.2g}}<extra></extra>",
            }
        )
    if not data:
        return None
    front = {i: exam for i, exam in front_exams(run).items() if cost in exam.costs}
    ring = {
        "type": "scatter",
        "name": "front",
        "mode": "markers+text",
        "x": [_rounded(exam.costs[cost].mean) for exam in front.values()],
        "y": [_rounded(exam.score.mean) for exam in front.values()],
        "text": [str(index) for index in front],
        "textposition": "top center",
        "marker": {"symbol": "circle-open", "size": 18, "color": "#e8a91c", "line": {"width": 3}},
        "hoverinfo": "skip",
    }
    return {"data": [*data, ring], "layout": layout(f"{plain(cost)} ({UNITS.get(cost, '')})", "reward", height=340)}


def _errors(*errors: float) -> list[float]:
    return [number_or(error, 0.0) for error in errors]


def hyperparameter_names(run: RunRecord) -> tuple[list[str], dict[str, Any]]:
    """Return the hyperparameters that differ between agents or generations, and those that never do."""
    names = dict.fromkeys(name for agent in run.agents.values() for name in agent.hyperparameters)
    moving, constant = [], {}
    for name in names:
        values = {
            repr(hyperparameter_at(agent, name, generation, run)): None
            for agent in run.agents.values()
            for generation in [*agent.generations, 10**9]
        }
        if len(values) > 1:
            moving.append(name)
        else:
            constant[name] = next(iter(run.agents.values())).hyperparameters.get(name)
    return moving, constant


def hyperparameter_figure(run: RunRecord, family: Family, name: str) -> Figure:
    """Draw one hyperparameter over generations; the axis is logarithmic if the values span a decade or more."""
    data: list[dict[str, Any]] = []
    inherited: list[tuple[Any, Any]] = []
    seen: dict[tuple[int, int], Any] = {}
    for index, agent in run.agents.items():
        span = family.spans[index]
        values = [_drawable(hyperparameter_at(agent, name, generation, run)) for generation in span]
        seen.update({(index, generation): value for generation, value in zip(span, values)})
        if agent.parent is not None:
            before = [g for g in family.spans[agent.parent] if g < span[0]]
            if before:
                inherited += [(before[-1], seen.get((agent.parent, before[-1]))), (span[0], values[0]), (None, None)]
        hover = f"agent {index}<br>generation %{{x}}<br>{plain(name)} %{{y}}<extra></extra>"
        data.append(
            {
                **_trace(agent, family, span, values),
                "mode": "lines+markers",
                "marker": {"size": 7, "color": row_colour(family.rows[index])},
                "hovertemplate": hover,
            }
        )
    numbers = [v for v in seen.values() if isinstance(v, int | float)]
    path = [(generation, seen.get((agent, generation))) for agent, generation in family.line_nodes()]
    figure_layout = layout("generation", "", height=260)
    figure_layout["xaxis"]["dtick"] = _tick(max((g for _, g in seen), default=1))
    if numbers and min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
        figure_layout["yaxis"] |= _decades(min(numbers), max(numbers))
    elif not numbers:
        figure_layout["yaxis"]["type"] = "category"
    return {"data": [_marker_pen(path), _inheritance(inherited), *data], "layout": figure_layout}


def exam_gains(run: RunRecord) -> dict[int, list[tuple[AgentRecord, float]]]:
    """Return each agent's gain in fitness since the exam before, by generation.

    A child's first exam is compared with its parent's last, a founder's with zero, because founders begin alike.
    An exam that is not finite is the greatest loss.
    """
    gains: dict[int, list[tuple[AgentRecord, float]]] = defaultdict(list)
    for agent in run.agents.values():
        before = 0.0 if agent.parent is None else math.nan
        for exam in agent.exams:
            if math.isnan(before) and (inherited := _last_exam(run, agent, exam.step)):
                before = inherited[1]
            finite = math.isfinite(exam.score.mean)
            if not math.isnan(before):
                gains[exam.generation].append((agent, exam.score.mean - before if finite else -math.inf))
            if finite:
                before = exam.score.mean
    return gains


def importance(run: RunRecord, names: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Return the rank correlation of each hyperparameter with the gain that followed, and the degrees of freedom.

    Agents are ranked among those of their generation, since gains shrink as a run goes on while values drift: over all
    generations together, what helps would seem to harm. The value is the one that the agent trained with since the
    exam before. Of hyperparameters with 5 degrees or more, the strongest first.
    """
    from scipy.stats import rankdata  # takes a while to import

    found = {}
    for name in names:
        ranked, freedom = [], 0
        for generation, gains in exam_gains(run).items():
            pairs = [(number(hyperparameter_at(agent, name, generation - 1, run)), gain) for agent, gain in gains]
            pairs = [pair for pair in pairs if math.isfinite(pair[0])]
            if len({value for value, _ in pairs}) > 1 and len({gain for _, gain in pairs}) > 1:
                ranks = [rankdata(side) - (len(pairs) + 1) / 2 for side in zip(*pairs)]
                ranked += list(zip(*(side / len(pairs) for side in ranks)))
                freedom += len(pairs) - 1
        if freedom >= _LEAST_FREEDOM:
            both = sum(a * b for a, b in ranked)
            found[name] = (float(both / math.prod(math.hypot(*side) for side in zip(*ranked))), freedom)
    return dict(sorted(found.items(), key=lambda item: -abs(item[1][0])))


def importance_figure(run: RunRecord, names: Sequence[str]) -> Figure | None:
    """Draw the importance of each hyperparameter as a bar, pale within noise; None if there are too few exams."""
    found = importance(run, names)
    if not found:
        return None
    # Of unrelated ranks the correlation has about this standard deviation.
    clear = [abs(rho) > 2 / math.sqrt(freedom) for rho, freedom in found.values()]
    bar = {
        "type": "bar",
        "x": [plain(name) for name in found],
        "y": [_rounded(rho) for rho, _ in found.values()],
        "marker": {"color": [row_colour(0, 1.0 if is_clear else 0.3) for is_clear in clear]},
        "customdata": [[freedom] for _, freedom in found.values()],
        "hovertemplate": "%{x}<br>rank correlation %{y:.2f}<br>%{customdata[0]} degrees of freedom<extra></extra>",
    }
    figure_layout = layout("", "rank correlation", height=300)
    figure_layout["xaxis"]["type"] = "category"
    figure_layout["yaxis"] |= {"range": [-1.05, 1.05], "zeroline": True}
    return {"data": [bar], "layout": figure_layout}


def parallel_figure(run: RunRecord, family: Family, names: Sequence[str]) -> Figure | None:
    """Draw each agent as a line across its last hyperparameters to its last fitness; None if no agent has both."""
    columns: dict[str, dict[int, float]] = {name: {} for name in [*names, "fitness"]}
    for index, agent in run.agents.items():
        exams = [exam for exam in agent.exams if math.isfinite(exam.score.mean)]
        if exams:
            columns["fitness"][index] = exams[-1].score.mean
            for name in names:
                value = number(hyperparameter_at(agent, name, exams[-1].generation - 1, run))
                if math.isfinite(value):
                    columns[name][index] = value
    columns = {name: found for name, found in columns.items() if found}
    if "fitness" not in columns or len(columns) < 2:
        return None
    places = {name: _places(found) for name, found in columns.items()}
    data = []
    for index, agent in run.agents.items():
        inside = [place for place, name in enumerate(columns) if index in columns[name]]
        shown = [name for name in columns if index in columns[name]]
        if len(inside) > 1:
            trace = _trace(agent, family, inside, [places[name][index] for name in shown])
            said = [[plain(name), short_value(columns[name][index])] for name in shown]
            hover = f"agent {index}<br>%{{customdata[0]}} %{{customdata[1]}}<extra></extra>"
            data.append({**trace, "mode": "lines+markers", "customdata": said, "hovertemplate": hover})
    if not data:
        return None
    ends = [
        f"{plain(name)}<br>{short_value(min(found.values()))} to {short_value(max(found.values()))}"
        for name, found in columns.items()
    ]
    figure_layout = layout("", "", height=300)
    figure_layout["xaxis"] |= {"tickvals": list(range(len(columns))), "ticktext": ends}
    figure_layout["xaxis"]["range"] = [-0.3, len(columns) - 0.7]
    figure_layout["yaxis"] = {"visible": False, "range": [-0.06, 1.06]}
    # The fittest agents are drawn last, over the others.
    data.sort(key=lambda trace: columns["fitness"][trace["meta"]["agent"]])
    return {"data": data, "layout": figure_layout}


def _places(values: dict[int, float]) -> dict[int, float]:
    """Return where values lie between the least (0) and the largest (1); by logarithm if they span a decade or more."""
    low, high = min(values.values()), max(values.values())
    if low > 0 and high / low >= 10:
        values = {index: math.log(value) for index, value in values.items()}
        low, high = math.log(low), math.log(high)
    width = high / 2 - low / 2  # halves: the difference of the largest floats is infinite
    return {index: (value / 2 - low / 2) / width if width > 0 else 0.5 for index, value in values.items()}


def curve_figure(run: RunRecord, family: Family, metric: str) -> Figure | None:
    """Draw one train metric over steps, one line per agent; None if no agent has a finite value of it."""
    data: list[dict[str, Any]] = []
    inherited: list[tuple[float | None, float | None]] = []
    for agent in run.agents.values():
        points = [(line["step"], number(line[metric])) for line in agent.train if metric in line]
        finite = [point for point in points if math.isfinite(point[1])]
        if not finite:
            continue
        before = _last_value(run, agent, metric, points[0][0])
        if before is not None:
            inherited += [before, finite[0], (None, None)]
        # A value that is not finite leaves a gap in the line.
        thinned = points[:: max(1, len(points) // _MOST_POINTS)]
        data.append(
            {
                **_trace(agent, family, [p[0] for p in thinned], [p[1] for p in thinned]),
                "mode": "lines" if len(finite) > 1 else "markers",
                "hovertemplate": f"agent {agent.index}<br>step %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
    if not data:
        return None
    figure_layout = layout("step", "", height=240)
    values = [v for trace in data for v in trace["y"] if v is not None and v > 0]
    if metric == "learning_rate" and values and max(values) / min(values) >= 10:
        figure_layout["yaxis"] |= _decades(min(values), max(values))
    lines: dict[tuple[int, Any], list[dict[str, Any]]] = defaultdict(list)
    for index in family.line:
        for line in run.agents[index].train:
            if isinstance(line.get("generation"), int | float):
                lines[index, line["generation"]].append(line)
    path = [(line["step"], number(line.get(metric))) for node in family.line_nodes() for line in lines[node]]
    return {"data": [_marker_pen(path, width=8), _inheritance(inherited), *data], "layout": figure_layout}


def throughput_figure(run: RunRecord) -> Figure | None:
    """Draw tokens per second of the whole population over steps; None if the metrics do not have them."""
    points = sorted((step, value) for (_, step), value in _by_step(run, "tokens_per_second").items())
    if not points:
        return None
    x, y = [p[0] for p in points], [_rounded(p[1]) for p in points]
    line = {"type": "scatter", "mode": "lines+markers" if len(x) < 40 else "lines", "x": x, "y": y}
    hover = {"hovertemplate": "step %{x}<br>%{y:,.0f} tokens/s<extra></extra>", "line": {"color": row_colour(0)}}
    figure_layout = layout("step", "tokens per second", height=260)
    figure_layout["yaxis"]["rangemode"] = "tozero"
    return {"data": [{**line, **hover}], "layout": figure_layout}


def phase_seconds(run: RunRecord) -> dict[str, dict[int, float]]:
    """Return the seconds of each phase that was timed, by generation."""
    phases: dict[str, dict[int, float]] = {}
    for phase in _PHASES:
        seconds: dict[int, float] = defaultdict(float)
        for (generation, _), value in _by_step(run, f"time/{phase}").items():
            seconds[generation] += value
        if any(seconds.values()):
            phases[phase] = dict(sorted(seconds.items()))
    return phases


def time_figure(run: RunRecord) -> Figure | None:
    """Draw the seconds of each phase, summed over a generation, as stacked bars; None if nothing was timed."""
    data = []
    last = 0
    for phase, seconds in phase_seconds(run).items():
        last = max(last, *seconds)
        bar = {"type": "bar", "name": phase, "x": list(seconds), "y": [_rounded(s) for s in seconds.values()]}
        hover = f"{phase}<br>generation %{{x}}<br>%{{y:.2f}} s<extra></extra>"
        data.append({**bar, "marker": {"color": row_colour(_PHASES.index(phase))}, "hovertemplate": hover})
    if not data:
        return None
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    figure_layout = layout("generation", "seconds", height=260, barmode="stack", showlegend=True, legend=legend)
    figure_layout["margin"]["t"] = 34
    figure_layout["xaxis"]["dtick"] = _tick(last)
    return {"data": data, "layout": figure_layout}


def _by_step(run: RunRecord, key: str) -> dict[tuple[int, int], float]:
    """Return a metric of the whole population by (generation, step).

    If all agents report the same value, it is the value of their common batch and counts once; otherwise each reports
    its own share, and the shares are added.
    """
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    lines = [line for agent in run.agents.values() for line in agent.train]
    for line in [*lines, *run.exam_lines, *run.evolutions]:
        value = number(line.get(key))
        if math.isfinite(value) and "step" in line:
            values[int(number_or(line.get("generation"), 0)), line["step"]].append(value)
    return {place: found[0] if len(set(found)) == 1 else sum(found) for place, found in values.items()}


def _trace(agent: AgentRecord, family: Family, x: Sequence[Any], y: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": f"agent {agent.index}",
        "x": list(x),
        "y": [_rounded(value) for value in y],
        "line": {"color": row_colour(family.rows[agent.index]), "width": 2},
        "meta": {"agent": agent.index, "winning": agent.index in family.line},
    }


def _band(points: Sequence[tuple[float, float, float]], agent: AgentRecord, family: Family) -> dict[str, Any]:
    x = [p[0] for p in points] + [p[0] for p in reversed(points)]
    y = [p[1] + p[2] for p in points] + [p[1] - p[2] for p in reversed(points)]
    colour = row_colour(family.rows[agent.index], 0.16)
    return {
        **_trace(agent, family, x, y),
        "mode": "lines",
        "fill": "toself",
        "fillcolor": colour,
        "line": {"color": colour, "width": 1},
        "hoverinfo": "skip",
    }


def _inheritance(points: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Dotted lines from a parent's last point to the first point of its child."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [p[0] for p in points],
        "y": [_rounded(p[1]) for p in points],
        "line": {"color": _GREY, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {"inheritance": True},
    }


def _marker_pen(path: Sequence[tuple[Any, Any]], *, width: int = 12) -> dict[str, Any]:
    """A broad line under the winning lineage."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [p[0] for p in path],
        "y": [_rounded(p[1]) for p in path],
        "line": {"color": _MARKER_PEN, "width": width},
        "hoverinfo": "skip",
    }


def _ancestors(run: RunRecord, agent: AgentRecord) -> Iterator[AgentRecord]:
    seen = {agent.index}
    parent = agent.parent
    while parent is not None and parent not in seen:
        seen.add(parent)
        yield run.agents[parent]
        parent = run.agents[parent].parent


def _last_exam(run: RunRecord, agent: AgentRecord, step: int) -> tuple[int, float, float] | None:
    """Return (step, mean, standard error) of the closest ancestor's last finite exam before ``step``."""
    for ancestor in _ancestors(run, agent):
        exams = [e for e in ancestor.exams if e.step < step and math.isfinite(e.score.mean)]
        if exams:
            return exams[-1].step, exams[-1].score.mean, number_or(exams[-1].score.stderr, 0.0)
    return None


def _last_value(run: RunRecord, agent: AgentRecord, metric: str, step: int) -> tuple[int, float] | None:
    for ancestor in _ancestors(run, agent):
        points = [(line["step"], number(line.get(metric))) for line in ancestor.train if line["step"] < step]
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            return finite[-1]
    return None


def _drawable(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if math.isfinite(number(value)) else None
    return plain(value)


def _rounded(value: Any) -> Any:
    """Round to six digits, more than a screen shows; None for NaN, which JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _decades(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with plain labels: 1, 2 and 5 of each decade if there are few decades."""
    first = math.floor(math.log10(low))
    last = min(math.ceil(math.log10(high)), sys.float_info.max_10_exp)
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    ticks = [tick for tick in ticks if 0 < tick < math.inf]
    labels = [f"{tick:g}".replace("e-0", "e-").replace("e+0", "e+") for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": labels}


def _tick(last: int) -> int:
    return max(1, -(-last // 12))


# -- the family tree: generations from left to right, agents in rows --------------------------------------------------


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
        _edges(_births(run, family), {"color": "rgba(135,140,150,0.9)", "width": 1.8}),
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


def _edges(edges: list[Edge], line: dict[str, Any]) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for (x0, y0), (x1, y1) in edges:
        # A smooth step that leaves the parent and reaches the child horizontally, so that crossings stay readable.
        steps = [i / 12 for i in range(13)] if y0 != y1 else [0.0, 1.0]
        x += [round(x0 + t * (x1 - x0), 4) for t in steps] + [None]
        y += [round(y0 + t * t * (3 - 2 * t) * (y1 - y0), 4) for t in steps] + [None]
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _nodes(run: RunRecord, family: Family) -> dict[str, Any]:
    exams = {(i, e.generation): e for i, agent in run.agents.items() for e in agent.exams}
    finite = [exam.score.mean for exam in exams.values() if math.isfinite(exam.score.mean)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    x, y, text, fill, ink, edge, hover, agents = [], [], [], [], [], [], [], []
    for index, span in family.spans.items():
        for generation in span:
            exam = exams.get((index, generation))
            mean = math.nan if exam is None else exam.score.mean
            # Halves: the difference of the largest floats is infinite.
            width = high / 2 - low / 2
            colour = _shade((mean / 2 - low / 2) / width if width > 0 else 0.5) if math.isfinite(mean) else None
            x.append(generation)
            y.append(family.rows[index])
            text.append(str(index))
            fill.append("rgb({},{},{})".format(*colour) if colour else "rgb(205,205,210)")
            ink.append("#fff" if colour and 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 140 else "#111")
            edge.append(row_colour(family.rows[index]))
            hover.append(_story(run.agents[index], generation, exam))
            agents.append(index)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": x,
        "y": y,
        "text": text,
        "textfont": {"color": ink, "size": 13},
        "marker": {"size": 32, "color": fill, "opacity": 1, "line": {"color": edge, "width": 3}},
        "customdata": agents,
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


def _story(agent: AgentRecord, generation: int, exam: Exam | None) -> str:
    lines = [f"<b>agent {agent.index}</b>, generation {generation}"]
    if exam is not None:
        lines.append(f"fitness {exam.score.mean:.4f} ± {exam.score.stderr:.4f}, n {exam.score.n}")
    second = "" if agent.mate is None else f" and agent {agent.mate}"
    lines.append("founder" if agent.parent is None else f"child of agent {agent.parent}{second}")
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
