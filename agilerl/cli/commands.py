"""The commands that read the files of runs: ``agilerl report``, ``lineage`` and ``schedule``."""

import json
import operator
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Argument, Option

from agilerl.checks.arguments import counted, shown
from agilerl.cli.options import AsJson, OneRun, as_path
from agilerl.cli.output import columns, console, facts, genes_text, one_line, say, tell_line
from agilerl.errors import ConfigError

# -- ``agilerl report``: run directories as one HTML file -------------------------------------------------------------

_LONGEST_NAME = 100
_RELOAD = 10
"""Seconds after which an open page of a run in progress reloads itself."""


def run_report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run directories.", parser=as_path)],
    out: Annotated[
        Path | None,
        Option(
            parser=as_path,
            metavar="FILE",
            help="HTML file; default: report.html in the run; for several runs, report-NAME-NAME.html here.",
        ),
    ] = None,
    live: Annotated[
        bool, Option("--live", help="Rewrite the file during the runs, until they finish or Ctrl-C.")
    ] = False,
) -> None:
    """Write one self-contained HTML file about a run, or several side by side, and print its path."""
    out = report_file(runs, out)
    from agilerl.report import build_report

    if live:
        _follow(runs, out)
    else:
        tell_line(build_report(runs, out))


def _follow(runs: Sequence[Path], out: Path) -> None:
    """Write the report of runs whenever they have something new; the last page no longer reloads itself.

    It takes at most a tenth of a core from the runs.
    """
    from agilerl.report import build_report
    from agilerl.runs import RunLayout

    layouts = [RunLayout(run) for run in runs]
    written: list[tuple[int, int]] | None = None
    with suppress(KeyboardInterrupt):
        while not all(layout.is_finished for layout in layouts):
            files = [file for layout in layouts for file in (layout.metrics, layout.lineage) if file.exists()]
            began, now = time.monotonic(), [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
            if now != written:
                build_report(runs, out, reload=_RELOAD)
            if written is None:
                tell_line(out)
                say("Open this file in a browser; it follows the runs until they finish. Ctrl-C stops that.")
            written = now
            time.sleep(max(1.0, 9 * (time.monotonic() - began)))
    build_report(runs, out)
    if written is None:
        tell_line(out)


def report_file(runs: Sequence[Path], out: Path | None) -> Path:
    """Return where the report of runs is written; raises ConfigError if that would replace anything else."""
    out = default_report(runs) if out is None else out
    _check_file(out)
    return out


def default_report(runs: Sequence[Path]) -> Path:
    """Return ``report.html`` in a run; for several runs, a file in the working directory that is named after them.

    The report in the folder of a run is always about that run alone.
    """
    if len(runs) == 1:
        return runs[0] / "report.html"
    from agilerl.report.page import distinct_names

    names = [name.replace("/", "-") for name in distinct_names(runs)]
    if len(os.fsencode("-".join(names))) > _LONGEST_NAME:
        names = [os.fsencode(names[0])[:_LONGEST_NAME].decode(errors="ignore"), f"and-{len(runs) - 1}-more"]
    return Path(f"report-{'-'.join(names)}.html")


def _check_file(out: Path) -> None:
    """Raise ConfigError if writing would replace anything but a report, e.g. a file of the run."""
    try:
        if out.exists() and not out.is_file():
            kind = "folder" if out.is_dir() else "device or pipe"
            raise ConfigError(f"expected a file for the report, found the {kind} {shown(str(out))}; give another name")
        with open(out, "rb") as file:
            begins = file.read(500).strip().lower()
    except OSError:
        return  # nothing there, or writing reports the reason
    if begins and not begins.startswith((b"<!doctype html", b"<html")):
        raise ConfigError(
            f"{shown(str(out))} exists and is not a report, so it is not overwritten; choose another name, or delete it"
        )


# -- ``agilerl lineage``: who lived, who left and why ------------------------------------------------------------------


def run_lineage(
    run: OneRun,
    *,
    agent: Annotated[int | None, Option(metavar="N", help="Show the history of this agent only.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show who lived, who left and why: all agents of a run in a table, or one agent's life, exam by exam.

    agilerl lineage runs/mine

    agilerl lineage runs/mine --agent 3
    """
    from agilerl.report.life import lives
    from agilerl.report.load import explain_unfinished, load_run
    from agilerl.runs.strict_json import dumps

    record = load_run(run)
    if agent is not None and agent not in record.agents:
        agents = (
            one_line(f"its agents are {', '.join(map(str, sorted(record.agents)))}") if record.agents else "it has none"
        )
        raise ConfigError(f"expected an agent of {shown(str(run))}, found {agent}; {agents}")
    histories = [life for life in lives(record) if agent in (None, life["agent"])]
    if as_json:
        print(dumps(histories if agent is None else histories[0]))
    elif agent is None:
        _show_lives(histories, record.family.line)
    else:
        _show_life(histories[0], "stayed to the end" if record.is_finished else "is in the population")
    if not as_json and (note := explain_unfinished(record)):
        tell_line(note)


def _show_lives(histories: Sequence[dict[str, Any]], line: Sequence[int]) -> None:
    table = columns("agent", "parent", "iter.", "exam", "genes", "left", "why", left=("genes", "why"), gap=2)
    for column in table.columns:
        column.no_wrap = column.header not in ("genes", "why")
    table.columns[-1].min_width = 30  # in 80 columns, too
    for life in histories:
        reasons = [life["idle"], life["elite"], life["reason"].removeprefix("left: ")]
        reasons += [symptom["name"] for symptom in life["symptoms"]]
        table.add_row(
            f"{life['agent']}{'*' if life['agent'] in line else ' '}",
            "-" if life["parent"] is None else str(life["parent"]),
            str(life["iterations"]),
            f"{life['exams'][-1]['mean']:.3f}" if life["exams"] else "-",
            genes_text(life["hyperparameters"], 2) or "-",
            "-" if life["left"] is None else str(life["left"]),
            "; ".join(filter(None, reasons)),
        )
    console().print(table)
    tell_line("* winning lineage; left: after this generation. One agent's life: --agent N")


def _show_life(life: dict[str, Any], stays: str) -> None:
    trained = life["idle"] or f"trained for {counted(life['iterations'], 'iteration')}"
    became = stays if life["left"] is None else f"left after generation {life['left']}"
    tell_line(f"Agent {life['agent']} {trained} and {became}.")
    tell_line(f"Its hyperparameters at the end: {genes_text(life['hyperparameters']) or 'none evolved'}")
    table = facts((f"generation {event['generation']}", event["sentence"]) for event in life["events"])
    table.columns[0].no_wrap = True
    console().print(table)


# -- ``agilerl schedule``: the hyperparameters that a search found, against tokens ------------------------------------


def run_schedule(
    run: OneRun,
    *,
    out: Annotated[
        Path | None, Option(parser=as_path, metavar="FILE", help="YAML file; default: schedule.yaml here.")
    ] = None,
    extrapolate: Annotated[
        int | None, Option(metavar="TOKENS", help="Stretch it to this many tokens of training.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export the hyperparameters that the elite of a run was trained with, followed through its ancestors.

    Values are listed against the tokens trained on. You can edit the file and train one agent with it:

    agilerl schedule runs/mine --out mine.yaml

    agilerl train my.yaml --replay mine.yaml
    """
    from agilerl.hpo.schedule import hyperparameter_schedule, stretched
    from agilerl.runs import RunLayout, read_lines, read_run
    from agilerl.runs.directory import as_written
    from agilerl.runs.strict_json import read_json

    layout, config = RunLayout(run), read_run(run)["config"]
    elite = read_json(layout.summary).get("elite") if layout.summary.exists() else None
    if elite is None:
        raise ConfigError(
            f"expected a finished run with an elite, found none in {shown(str(run))}; resume it with agilerl resume"
        )
    with as_written(run):
        # Refuses what is no whole number with TypeError, which as_written() turns into a sentence.
        index = operator.index(elite["index"])
        schedule = hyperparameter_schedule(read_lines(layout.lineage), index)
    if not schedule["genes"]:
        raise ConfigError(
            f"no hyperparameter evolved in {shown(str(run))}, so there is no schedule; its values are in run.json"
        )
    if extrapolate is not None:
        schedule = stretched(schedule, extrapolate)
    schedule |= {"algorithm": config["algorithm"]["name"], "lr_schedule": config["training"].get("lr_schedule")}
    if out is None and not as_json:
        out = Path("schedule.yaml")
    if out is not None and out.exists():
        raise ConfigError(f"{shown(str(out))} exists; give another file with --out, or delete it")
    line = " -> ".join(map(str, schedule["ancestors"]))
    header = (
        f"# The path of agent {index}, the elite of {shown(run.name)} (line {line}): values by tokens trained on, of "
        f"{schedule['total_tokens']}.\n# One agent trains with it: agilerl train MANIFEST --replay FILE\n"
    )
    ordered = {name: schedule[name] for name in ("algorithm", "genes", "lr_schedule")}
    if out is not None:
        # default_flow_style=None: innermost collections on one line, so that each step has one.
        out.write_text(header + yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None), encoding="utf-8")
    if as_json:
        print(json.dumps(schedule, indent=1))
        return
    table = columns("tokens", *schedule["genes"], left=schedule["genes"], gap=2)
    table.title = f"agents {line}"
    values = {name: {step["tokens"]: step["value"] for step in steps} for name, steps in schedule["genes"].items()}
    for tokens in sorted({tokens for steps in values.values() for tokens in steps}):
        cells = (steps.get(tokens, "") for steps in values.values())
        table.add_row(f"{tokens:,}", *(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    table.add_row(f"{schedule['total_tokens']:,}", *["end"] * len(values))
    console().print(table)
    if schedule["not_replayed"]:
        kinds = ", ".join(sorted({str(change["kind"]) for change in schedule["not_replayed"]}))
        tell_line(f"not part of a schedule, because it happened to weights: {kinds}")
    tell_line(f"written: {out}")
