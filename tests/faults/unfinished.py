"""A run that somebody left half-way: two checkpoints, three iterations."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.config.manifest import load_manifest
from agilerl.runs import atomic, strict_json
from agilerl.runs.atomic import MANIFEST
from agilerl.runs.directory import _sha256
from agilerl.training.run import train
from agilerl.training.setup import Session, build
from tests.faults.evidence import SHORT
from tests.faults.pieces import until


@dataclass(frozen=True)
class Unfinished:
    root: Path
    session: Session

    def copy(self, place: Path) -> Path:
        """Return a copy of the run directory."""
        return Path(shutil.copytree(self.root, place, symlinks=True))


def leave_unfinished(root: Path, *overrides: str) -> Unfinished:
    """Run three of four iterations; checkpoints are after the first and the second."""
    two = ("training.pop_size=2", "training.max_steps=128")
    session = build(load_manifest(None, [*SHORT, *two, *overrides]))
    events = train(session, root, command=["test"])
    until(events, 3)
    events.close()  # type: ignore[attr-defined]
    assert sorted(p.name for p in (root / "checkpoints").iterdir()) == ["000001", "000002"]
    return Unfinished(root, session)


def newest(root: Path) -> Path:
    return max((root / "checkpoints").glob("??????"))


def sealed(folder: Path) -> None:
    """Write the manifest of a checkpoint anew, as somebody who means harm would."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    entries = {p.relative_to(folder).as_posix(): atomic._entry(p) for p in files}
    (folder / MANIFEST).write_text(strict_json.dumps(entries, indent=2) + "\n")


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Replace what a JSON file holds by what ``change`` returns for it, or by what it does to it."""
    value = json.loads(path.read_text())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))


def change_config(root: Path, change: Callable[[Any], Any]) -> None:
    """Change the configuration in ``run.json``, with a hash that fits."""

    def whole(info: Any) -> Any:
        change(info["config"])
        return {**info, "config_sha256": _sha256(strict_json.loads(json.dumps(info["config"])))}

    change_json(root / "run.json", whole)


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
