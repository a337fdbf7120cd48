"""The commands that do not start a run: ``agilerl check``, ``report``, ``lineage``, ``schedule`` and ``env``."""

import json
import operator
import os
import stat
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agilerl.arguments import shown
from agilerl.cli.output import console, say, tell_line
from agilerl.errors import ConfigError

if TYPE_CHECKING:
    from agilerl.runs import RunLayout


def run_check(arguments: Sequence[str], *, tokenizer: str | None, allow_code: bool, as_json: bool) -> None:
    """Check what the first argument names; see ``agilerl check --help``."""
    target, *settings = arguments
    if _is_manifest(target):
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer is for environments; the manifest {shown(target)} names its model itself")
        _check_manifest(Path(target), settings, allow_code)
        _print(target, [], as_json)
        return
    findings = _check_environment(target, _keywords(settings), tokenizer)
    _print(target, findings, as_json)
    if any(finding["level"] == "error" for finding in findings):
        sys.exit(1)


def _check_manifest(path: Path, overrides: Sequence[str], allow_code: bool) -> None:
    from agilerl.config.manifest import load_manifest

    config = load_manifest(path, overrides)
    from agilerl.training.setup import build  # imported once the manifest is known to be well formed

    build(config, allow_code=allow_code)


def _check_environment(name: str, settings: dict[str, Any], model: str | None) -> list[dict[str, str]]:
    from agilerl.envs.adapters import make_env  # also tells gymnasium the built-in ids
    from agilerl.envs.check import check_env

    make_env(name, **settings).close()  # a name that does not exist is a mistake in the command, not a finding
    tokenizer = None
    if model is not None:
        from agilerl.models.base import load_tokenizer

        tokenizer = load_tokenizer(model)
    findings = check_env(partial(make_env, name, **settings), tokenizer)
    return [{"level": f.level, "code": f.code, "sentence": f.sentence} for f in findings]


def _print(target: str, findings: Sequence[dict[str, str]], as_json: bool) -> None:
    errors = sum(finding["level"] == "error" for finding in findings)
    if as_json:
        print(json.dumps({"target": target, "ok": errors == 0, "findings": list(findings)}, indent=1))
        return
    for finding in findings:
        tell_line(f"{finding['level']}: {finding['sentence']} [{finding['code']}]")
    warnings = len(findings) - errors
    counts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    tell_line(f"{target}: {' and '.join(counts) or 'nothing wrong'}")


def _is_manifest(name: str) -> bool:
    """Return whether a name is a manifest, not an environment: by its suffix, or because the file exists."""
    try:
        return Path(name).suffix in (".yaml", ".yml") or (Path(name).is_file() and not name.endswith(".py"))
    except OSError:  # the name is too long for the file system
        return False


