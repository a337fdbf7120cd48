"""One self-contained HTML page about one run, or about several side by side."""

import base64
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from agilerl.arguments import Location, checked, shown
from agilerl.errors import CheckpointError, WriteError
from agilerl.report import figures
from agilerl.report.facts import comparison, configuration, facts, lineage_table, verdict
from agilerl.report.figures import tree_figure, tree_width
from agilerl.report.load import Family, RunRecord, load_run, number, number_or, trace_family
from agilerl.runs import RunLayout
from agilerl.runs.atomic import write_text


@checked
def build_report(run_dirs: Sequence[Location], out: Location) -> Path:
    """Write the report of one or more run directories to the file ``out`` and return its path.

    The runs may be finished, running or interrupted; they are only read. The page needs no network and no other file.
    Raises CheckpointError if a directory is missing, damaged or not a run directory, WriteError if ``out`` cannot be
    written.
    """
    if not run_dirs:
        raise CheckpointError("expected at least one run directory for the report, found none.")
    runs = [load_run(Path(path)) for path in run_dirs]
    html = render(runs)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{shown(str(out))} could not be written: {error.strerror or error}.") from error
    write_text(out, html)
    return out


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as a string."""
    y_range = _common_range(runs)
    views = [_view(position, run, y_range) for position, run in enumerate(runs)]
    library, script = inline_script(get_plotlyjs()), inline_script(_resource("script.js.jinja"))
    names = _distinct_names(runs)
    for view, name in zip(views, names):
        view["name"] = name
    return _page().render(
        title="agilerl: " + ", ".join(names),
        runs=views,
        comparison=comparison(runs, names) if len(runs) > 1 else None,
        style=Markup(_resource("style.css.jinja")),
        library=Markup(library),
        script=Markup(script),
        policy=_content_policy(library, script),
    )


@cache
def _page() -> Template:
    """Compile the template, once; nothing that a run says gets into it.

    Text that comes from a run is untrusted: jinja escapes it in HTML, script_json in scripts.
    """
    environment = Environment(
        loader=PackageLoader("agilerl.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"script_json": script_json}
    return environment.get_template("page.html.jinja")


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element: no ``<``, ``>``, ``&`` or line separator remains in it."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _finite(value: Any) -> Any:
    """Return plain data with None for numbers that JSON does not have: sums of large measurements are infinite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def inline_script(code: str) -> str:
    """Return JavaScript that a script element can hold: a closing tag inside a string would end it early."""
    return re.sub(r"</(script)", r"<\\/\1", code, flags=re.IGNORECASE)


def _view(position: int, run: RunRecord, y_range: tuple[float, float] | None) -> dict[str, Any]:
    """Return everything that the template shows about one run."""
    family = trace_family(run)
    samples = sample_groups(run)
    moving, constant = figures.hyperparameter_names(run)
    drawn = {
        "fitness": figures.fitness_figure(run, family, y_range=y_range),
        "tree": tree_figure(run, family),
        "throughput": figures.throughput_figure(run),
        "time": figures.time_figure(run),
    }
    curves = {title: figures.curve_figure(run, family, metric) for metric, title in figures.CURVES.items()}
    hyper = {name: figures.hyperparameter_figure(run, family, name) for name in moving}
    charts = {f"{key}-{position}": figure for key, figure in drawn.items() if figure is not None}
    curve_ids: dict[str, str] = {}
    hyper_ids: dict[str, str] = {}
    for ids, group, prefix in ((curve_ids, curves, "curve"), (hyper_ids, hyper, "hyper")):
        for place, (title, figure) in enumerate(group.items()):
            if figure is not None:
                ids[title] = f"{prefix}{place}-{position}"
                charts[ids[title]] = figure
    return {
        "position": position,
        "path": str(run.path),
        "finished": run.is_finished,
        "notes": run.notes,
        "verdict": verdict(run, family),
        "facts": facts(run),
        "charts": charts,
        "curves": curve_ids,
        "hyperparameters": hyper_ids,
        "constant": constant,
        "rows": _rows(family),
        "winner": family.winner,
        "line": family.line,
        "tree_width": tree_width(family),
        "samples": samples,
        "lineage": lineage_table(run, family),
        "configuration": configuration(run),
    }


