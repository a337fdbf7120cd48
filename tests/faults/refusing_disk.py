"""A process whose disk refuses: each change of a run directory is tried with an error at each of its operations.

``python -m tests.faults.refusing_disk RUN EVERY ACTION ...`` prints a line of JSON an attempt. ``RUN`` is an
unfinished run that is worked on in place.
"""

import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agilerl.runs import Journal, RunDirectory, read_lines
from agilerl.runs.atomic import remove_leftovers, verify_folder
from agilerl.runs.checkpoints import CheckpointStore
from agilerl.runs.completions import CompletionRecord, completion_steps, read_completions, write_completions
from agilerl.training.records import RunWriter
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests.faults.failpoints import arm
from tests.faults.unfinished import contents

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


class Disk:
    """Counts operations, and refuses the one of a number, or all from it on."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.first: int | None = None
        self.last: int = 0
        self.error = 0

    def visit(self, operation: str, path: str) -> None:
        if not path:  # a moment between operations
            return
        number = len(self.calls)
        self.calls.append(f"{operation} {path}")
        if self.first is not None and self.first <= number <= self.last:
            raise OSError(self.error, os.strerror(self.error), path)

    def trust(self) -> None:
        self.calls, self.first = [], None

    def refuse(self, number: int, error: int, *, stays: bool) -> None:
        self.calls, self.first, self.last, self.error = [], number, sys.maxsize if stays else number, error


class Actions:
    """What changes a run directory, and what puts it back."""

    def __init__(self, root: Path) -> None:
        self.saved = open_run(root, report=print)
        self.session = build(self.saved.config, self.saved.checkpoint)
        assert self.session.saved is not None
        self.run, self.place = self.saved.run, self.session.saved
        self.other = root.with_name("new")
        self.open()
        self.kinds = [record["kind"] for record in self.records.journal.records]

    def open(self) -> None:
        self.records = RunWriter(self.run, self.place)

    def tidy(self) -> None:
        for folder in (self.run.root, self.run.checkpoints):
            remove_leftovers(folder)
        self.open()

    def reopen(self) -> None:
        self.records.close()
        self.open()

    def commit(self) -> None:
        progress = self.place.progress
        progress.iteration = 3
        self.records.checkpoint(self.session.population, progress, keep=3)

    def undo_commit(self) -> None:
        self.place.progress.iteration = 2
        shutil.rmtree(self.run.checkpoints / "000003", ignore_errors=True)

    def journal(self) -> None:
        self.records.journal.append({"kind": "test", "text": "x" * 500})

    def metrics(self) -> None:
        for number in range(3):
            self.records.metrics.write({"kind": "train", "number": number})
        self.records.metrics.sync()

    def completions(self) -> None:
        row = CompletionRecord(0, 3, 0, 0, 0, "p", "c", "a", 1.0, 1, "stop")
        write_completions(self.run.completions, 3, [row] * 20)

    def elite(self) -> None:
        self.records.elite(self.session.population.agents[0])

    def undo_elite(self) -> None:
        shutil.rmtree(self.run.elite, ignore_errors=True)

    def summary(self) -> None:
        self.run.finish({"status": "going on", "generations": 1})

    def undo_summary(self) -> None:
        self.run.summary.unlink(missing_ok=True)

    def start(self) -> None:
        RunDirectory.create(self.other, {"a": 1}, 0).close()

    def undo_start(self) -> None:
        shutil.rmtree(self.other, ignore_errors=True)

    # -- what must hold after each attempt ---------------------------------------------------------------------------

    def check(self, before: dict[str, bytes]) -> str:
        """Return what is wrong with what is on the disk, nothing if it is as it should be."""
        now = contents(self.run.root)
        for name in (name for name in before if name.startswith("checkpoints/")):
            if now.get(name) != before[name]:
                return f"{name} has changed"
        for folder in (CheckpointStore(self.run.checkpoints).latest(), self.run.elite):
            if folder is not None and folder.exists():
                verify_folder(folder)  # raises where something half-written stands under a final name
        journal = Journal(self.run.journal)
        kinds = [record["kind"] for record in journal.records]
        journal.close()
        if kinds[: len(self.kinds)] != self.kinds or len(kinds) > len(self.kinds) + 1:
            return f"the journal holds {kinds}"
        list(read_lines(self.run.metrics))
        for step in completion_steps(self.run.completions):
            read_completions(self.run.completions, step)
        if self.run.summary.exists():
            json.loads(self.run.summary.read_text())
        if (self.other / "run.json").exists():
            RunDirectory.open(self.other).close()
        return ""


def attempts(actions: Actions, disk: Disk, name: str, every: int) -> Iterator[dict[str, Any]]:
    """Try an action with an error at every operation, or at one of ``every`` so many."""
    act: Callable[[], None] = getattr(actions, name)
    undo: Callable[[], None] = getattr(actions, f"undo_{name}", lambda: None)
    disk.trust()
    act()
    calls = disk.calls
    disk.trust()
    undo()
    actions.reopen()
    before = contents(actions.run.root)
    for number, call in list(enumerate(calls))[:: every if len(calls) > 20 else 1]:
        stays = number // every % 2 == 0
        disk.refuse(number, ERRORS[number // every % 3], stays=stays)
        raised = outcome_of(act)
        disk.trust()
        actions.records.close()
        reason = {"call": call, "stays": stays, "reason": os.strerror(disk.error)}
        yield {**reason, **raised, "wrong": actions.check(before)}
        undo()
        actions.tidy()
    act()  # the disk is well again


def full_disks(actions: Actions, name: str) -> Iterator[dict[str, Any]]:
    """Really write beyond a limit that the system sets, also from libraries that are not Python."""
    act: Callable[[], None] = getattr(actions, name)
    for size in (0, 100, 1000, 3000, 10_000, 40_000):
        before = contents(actions.run.root)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        raised = outcome_of(act)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        actions.records.close()
        yield {"call": f"a limit of {size} bytes", "reason": "File too large", **raised, "wrong": actions.check(before)}
        getattr(actions, f"undo_{name}")()
        actions.tidy()


def outcome_of(act: Callable[[], None]) -> dict[str, str]:
    try:
        act()
    except BaseException as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "", "message": ""}


def main(root: Path, every: int, names: list[str]) -> None:
    disk = Disk()
    actions = Actions(root)
    for name in ("commit", "elite"):
        for attempt in full_disks(actions, name):
            print(json.dumps({"action": f"{name} on a full disk", **attempt}), flush=True)
    arm(root.parent, disk.visit)
    for name in names:
        for attempt in attempts(actions, disk, name, every):
            print(json.dumps({"action": name, **attempt}), flush=True)
        getattr(actions, f"undo_{name}", lambda: None)()
        actions.reopen()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
