"""One self-contained HTML page about one run, or about several side by side."""

import base64
import gzip
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from agilerl.checks.arguments import Count, Location, checked, shown
from agilerl.errors import CheckpointError, WriteError
from agilerl.report import figures, life
from agilerl.report.figures import agent_colour, thin_out
from agilerl.report.life import short_value
from agilerl.report.load import (
    RunRecord,
    check_different,
    find_derived,
    find_differences,
    load_run,
    measure_gain,
    number,
    number_or,
    task_of,
    why_not_comparable,
)
from agilerl.runs import RunLayout
from agilerl.runs.atomic import write_text
from agilerl.runs.directory import as_written


@checked
def build_report(run_dirs: Sequence[Location], out: Location, *, reload: Count | None = None) -> Path:
    """Write the report of one or more run directories to the file ``out`` and return its path.

    The runs may be finished, running or interrupted; they are only read. The page needs no network and no other file.
    With ``reload`` it reloads itself every so many seconds, except while an agent is open or a search is active.
    Raises CheckpointError if a directory is missing, damaged or not a run directory, WriteError if ``out`` cannot be
    written.
    """
    if not run_dirs:
        raise CheckpointError("expected at least one run directory for the report, found none.")
    check_different(run_dirs)
    runs = [load_run(Path(path)) for path in run_dirs]
    html, out = render(runs, reload), Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # the path may be longer than any message
        raise WriteError(f"{shown(str(out))} could not be written: {error.strerror or error}.") from error
    write_text(out, html)
    return out


def render(runs: Sequence[RunRecord], reload: int | None = None) -> str:
    """Return the page as a string."""
    from plotly.offline import get_plotlyjs  # other commands import this package, and draw nothing

    names = distinct_names([run.path for run in runs])
    views = []
    for position, (run, name) in enumerate(zip(runs, names)):
        with as_written(run.path):
            views.append({"name": name, **_view(position, run)})
    overlay = figures.overlay_figure(dict(zip(names, runs)))
    library, script = get_plotlyjs(), resource("script.js.jinja")
    return compile_template("page.html.jinja").render(
        title="agilerl: " + ", ".join(names),
        runs=views,
        reload=reload,
        now=datetime.now(UTC).strftime("%H:%M:%S"),
        comparison=comparison(runs, names) if len(runs) > 1 else None,
        overlay={"overlay": overlay} if overlay and len(runs) > 1 else {},
        style=resource("style.css.jinja"),
        library=pack(library),
        script=script,
        policy=_content_policy(library, script),
    )


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders, with as many of the folders they are in as it takes to tell them apart."""
    folders = [Path(os.path.abspath(path)) for path in paths]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


@cache
def compile_template(name: str) -> Template:
    """Compile a template, once; nothing that a run says gets into it.

    Text that comes from a run is untrusted: jinja escapes it in HTML, script_json in scripts.
    """
    environment = Environment(
        loader=PackageLoader("agilerl.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"script_json": script_json}
    return environment.get_template(name)


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element: no ``<``, ``>``, ``&`` or line separator remains in it."""
    return htmlsafe_json_dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """Return plain data with None for numbers that JSON does not have: sums of large measurements are infinite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


@cache
def pack(text: str) -> str:
    """Return a text as gzip in base64: the library of the charts takes 2 MB instead of 4.8."""
    # Without a time of its own, so that equal runs give equal pages.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _view(position: int, run: RunRecord) -> dict[str, Any]:
    """Return everything that the template shows about one run."""
    moving, constant = figures.hyperparameter_names(run)
    charts: dict[str, figures.Figure] = {}
    labels: dict[str, str] = {}

    def draw(key: str, title: str, figure: figures.Figure | None) -> str:
        """Return the id of a chart in the page; "" if there is none."""
        if figure is None:
            return ""
        identity = f"{key}-{position}"
        charts[identity], labels[identity] = figure, figures.describe(title, figure)
        return identity

    def draw_all(key: str, drawn: Iterable[tuple[str, figures.Figure | None]]) -> dict[str, str]:
        ids = {title: draw(f"{key}{count}", title, figure) for count, (title, figure) in enumerate(drawn)}
        return {title: identity for title, identity in ids.items() if identity}

    draw("fitness", "Fitness by iteration", figures.fitness_figure(run))
    draw("tree", "Family tree; the table Lineage says the same", figures.tree_figure(run))
    draw("throughput", "Tokens per second by iteration", figures.throughput_figure(run))
    curves = ((title, figures.curve_figure(run, metric)) for metric, title in figures.CURVES.items())
    genes = ((name, figures.hyperparameter_figure(run, name)) for name in moving)
    return {
        "position": position,
        "record": run,
        "samples": sample_groups(run),
        "verdict": verdict(run),
        "facts": facts(run),
        "answers": _answers(run),
        "phases": phase_table(run),
        "curves": draw_all("curve", curves),
        "hyperparameters": draw_all("hyper", genes),
        "charts": charts,
        "labels": labels,
        "constant": constant,
        "clock": figures.clock(run),
        "tree_width": figures.tree_width(run),
        "lineage": lineage_table(run),
        "configuration": configuration(run),
    }


def resource(name: str) -> Markup:
    """Return a file of this package, trusted as it is."""
    return Markup(files("agilerl.report").joinpath(name).read_text(encoding="utf-8"))


def _content_policy(*scripts: str) -> str:
    """Return a content security policy: the page may run only these scripts, and load nothing."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


