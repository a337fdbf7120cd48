"""``agilerl env``: versions, hardware and settings of the process."""

import json
from typing import Any

from rich.table import Table

from agilerl.cli.output import console
from agilerl.cli.process_settings import described
from agilerl.runs.directory import collect_hardware, collect_versions


def run_env(*, as_json: bool) -> None:
    """Print what a bug report needs."""
    found: dict[str, Any] = {
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
