"""Run directories with other settings than they were made with."""

import json
import shutil
from pathlib import Path
from typing import Any

from agilerl.runs import RunDirectory


def change_settings(run: Path, given: Any = None, **sections: dict[str, Any]) -> None:
    """Write other settings into a run, as a stranger could have."""
    info = json.loads((run / "run.json").read_text())
    for part in ("config", "given"):
        for section, values in sections.items():
            info[part].setdefault(section, {}).update(values)
    other = run.parent / "other"
    RunDirectory.create(other, info["config"], 0, given=given or info["given"], command=[]).close()
    shutil.move(other / "run.json", run / "run.json")
    shutil.rmtree(other)
