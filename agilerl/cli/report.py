"""``agilerl report``: run directories as one HTML file."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from agilerl.arguments import shown
from agilerl.errors import ConfigError

_LONGEST_NAME = 100


def run_report(runs: Sequence[Path], out: Path | None) -> None:
    """Write the report and print where it is; see ``agilerl report --help``."""
    out = default_report(runs) if out is None else out
    _check_file(out)
    from agilerl.report import build_report

    print(build_report(runs, out))


def default_report(runs: Sequence[Path]) -> Path:
    """Return ``report.html`` in a run; for several a file in the working directory that is called after them.

    The report in the folder of a run is about that run alone, and stays so.
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
    """Raise ConfigError where writing would replace what is no report, a file of the run say."""
    try:
        mode = out.stat().st_mode
    except OSError:
        return  # nothing there, or writing says why not
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