# -- sampled completions: the best and the worst of each group, within a size limit -----------------------------------


# Limits that keep what a run adds to the page at about half a megabyte, however long it is.
_MOST_STEPS = 20
_MOST_GROUPS = 1200
_MOST_GROUPS_A_STEP = 6
_MOST_CHARACTERS = 2000


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
    # The page holds them all, so their number is limited, whatever the length of the run.
    steps = thin_out(completion_steps(folder), _MOST_STEPS)
    for step in steps:
        try:
            rows = read_completions(folder, step)
        except CheckpointError as error:
            run.notes.append(str(error))
            continue
        of_agents: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            of_agents[row["agent"]][row["group"]].append(row)
        room = max(1, min(_MOST_GROUPS_A_STEP, _MOST_GROUPS // (len(steps) * max(1, len(of_agents)))))
        for _, grouped in sorted(of_agents.items()):
            groups += [_group(grouped[group]) for group in thin_out(sorted(grouped), room)]
    return groups


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    graded = sorted((row for row in rows if math.isfinite(number(row["reward"]))), key=lambda row: -row["reward"])
    # Where nothing has a grade, the first two are shown.
    first, best, worst = rows[0], (graded or rows)[0], graded[-1] if graded else rows[:2][-1]
    return {
        **{name: first[name] for name in ("step", "generation", "agent", "group")},
        "prompt": _cut(first["prompt"]),
        "answer": _cut(first["answer"]),
        "size": len(rows),
        "mean": sum(row["reward"] for row in graded) / len(graded) if graded else None,
        "spread": graded[0]["reward"] - graded[-1]["reward"] if graded else 0,
        "best": _completion(best),
        "worst": None if worst is best else _completion(worst),
    }


def _completion(row: dict[str, Any]) -> dict[str, Any]:
    reward = row["reward"] if math.isfinite(number(row["reward"])) else None
    return {"text": _cut(row["completion"]), "reward": reward, "length": row["length"], "finish": row["finish_reason"]}


def _cut(text: str | None) -> str:
    text = text or ""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]} … (truncated, {len(text):,} characters in total)"


# -- text and tables: verdict, run facts, lineage table, comparison of runs -------------------------------------------


_WHO = {
    "base": "Base model, untrained",
    "median_first_generation": "Median agent of the first generation",
    "elite": "Elite, the resulting adapter",
}


def verdict(run: RunRecord) -> dict[str, Any]:
    """Return {sentence, unit, bars, zero}: what the run achieved on test problems that selection never used.

    Bars begin at zero, which is ``zero`` percent from the left if a mean is negative.
    """
    results = {who: run.tests[who] for who in _WHO if who in run.tests}
    accuracy = bool(results) and all(result.score.is_accuracy for result in results.values())
    means = [result.score.mean for result in results.values() if result.score.is_finite]
    bottom = min([0.0, *means])
    top = max([1.0 if bottom == 0.0 else 0.0, *means])

    def percent(value: float) -> float:
        """Return the percentage of the bar's width at which a value lies; halves: large differences are infinite."""
        return 100 * min(max((value / 2 - bottom / 2) / ((top / 2 - bottom / 2) or 1.0), 0.0), 1.0)

    bars = []
    for who, result in results.items():
        score = result.score
        left, right = sorted((percent(0.0), percent(number_or(score.mean, 0.0))))
        low, high = (percent(number_or(end, 0.0)) for end in score.band)
        bars.append(
            {
                "who": who,
                "label": _WHO[who] + ("" if result.agent is None else f" (agent {result.agent})"),
                "value": _value(score.mean, accuracy),
                "error": f"{100 * score.stderr:.1f} points" if accuracy else _value(score.stderr, False),
                "n": score.n,
                "left": round(left, 2),
                "width": round(right - left, 2),
                "low": round(low, 2),
                "span": round(high - low, 2),
            }
        )
    unit = "test accuracy" if accuracy else "mean test reward"
    zero = round(percent(0.0), 2) if bottom < 0 else None
    return {"sentence": _sentence(run, accuracy), "unit": unit, "bars": bars, "zero": zero}