def _keywords(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` pairs as keyword arguments; values are read as YAML."""
    keywords = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"expected key=value as a setting of the environment, found {shown(setting)}")
        try:
            keywords[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: thousands of digits, or 31 June
            raise ConfigError(f"expected a YAML value for {key}, found {shown(value)}") from error
    return keywords


# -- ``agilerl report``: run directories as one HTML file -------------------------------------------------------------


_LONGEST_NAME = 100


_RELOAD = 10
"""Seconds after which an open page reloads itself."""


def run_report(runs: Sequence[Path], out: Path | None, *, live: bool = False, price: float | None = None) -> None:
    """Write the report and print its path; see ``agilerl report --help``."""
    out = default_report(runs) if out is None else out
    _check_file(out)
    from agilerl.report import build_report

    if live:
        _follow(runs, out, price)
    else:
        tell_line(build_report(runs, out, price=price))


def _follow(runs: Sequence[Path], out: Path, price: float | None) -> None:
    """Write the report of runs whenever they have something new; the last page no longer reloads itself.

    It takes at most a tenth of a core from the runs.
    """
    from agilerl.report import build_report
    from agilerl.runs import RunLayout

    layouts = [RunLayout(run) for run in runs]
    written: list[tuple[int, int]] | None = None
    try:
        while not all(layout.is_finished for layout in layouts):
            began, now = time.monotonic(), _states(layouts)
            if now != written:
                build_report(runs, out, reload=_RELOAD, price=price)
            if written is None:
                tell_line(out)
                say("Open it in a browser: it follows the runs until they finish. Ctrl-C ends that.")
            written = now
            time.sleep(max(1.0, 9 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        pass
    build_report(runs, out, price=price)
    if written is None:
        tell_line(out)


def _states(layouts: Sequence["RunLayout"]) -> list[tuple[int, int]]:
    files = [file for layout in layouts for file in (layout.metrics, layout.lineage) if file.exists()]
    return [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]


def default_report(runs: Sequence[Path]) -> Path:
    """Return ``report.html`` in a run; for several runs, a file in the working directory that is named after them.

    The report in the folder of a run is always about that run alone.
    """
    if len(runs) == 1:
        return runs[0] / "report.html"
    places = [Path(os.path.abspath(path)) for path in runs]
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        names = ["-".join(place.parts[-2:]) for place in places]
    name = "-".join(names)
    if len(os.fsencode(name)) > _LONGEST_NAME:
        shortened = os.fsencode(names[0])[:_LONGEST_NAME].decode(errors="ignore")
        name = f"{shortened}-and-{len(runs) - 1}-more"
    return Path(f"report-{name}.html")


def _check_file(out: Path) -> None:
    """Raise ConfigError if writing would replace anything but a report, e.g. a file of the run."""
    try:
        mode = out.stat().st_mode
    except OSError:
        return  # nothing there, or writing reports the reason
    if stat.S_ISDIR(mode):
        raise ConfigError(f"expected a file for the report, found the folder {shown(str(out))}; add a name to it")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"expected a file for the report, found the device or pipe {shown(str(out))}")
    try:
        with open(out, "rb") as file:
            begins = file.read(500).strip().lower()
    except OSError:
        return
    if begins and not begins.startswith((b"<!doctype html", b"<html")):
        raise ConfigError(
            f"{shown(str(out))} exists and is not a report, so it is not overwritten; choose another name, or delete it"
        )


# -- ``agilerl lineage``: who lived, who left and why ------------------------------------------------------------------


def run_lineage(run: Path, *, agent: int | None, as_json: bool) -> None:
    """Print all agents of a run, or what happened to one of them; see ``agilerl lineage --help``."""
    from agilerl.report.life import lives
    from agilerl.report.load import load_run, trace_family
    from agilerl.runs.strict_json import dumps

    record = load_run(run)
    if agent is not None and agent not in record.agents:
        known = f"it has {len(record.agents)}, the last one is {max(record.agents)}" if record.agents else "it has none"
        raise ConfigError(f"expected an agent of {shown(str(run))}, found {agent}; {known}")
    found = [life for life in lives(record) if agent in (None, life["agent"])]
    if as_json:
        print(dumps(found if agent is None else found[0]))
    elif agent is None:
        _show_lives(found, trace_family(record).line)
    else:
        _show_life(found[0])


def _show_lives(found: Sequence[dict[str, Any]], line: Sequence[int]) -> None:
    from rich.table import Table

    from agilerl.cli.progress import genes_text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("agent", "parent", "iter.", "exam"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("genes")
    table.add_column("left", justify="right", no_wrap=True)
    table.add_column("why", min_width=30)  # in 80 columns, too
    for life in found:
        exam = life["exams"][-1] if life["exams"] else None
        table.add_row(
            f"{life['agent']}{'*' if life['agent'] in line else ' '}",
            "-" if life["parent"] is None else str(life["parent"]),
            str(life["iterations"]),
            f"{exam['mean']:.3f}" if exam else "-",
            genes_text(life["hyperparameters"], 2) or "-",
            "-" if life["left"] is None else str(life["left"]),
            "; ".join(filter(None, [life["reason"].removeprefix("left: "), *(s["name"] for s in life["symptoms"])])),
        )
    output = console()
    output.print(table)
    output.print("* winning lineage; left: after this generation. One agent's life: --agent N")


def _show_life(life: dict[str, Any]) -> None:
    from rich.table import Table

    from agilerl.cli.progress import genes_text

    output = console()
    became = "stayed to the end" if life["left"] is None else f"left after generation {life['left']}"
    output.print(f"Agent {life['agent']} trained for {life['iterations']} iterations and {became}.")
    output.print(f"Its hyperparameters at the end: {genes_text(life['hyperparameters']) or 'none evolved'}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for event in life["events"]:
        table.add_row(f"generation {event['generation']}", event["sentence"])
    output.print(table)


# -- ``agilerl schedule``: the hyperparameters that a search found, against tokens ------------------------------------


def run_schedule(run: Path, *, out: Path | None, extrapolate: int | None, as_json: bool) -> None:
    """Write the schedule of a run's elite and show it; see ``agilerl schedule --help``."""
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
        index = operator.index(elite["index"])
        schedule = hyperparameter_schedule(read_lines(layout.lineage), index)
    if not schedule["genes"]:
        raise ConfigError(
            f"no hyperparameter evolved in {shown(str(run))}, so there is no schedule; its values are in run.json"
        )
    if extrapolate is not None:
        schedule = stretched(schedule, extrapolate)
    schedule |= {"algorithm": config["algorithm"]["name"], "lr_schedule": config["training"].get("lr_schedule")}
    if as_json and out is None:
        print(json.dumps(schedule, indent=1))
        return
    out = Path("schedule.yaml") if out is None else out
    if out.exists():
        raise ConfigError(f"{shown(str(out))} exists; give another file with --out, or delete it")
    line = " -> ".join(map(str, schedule["ancestors"]))
    header = (
        f"# The path of agent {index}, the elite of {shown(run.name)} (line {line}): values by tokens trained on, of "
        f"{schedule['total_tokens']}.\n# One agent trains with it: agilerl train MANIFEST --replay FILE\n"
    )
    ordered = {name: schedule[name] for name in ("algorithm", "genes", "lr_schedule")}
    try:
        out.write_text(header + yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{shown(str(out))} cannot be written: {error.strerror or error}") from error
    if as_json:
        print(json.dumps(schedule, indent=1))
        return
    _show_schedule(schedule)
    tell_line(f"written: {out}")


def _show_schedule(schedule: dict[str, Any]) -> None:
    """Print the steps as a table: tokens trained on, and each gene's value from there on."""
    from rich.table import Table

    table = Table(
        "tokens", *schedule["genes"], box=None, title=f"agents {' -> '.join(map(str, schedule['ancestors']))}"
    )
    table.columns[0].justify = "right"
    for tokens in sorted({step["tokens"] for steps in schedule["genes"].values() for step in steps}):
        values = [
            next(
                (
                    f"{step['value']:.4g}" if isinstance(step["value"], float) else str(step["value"])
                    for step in steps
                    if step["tokens"] == tokens
                ),
                "",
            )
            for steps in schedule["genes"].values()
        ]
        table.add_row(f"{tokens:,}", *values)
    table.add_row(f"{schedule['total_tokens']:,}", *["end"] * len(schedule["genes"]))
    console().print(table)
    if schedule["not_replayed"]:
        kinds = ", ".join(sorted({str(one["kind"]) for one in schedule["not_replayed"]}))
        tell_line(f"not part of a schedule, because it happened to weights: {kinds}")


# -- ``agilerl env``: versions, hardware and settings of the process --------------------------------------------------


def run_env(*, as_json: bool) -> None:
    """Print what a bug report needs."""
    from rich.table import Table

    from agilerl.cli.process_settings import described
    from agilerl.errors import DISTRIBUTION, mixed_installation
    from agilerl.runs import collect_hardware, collect_versions

    home = Path(__file__).resolve().parents[1]
    found: dict[str, Any] = {
        "installation": {"installation": mixed_installation() or f"{DISTRIBUTION} in {home}"},
        "versions": collect_versions(),
        "hardware": collect_hardware(),
        "process": described(),
    }
    if as_json:
        print(json.dumps(found, indent=1, sort_keys=True))
        return
    table = Table(show_header=False, box=None)
    for section in found.values():
        for name, value in section.items():
            table.add_row(name, "not installed" if value is None else str(value))
    console().print(table)
