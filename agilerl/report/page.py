"""One self-contained HTML page about one run, or about several side by side."""

import base64
import gzip
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from agilerl.arguments import Count, Location, Positive, checked, shown
from agilerl.errors import CheckpointError, WriteError
from agilerl.planning.footprint import money
from agilerl.report import figures, life
from agilerl.report.figures import row_colour, short_value, tree_figure, tree_width
from agilerl.report.load import (
    AgentRecord,
    Family,
    RunRecord,
    Score,
    check_different,
    cost_names,
    front_exams,
    hyperparameter_at,
    load_run,
    number,
    number_or,
    summary_front,
    trace_family,
)
from agilerl.runs import RunLayout
from agilerl.runs.atomic import write_text
from agilerl.runs.directory import as_written


@checked
def build_report(
    run_dirs: Sequence[Location], out: Location, *, reload: Count | None = None, price: Positive | None = None
) -> Path:
    """Write the report of one or more run directories to the file ``out`` and return its path.

    The runs may be finished, running or interrupted; they are only read. The page needs no network and no other file.
    With ``reload`` it reloads itself every so many seconds, except while an agent is open or a search is active.
    ``price`` is that of an hour of the runs, in place of their ``training.price_per_hour``.
    Raises CheckpointError if a directory is missing, damaged or not a run directory, WriteError if ``out`` cannot be
    written.
    """
    if not run_dirs:
        raise CheckpointError("expected at least one run directory for the report, found none.")
    check_different(run_dirs)
    runs = [load_run(Path(path), price) for path in run_dirs]
    html = render(runs, reload)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{shown(str(out))} could not be written: {error.strerror or error}.") from error
    write_text(out, html)
    return out