def _sentence(run: RunRecord, accuracy: bool) -> str:
    if (gain := measure_gain(run.tests)) is None:
        winner = run.family.winner
        best = None if winner is None else run.agents[winner].best
        so_far = f" So far agent {winner} leads with a fitness of {life.format_score(best.score)}." if best else ""
        missing = "The elite has not been tested yet." if "base" in run.tests else "There are no test results yet."
        return missing + so_far
    who = "The elite" + ("" if (agent := run.tests["elite"].agent) is None else f", agent {agent},")
    if not math.isfinite(gain.mean):
        return f"{who} or the base has no finite test result."
    if gain.n[0] != gain.n[1]:
        return f"{who} and the base are not comparable: {gain.n[1]} and {gain.n[0]} of their answers got a grade."
    factor, form, unit = (100.0, ".1f", " points") if accuracy else (1.0, ".3f", "")
    error = gain.error_text(factor, form)
    if not gain.verdict:
        return f"{who} is not clearly different from the base: {factor * gain.mean:+{form}}{unit}{error}."
    return f"{who} is {gain.verdict} than the base by {factor * abs(gain.mean):{form}}{unit}{error}."


def _answers(run: RunRecord) -> list[list[str]]:
    """Return cells for the first test questions: question, right answer, the base's answer, the elite's."""

    def scored(answer: Mapping[str, Any] | None) -> str:
        if answer is None:
            return "–"
        score = number(answer.get("score"))
        return f"{answer.get('text', '')}{f' ({score:.3g})' if math.isfinite(score) else ''}"

    return [
        [
            *(_cut(str(entry.get(key) or "–")) for key in ("question", "answer")),
            *(_cut(scored(entry.get(who))) for who in ("base", "elite")),
        ]
        for entry in run.summary.get("answers", [])[:10]
    ]


def facts(run: RunRecord) -> dict[str, str]:
    """Return the known facts about the run, by label."""
    summary, info = run.summary, run.info
    training, network, algorithm = (info["config"].get(key) or {} for key in ("training", "network", "algorithm"))
    tokens = summary.get("tokens") or _tokens(run)
    hardware = info.get("hardware") or {}
    devices = [str(device.get("name")) for device in hardware.get("cuda") or []]
    generations = {g for agent in run.agents.values() for g in agent.generations}
    began, left = run.founders or training.get("pop_size") or "", summary.get("agents") or ""
    peak = max((number_or(line.get("memory/peak"), 0.0) for a in run.agents.values() for line in a.train), default=0.0)
    named = {
        "Status": run.status,
        "Algorithm": algorithm.get("name"),
        "Genes": ", ".join(f"{name} in {span}" for name, span in info.get("genes", {}).items()),
        "Population": f"{began}, at the end {left}" if began and left and began != left else began or left,
        "Generations": summary.get("generations") or len(generations),
        "Agents in total": len(run.agents),
        "Seed": str(info["seed"]),
        "Duration": _duration(run.seconds),
        **{f"Tokens {kind}": f"{int(count):,}" for kind, count in tokens.items() if math.isfinite(number(count))},
        "Peak memory": f"{peak / 2**30:.2f} GiB" if peak else "",
        "Started": info["started"][:16].replace("T", " ") + " UTC",
        "Task": task_of(info["config"]),
        "Model": network.get("pretrained_model_name_or_path"),
        "Hardware": ", ".join(devices)
        or (f"{hardware['cpu']}, {hardware.get('cores')} cores" if hardware.get("cpu") else ""),
        # Browsers break lines after a hyphen: "-", "-out".
        "Command": Markup(" ").join(Markup('<span class="word">{}</span>').format(word) for word in info["command"]),
    }
    return {label: text if isinstance(text, str) else str(text) for label, text in named.items() if text}


