"""What a run leaves, one digest a file, without what tells of time: equal evidence is an equal run."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.training.small_runs import TOURNAMENT, less_times, lines

SHORT = (
    *TOURNAMENT,
    "training.pop_size=3",
    "training.max_steps=192",
    "training.evo_steps=2",
    "training.checkpoint_steps=1",
    "environment.data_batch_size_per_gpu=4",
    "environment.eval_prompts=8",
    "environment.test_prompts=10",
    "algorithm.group_size=4",
    "algorithm.batch_size=8",
    "network.lora_config.r=4",
)
"""4 iterations in 2 generations, a checkpoint after each, with small files."""


def evidence(root: Path, *, extra_checkpoints: bool = False) -> dict[str, str]:
    """Return a digest of every file of a run directory by its name, of ``report.html`` only that it is whole.

    A file that should not be there is part of it as well. ``extra_checkpoints``: the runs to be compared were not
    saved at the same moments, so that commits are left out of the journal, and all but the last checkpoint.
    """
    found = {}
    last = max((p.name for p in (root / "checkpoints").iterdir() if p.name.isdigit()), default="")
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name = path.relative_to(root).as_posix()
        if name == ".lock" or path.name == "clock.json":
            continue
        if extra_checkpoints and name.startswith("checkpoints/") and not name.startswith(f"checkpoints/{last}/"):
            continue
        found[name] = hashlib.sha256(_content(path, name, extra_checkpoints)).hexdigest()
    return found


def _content(path: Path, name: str, extra_checkpoints: bool) -> bytes:
    value: Any
    if name == "metrics.jsonl":
        value = less_times(lines(path))
    elif name == "journal.jsonl" and extra_checkpoints:
        value = [line["data"] for line in lines(path) if line["data"]["kind"] != "commit"]
    elif name == "summary.json":
        value = {key: kept for key, kept in json.loads(path.read_text()).items() if key != "seconds"}
    elif name == "run.json":
        value = json.loads(path.read_text())["config"]
    elif path.name == "MANIFEST.json":
        value = {key: entry for key, entry in json.loads(path.read_text()).items() if key != "clock.json"}
    elif name == "report.html":
        value = path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    else:
        return path.read_bytes()
    return json.dumps(value).encode()


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Return the names of the files in which two runs differ."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