def render(runs: Sequence[RunRecord], reload: int | None = None) -> str:
    """Return the page as a string."""
    y_range = _common_range(runs)
    views = []
    for position, run in enumerate(runs):
        with as_written(run.path):
            views.append(_view(position, run, y_range))
    library, script = _resource("plotly/plotly-basic.min.js"), inline_script(_resource("script.js.jinja"))
    names = _distinct_names(runs)
    for view, name in zip(views, names):
        view["name"] = name
    return _page().render(
        title="agilerl: " + ", ".join(names),
        runs=views,
        reload=reload,
        comparison=comparison(runs, names) if len(runs) > 1 else None,
        style=Markup(_resource("style.css.jinja")),
        library=packed(library),
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


@cache
def packed(text: str) -> str:
    """Return a text as gzip in base64: the library of the charts takes 0.5 MB instead of 1.2."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def inline_script(code: str) -> str:
    """Return JavaScript that a script element can hold: a closing tag inside a string would end it early."""
    return re.sub(r"</(script)", r"<\\/\1", code, flags=re.IGNORECASE)


_DRAWN = {
    "fitness": "Fitness by step",
    "tree": "Family tree; the table Lineage says the same",
    "importance": "Rank correlation of each hyperparameter with the gain that followed",
    "parallel": "Each agent's last hyperparameters and its last fitness",
    "throughput": "Tokens per second by step",
    "time": "Seconds of each phase by generation",
}


def _view(position: int, run: RunRecord, y_range: tuple[float, float] | None) -> dict[str, Any]:
    """Return everything that the template shows about one run."""
    family = trace_family(run)
    samples = sample_groups(run)
    moving, constant = figures.hyperparameter_names(run)
    drawn = {
        "fitness": figures.fitness_figure(run, family, y_range=y_range),
        "tree": tree_figure(run, family),
        "importance": figures.importance_figure(run, moving),
        "parallel": figures.parallel_figure(run, family, moving),
        "throughput": figures.throughput_figure(run),
        "time": figures.time_figure(run),
    }
    costs = {name: figures.objective_figure(run, family, name) for name in cost_names(run)}
    curves = {title: figures.curve_figure(run, family, metric) for metric, title in figures.CURVES.items()}
    hyper = {name: figures.hyperparameter_figure(run, family, name) for name in moving}
    charts = {f"{key}-{position}": figure for key, figure in drawn.items() if figure is not None}
    titles = {f"{key}-{position}": _DRAWN[key] for key in drawn}
    curve_ids: dict[str, str] = {}
    hyper_ids: dict[str, str] = {}
    cost_ids: dict[str, str] = {}
    groups = ((curve_ids, curves, "curve"), (hyper_ids, hyper, "hyper"), (cost_ids, costs, "objective"))
    for ids, group, prefix in groups:
        for place, (title, figure) in enumerate(group.items()):
            if figure is not None:
                ids[title] = f"{prefix}{place}-{position}"
                charts[ids[title]] = figure
                titles[ids[title]] = title
    return {
        "position": position,
        "path": str(run.path),
        "finished": run.is_finished,
        "notes": run.notes,
        "symptoms": run.symptoms,
        "verdict": verdict(run, family),
        "facts": facts(run),
        "answers": _answers(run),
        "charts": charts,
        "labels": {key: figures.described(titles[key], figure) for key, figure in charts.items()},
        "agents": agent_pages(run, family),
        "phases": phase_table(run),
        "curves": curve_ids,
        "objectives": cost_ids,
        "front": front_table(run, family),
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
    scores = [exam.score for run in runs for agent in run.agents.values() for exam in agent.exams]
    scores += [run.tests["base"][1] for run in runs if "base" in run.tests and scores]
    ends = [
        score.mean + sign * number_or(score.stderr, 0.0)
        for score in scores
        for sign in (-1, 1)
        if math.isfinite(score.mean)
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
    from agilerl.runs.completions import completion_steps, lost_completions, read_completions  # imports pyarrow

    folder = RunLayout(run.path).completions
    lines = [line for agent in run.agents.values() for line in agent.train]
    training = run.info["config"].get("training") or {}
    newest = max((line["step"] for line in lines), default=0)  # of a run in progress, its file may yet be written
    if training.get("log_completions", 1) and (
        lost := lost_completions(folder, lines, before=newest + run.is_finished)
    ):
        run.notes.append(lost)
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


# -- text and tables: verdict, run facts, lineage table, comparison of runs -------------------------------------------


_WHO = {
    "base": "Base model, untrained",
    "median_first_generation": "Median agent of the first generation",
    "elite": "Elite, the resulting adapter",
}


def verdict(run: RunRecord, family: Family) -> dict[str, Any]:
    """Return {sentence, unit, bars, zero}: what the run achieved on test problems that selection never used.

    Bars begin at zero, which is ``zero`` percent from the left if a mean is negative.
    """
    known = {who: run.tests[who] for who in _WHO if who in run.tests}
    accuracy = bool(known) and all(score.is_accuracy for _, score in known.values())
    means = [score.mean for _, score in known.values() if math.isfinite(score.mean)]
    bottom = min([0.0, *means])
    top = max([1.0 if bottom == 0.0 else 0.0, *means])

    def place(value: float) -> float:
        """Return the percentage of the bar's width at which a value lies; halves: large differences are infinite."""
        return 100 * min(max((value / 2 - bottom / 2) / ((top / 2 - bottom / 2) or 1.0), 0.0), 1.0)

    bars = []
    for who, (agent, score) in known.items():
        label = _WHO[who] + (f" (agent {agent})" if agent is not None else "")
        mean, error = number_or(score.mean, 0.0), number_or(score.stderr, 0.0)
        ends = sorted((place(0.0), place(mean)))
        low, high = place(mean - error), place(mean + error)
        bars.append(
            {
                "who": who,
                "label": label,
                "value": _value(score.mean, accuracy),
                "error": _value(score.stderr, accuracy),
                "n": score.n,
                "left": round(ends[0], 2),
                "width": round(ends[1] - ends[0], 2),
                "low": round(low, 2),
                "span": round(high - low, 2),
            }
        )
    unit = "test accuracy" if accuracy else "mean test reward"
    zero = round(place(0.0), 2) if bottom < 0 else None
    return {"sentence": _sentence(run, family, accuracy), "unit": unit, "bars": bars, "zero": zero}


def _sentence(run: RunRecord, family: Family, accuracy: bool) -> str:
    if "base" not in run.tests or "elite" not in run.tests:
        best = run.agents[family.winner].best if family.winner is not None else None
        so_far = f" So far agent {family.winner} leads with a fitness of {life.plus(best.score)}." if best else ""
        return f"There are no test results for base and elite yet.{so_far}"
    base, (agent, elite) = run.tests["base"][1], run.tests["elite"]
    who = "The elite" + (f", agent {agent}," if agent is not None else "")
    gain = elite.mean - base.mean
    error = math.hypot(elite.stderr, base.stderr)
    if not math.isfinite(gain):
        return f"{who} or the base has no finite test result."
    if math.isfinite(error) and abs(gain) <= 2 * error:
        return f"{who} is not clearly different from the base: the gap is within two standard errors."
    better = "better" if gain > 0 else "worse"
    points = f"{100 * abs(gain):.1f} points" if accuracy else f"{abs(gain):.3f}"
    sized = f" ± {100 * error:.1f}" if accuracy else f" ± {error:.3f}"
    return f"{who} is {better} than the base by {points}{sized if math.isfinite(error) else ''}."


def _answers(run: RunRecord) -> list[list[str]]:
    """Return cells for the first test questions: question, right answer, the base's answer, the elite's."""
    listed = run.summary.get("answers")
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []

    def scored(answer: Any) -> str:
        if not isinstance(answer, dict):
            return "–"
        score = number_or(answer.get("score"), math.nan)
        return f"{answer.get('text', '')}{f' ({score:.3g})' if math.isfinite(score) else ''}"

    return [
        [
            *(_cut(str(one.get(key) or "–")) for key in ("question", "answer")),
            *(_cut(scored(one.get(who))) for who in ("base", "elite")),
        ]
        for one in entries[:10]
    ]


def facts(run: RunRecord) -> dict[str, str]:
    """Return the known facts about the run, by label."""
    config, summary, info = run.info["config"], run.summary, run.info
    tokens = summary.get("tokens") or _tokens(run)
    hardware = info.get("hardware") or {}
    devices = [str(device.get("name")) for device in hardware.get("cuda") or []]
    generations = sorted({g for agent in run.agents.values() for g in agent.generations})
    found = {
        "Status": "finished" if run.is_finished else str(summary.get("status", "not finished")),
        "Algorithm": _first(config, "algorithm.name"),
        "Population": _population(_first(config, "training.pop_size"), str(summary.get("agents") or "")),
        "Generations": str(summary.get("generations") or len(generations) or ""),
        "Agents in total": str(len(run.agents) or ""),
        "Seed": str(info["seed"]),
        "Duration": _duration(run.seconds),
        "Cost": _cost(run, tokens),
        **{f"Tokens {kind}": f"{int(count):,}" for kind, count in tokens.items() if math.isfinite(number(count))},
        "Peak memory": _peak_memory(run),
        "Started": info["started"][:16].replace("T", " ") + " UTC",
        "Task": _first(
            config,
            "environment.env_id",
            "environment.task",
            "environment.dataset.path",
            "environment.name",
            "environment.env_type",
        ),
        "Model": _first(config, "network.pretrained_model_name_or_path", "model.name"),
        "Hardware": ", ".join(devices) or _cpu(hardware),
        "Command": " ".join(map(str, info["command"])),
    }
    return {label: text for label, text in found.items() if text}


def _population(first: str, last: str) -> str:
    """Return how many agents began, and how many were left if that differs."""
    return f"{first}, at the end {last}" if first and last and first != last else first or last


def configuration(run: RunRecord) -> dict[str, str]:
    """Return the foldable texts at the end of a report: configuration, versions, hardware."""
    texts = {"Configuration": run.info["config"], "Versions": run.info["versions"]}
    if run.info.get("hardware"):
        texts["Hardware"] = run.info["hardware"]
    if run.summary:
        texts["Summary"] = run.summary
    return {
        title: yaml.safe_dump(value, sort_keys=True, allow_unicode=True, width=100) for title, value in texts.items()
    }


def lineage_table(run: RunRecord, family: Family) -> list[dict[str, Any]]:
    """Return one row per agent, in the order of birth."""
    return [
        {
            "agent": index,
            "colour": row_colour(family.rows[index]),
            "winning": index in family.line,
            "parent": life.parents(agent),
            "lived": f"{family.spans[index][0]} to {family.spans[index][-1]}",
            "died": "" if agent.died is None else f"{agent.died}: {agent.reason}" if agent.reason else str(agent.died),
            "changes": _changes(agent),
            "fitness": life.plus(agent.best.score) if agent.best else "none" if not agent.exams else "not finite",
            "steps": ", ".join([str(len(agent.train)), *(f"{len(at)} {what}" for what, at in agent.trouble.items())]),
            "trained": f"{int(agent.tokens['trained']):,}"
            if math.isfinite(agent.tokens.get("trained", math.nan))
            else "",
            "hyperparameters": ", ".join(f"{k} {short_value(v)}" for k, v in sorted(agent.hyperparameters.items())),
        }
        for index, agent in run.agents.items()
    ]


def agent_pages(run: RunRecord, family: Family) -> list[dict[str, Any]]:
    """Return what the page shows about an agent that is clicked: whence it came, what it was, what became of it."""
    table = {row["agent"]: row for row in lineage_table(run, family)}
    places = life.places(run)
    facts_shown = {"Generations": "lived", "Best fitness": "fitness", "Steps": "steps", "Tokens trained": "trained"}
    return [
        {
            "agent": index,
            "colour": table[index]["colour"],
            "winner": index == family.winner,
            "facts": [[label, table[index][key]] for label, key in facts_shown.items() if table[index][key]],
            "parents": [parent for parent in (agent.parent, agent.mate) if parent in run.agents],
            "children": [i for i, other in run.agents.items() if index in (other.parent, other.mate)],
            "genes": [
                [name, short_value(value), short_value(hyperparameter_at(agent, name, sys.maxsize, run))]
                for name, value in sorted(agent.hyperparameters.items())
            ],
            "events": [list(event) for event in life.events(agent)],
            "exams": [
                [exam.generation, exam.step, life.plus(exam.score), exam.score.n, places[exam.generation, index]]
                for exam in agent.exams
            ],
        }
        for index, agent in run.agents.items()
    ]


def phase_table(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the phases of the run with their seconds and their share of all that was timed."""
    seconds = {phase: sum(found.values()) for phase, found in figures.phase_seconds(run).items()}
    total = sum(seconds.values()) or 1.0
    return [(phase, f"{found:,.4g} s", f"{100 * (found / total):.1f} %") for phase, found in seconds.items()]


def front_table(run: RunRecord, family: Family) -> list[dict[str, Any]]:
    """Return one row per agent on the front of the last generation, best reward first."""
    said = summary_front(run)
    return [
        {
            "agent": index,
            "colour": row_colour(family.rows[index]),
            "winning": index == family.winner,
            "reward": life.plus(exam.score),
            "costs": [_short_plus(exam.costs[name]) for name in cost_names(run)],
            "hyperparameters": ", ".join(
                f"{name} {short_value(hyperparameter_at(run.agents[index], name, exam.generation - 1, run))}"
                for name in sorted(run.agents[index].hyperparameters)
            ),
            "adapter": str(said.get(index, {}).get("adapter", "")),
        }
        for index, exam in front_exams(run).items()
    ]


def _short_plus(score: Score) -> str:
    """Return a cost with its error: of any size, so in significant digits."""
    error = f" ± {score.stderr:.2g}" if math.isfinite(score.stderr) else ""
    return f"{score.mean:.4g}{error}" if math.isfinite(score.mean) else "not finite"


def comparison(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    """Return {names, rows} of a table that compares several runs, with the settings that differ."""
    rows: list[tuple[str, list[str]]] = []
    for who, label in _WHO.items():
        cells = [life.plus(run.tests[who][1]) if who in run.tests else "" for run in runs]
        if any(cells):
            rows.append((f"Test: {label}", cells))
    all_facts = [facts(run) for run in runs]
    labels = ["Status", "Population", "Generations", "Seed", "Duration", "Cost", "Tokens generated", "Tokens trained"]
    for label in labels:
        cells = [found.get(label, "") for found in all_facts]
        if any(cells) or label != "Cost":  # only of runs with a price
            rows.append((label, cells))
    flat = [_flatten(run.info["config"]) for run in runs]
    for key in sorted({key for found in flat for key in found}):
        cells = [str(found.get(key, "not set")) for found in flat]
        if len(set(cells)) > 1:
            rows.append((key, cells))
    return {"names": list(names), "rows": rows}


def _changes(agent: AgentRecord) -> str:
    return "; ".join(map(life.changed, agent.mutations))


def _value(value: float, accuracy: bool) -> str:
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else str(value)
    return f"{100 * value:.1f} %" if accuracy else f"{value:.3f}"


def _first(config: Mapping[str, Any], *paths: str) -> str:
    for path in paths:
        value: Any = config
        for key in path.split("."):
            if isinstance(value, list):  # the first of several datasets
                value = value[0] if value else None
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return str(value)
    return ""


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key in value for k, v in _flatten(value[key], f"{prefix}.{key}".lstrip(".")).items()}
    return {prefix: value}


def _tokens(run: RunRecord) -> dict[str, float]:
    kinds = ("generated", "trained", "evaluated")
    sums = {kind: sum(number(a.tokens.get(kind)) for a in run.agents.values() if kind in a.tokens) for kind in kinds}
    return {kind: count for kind, count in sums.items() if count}


def _duration(seconds: Any) -> str:
    value = number(seconds)
    if not math.isfinite(value):
        return ""
    longest = timedelta.max.total_seconds()
    return str(timedelta(seconds=round(value))) if abs(value) < longest else f"{value:.3g} s"


def _cost(run: RunRecord, tokens: Mapping[str, Any]) -> str:
    """Return what the run cost, and a million of its tokens; nothing without a price."""
    cost = run.price * run.seconds / 3600
    if not math.isfinite(cost):
        return ""
    total = math.fsum(number_or(count, 0.0) for count in tokens.values())
    each = f"; {money(1e6 * cost / total)} a million tokens" if total >= 1 else ""
    return f"{money(cost)} ({run.price:g} an hour{each})"


def _peak_memory(run: RunRecord) -> str:
    peaks = [number(line.get("memory/peak")) for agent in run.agents.values() for line in agent.train]
    peak = max((p for p in peaks if math.isfinite(p)), default=0.0)
    return f"{peak / 2**30:.2f} GiB" if peak else ""


def _cpu(hardware: Mapping[str, Any]) -> str:
    if not hardware.get("cpu"):
        return ""
    return f"{hardware['cpu']}, {hardware.get('cores')} cores"