def configuration(run: RunRecord) -> dict[str, str]:
    """Return the foldable texts at the end of a report: configuration, versions, hardware."""
    info = run.info
    config = dict(info["config"])
    if "genes" in info:  # the ranges that applied, not those that were given
        config["mutation"] = {**(config.get("mutation") or {}), "rl_hp_selection": info["genes"]}
    texts = {"Configuration": config, "Versions": info["versions"], "Hardware": info.get("hardware")}
    texts["Summary"] = run.summary
    return {
        title: yaml.safe_dump(value, sort_keys=True, allow_unicode=True, width=100)
        for title, value in texts.items()
        if value
    }


def lineage_table(run: RunRecord) -> list[dict[str, Any]]:
    """Return what the page says about each agent, in its table and when it is clicked, in the order of birth."""
    (elite, why), places = life.explain_elite(run), life.places(run)
    stories = {agent_life["agent"]: agent_life["events"] for agent_life in life.lives(run)}
    return [
        {
            "agent": index,
            "colour": agent_colour(index),
            "winning": index in run.family.line,
            "winner": index == run.family.winner,
            "parent": "founder" if agent.parent is None else str(agent.parent),
            "lived": f"{run.family.spans[index][0]} to {run.family.spans[index][-1]}",
            # A damaged lineage may give no reason: then the colon goes, too.
            "left": (why if index == elite else "")
            if agent.died is None
            else f"after generation {agent.died}: {agent.reason.removeprefix('left: ')}".rstrip(": "),
            "changes": "; ".join(map(life.describe_change, agent.mutations)),
            "fitness": life.format_score(agent.best.score)
            if agent.best
            else life.explain_idle(run, agent) or ("not finite" if agent.exams else "none"),
            "steps": ", ".join([str(len(agent.train)), *(f"{len(at)} {what}" for what, at in agent.trouble.items())]),
            "trained": f"{int(tokens):,}" if math.isfinite(tokens := agent.tokens.get("trained", math.nan)) else "",
            "hyperparameters": ", ".join(f"{name} {short_value(v)}" for name, v in agent.first_values().items()),
            "parents": [agent.parent] if agent.parent in run.agents else [],
            "children": [i for i, other in run.agents.items() if index == other.parent],
            "genes": [
                [name, short_value(first), short_value(last)]
                for (name, first), last in zip(agent.first_values().items(), agent.values().values())
            ],
            "events": [[event["generation"], event["sentence"]] for event in stories[index]],
            "exams": [
                [e.generation, e.step, life.format_score(e.score), e.score.n, places[e.generation, index]]
                for e in agent.exams
            ],
        }
        for index, agent in run.agents.items()
    ]


def phase_table(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the phases of the run with their seconds and their share of all that was timed."""
    phases = figures.phase_seconds(run)
    total = sum(phases.values()) or 1.0
    return [(phase, f"{seconds:,.4g} s", f"{100 * (seconds / total):.1f} %") for phase, seconds in phases.items()]


def comparison(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    """Return {names, rows, settings, warning}: tables of results and of settings that differ."""
    results = [facts(run) | {who: life.format_score(result.score) for who, result in run.tests.items()} for run in runs]
    rows = []
    for key in (*_WHO, *_COMPARED):
        cells = [of_run.get(key, "") for of_run in results]
        if any(cells) or key in _COMPARED:
            rows.append((f"Test: {_WHO[key]}" if key in _WHO else key, cells))
    differ = find_differences(runs)
    follow = find_derived(runs, differ)
    settings = [
        (n + " (derived)" * (n in follow), ["not set" if value is None else str(value) for value in differ[n]])
        for n in sorted(differ)
    ]
    return {"names": list(names), "rows": rows, "settings": settings, "warning": why_not_comparable(differ)}


_COMPARED = ("Status", "Population", "Generations", "Seed", "Duration", "Tokens generated", "Tokens trained")
"""The facts in the table that compares runs."""


def _value(value: float, accuracy: bool) -> str:
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else str(value)
    return f"{100 * value:.1f} %" if accuracy else f"{value:.3f}"


def _tokens(run: RunRecord) -> dict[str, float]:
    """Return the tokens of all agents so far, by kind."""
    kinds = ("generated", "trained", "evaluated")
    sums = {kind: sum(number(a.tokens.get(kind)) for a in run.agents.values() if kind in a.tokens) for kind in kinds}
    return {kind: count for kind, count in sums.items() if count}


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    longest = timedelta.max.total_seconds()
    # A damaged file may have more seconds than timedelta can hold.
    return str(timedelta(seconds=round(seconds))) if abs(seconds) < longest else f"{seconds:.3g} s"