def _rows(family: Family) -> list[str]:
    return [figures.row_colour(row) for row in range(min(family.height, 10))]


def _common_range(runs: Sequence[RunRecord]) -> tuple[float, float] | None:
    """Return one fitness range for all runs, so that curves side by side can be compared by eye."""
    ends = [
        exam.score.mean + sign * number_or(exam.score.stderr, 0.0)
        for run in runs
        for agent in run.agents.values()
        for exam in agent.exams
        for sign in (-1, 1)
        if math.isfinite(exam.score.mean)
    ]
    if not ends or len(runs) == 1:
        return None
    margin = 0.05 * (max(ends) - min(ends) or 1.0)
    low, high = min(ends) - margin, max(ends) + margin
    return (low, high) if math.isfinite(high - low) else None  # then each figure finds its own range


def _distinct_names(runs: Sequence[RunRecord]) -> list[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs)]


def _resource(name: str) -> str:
    return files("agilerl.report").joinpath(name).read_text(encoding="utf-8")


def _content_policy(*scripts: str) -> str:
    """Return a content security policy: the page may run only these scripts, and load nothing."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


# -- sampled completions: the best and the worst of each group, within a size limit -----------------------------------


_MOST_STEPS = 20
_MOST_GROUPS = 1200
_MOST_GROUPS_A_STEP = 6
_MOST_CHARACTERS = 2000

T = TypeVar("T")


def sample_groups(run: RunRecord) -> list[dict[str, Any]]:
    """Return groups picked evenly over steps and agents, each with its best and worst completion.

    A file that cannot be read is skipped, with a sentence in the run's notes.
    """
    from agilerl.runs.completions import completion_steps, read_completions  # imports pyarrow, so only if needed

    folder = RunLayout(run.path).completions
    groups: list[dict[str, Any]] = []
    steps = _evenly(completion_steps(folder), _MOST_STEPS)
    for step in steps:
        try:
            rows = read_completions(folder, step)
        except CheckpointError as error:
            run.notes.append(str(error))
            continue
        grouped: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            grouped[row["agent"]][row["group"]].append(row)
        room = max(1, min(_MOST_GROUPS_A_STEP, _MOST_GROUPS // (len(steps) * max(1, len(grouped)))))
        for agent in sorted(grouped):
            for group in _evenly(sorted(grouped[agent]), room):
                groups.append(_group(grouped[agent][group]))
    return groups


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    graded = sorted((row for row in rows if math.isfinite(number(row["reward"]))), key=lambda row: -row["reward"])
    shown = [graded[0], graded[-1]] if graded else rows[:2]
    same = len(shown) < 2 or shown[0] is shown[1]
    first = rows[0]
    return {
        "step": first["step"],
        "generation": first["generation"],
        "agent": first["agent"],
        "group": first["group"],
        "prompt": _cut(first["prompt"]),
        "answer": _cut(first["answer"]),
        "size": len(rows),
        "mean": sum(row["reward"] for row in graded) / len(graded) if graded else None,
        "spread": graded[0]["reward"] - graded[-1]["reward"] if graded else 0,
        "best": _shown(shown[0]),
        "worst": None if same else _shown(shown[1]),
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    reward = number(row["reward"])
    return {
        "text": _cut(row["completion"]),
        "reward": reward if math.isfinite(reward) else None,
        "length": row["length"],
        "finish": row["finish_reason"],
    }


def _cut(text: str | None) -> str:
    text = text or ""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]} … (truncated, {len(text):,} characters in total)"


def _evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
