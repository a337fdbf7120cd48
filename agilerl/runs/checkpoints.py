"""Numbered checkpoints of a population: committed atomically, verified before use, and set aside if damaged."""

import logging
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from agilerl.checks.arguments import checked
from agilerl.errors import CheckpointError
from agilerl.runs.atomic import commit_folder, list_files, remove_folder, remove_leftovers, verify_folder

STATE = "state.json"
"""Name of the population's own state inside a checkpoint."""

# Two are kept: if the newest turns out to be damaged, the run is resumed from the other one.
_KEPT, _NUMBERED = 2, re.compile(r"\d{6,}")

_log = logging.getLogger(__name__)


@checked
def agent_folder(checkpoint: Path, index: int) -> Path:
    """Return the folder of agent ``index`` inside the checkpoint folder ``checkpoint``.

    In it are the PEFT folders ``actor``, ``reference`` and ``critic``, as far as the agent has them, the moments of the
    optimizer in ``optimizer.safetensors``, and hyperparameters, counters and identity in ``agent.json``.
    """
    return checkpoint / f"agent_{index}"


@checked
def newest_agents(root: Path) -> dict[str, Path]:
    """Return the adapters in the newest intact checkpoint of a run's folder ``checkpoints/``, by their folders' names.

    These are the agents, ``agent_0`` and so on, and the best one so far, ``elite``. For readers: it takes no lock, and
    leaves damaged checkpoints where they are. Raises CheckpointError if there is no intact one.
    """
    store = CheckpointStore(root)
    for number in reversed(store.numbers()):
        folder = store.path(number)
        with suppress(CheckpointError):
            verify_folder(folder)
            # By number: agent_10 comes after agent_9.
            agents = sorted(folder.glob("agent_*"), key=lambda agent: (len(agent.name), agent.name))
            actors = {agent.name: agent / "actor" for agent in [*agents, folder / "elite"]}
            return {name: actor for name, actor in actors.items() if actor.is_dir()}
    raise CheckpointError(f"expected an intact checkpoint in {root}, found none")


class CheckpointStore:
    """The folder ``checkpoints/`` of a run: ``000123/`` holds the state after step 123.

    Only the process that holds the lock of the run directory may use it. ``report`` receives one sentence about
    each checkpoint that had to be set aside; by default the sentence is logged as a warning.
    """

    @checked
    def __init__(self, root: Path, *, report: Callable[[str], None] = _log.warning) -> None:
        self.root = root
        self._report = report
        self._verified: set[int] = set()

    def path(self, number: int) -> Path:
        """Return the folder of checkpoint ``number``, whether or not it exists."""
        if number < 0:
            raise CheckpointError(f"the number of a checkpoint must be at least 0, found {number}.")
        return self.root / f"{number:06d}"

    def numbers(self) -> list[int]:
        """Return the numbers of the committed checkpoints, oldest first; they need not be intact."""
        if not self.root.is_dir():
            return []
        return sorted(int(p.name) for p in list_files(self.root) if _NUMBERED.fullmatch(p.name) and p.is_dir())

    def commit(self, number: int, write: Callable[[Path], None], *, keep: Collection[int] = ()) -> Path:
        """Save a checkpoint from the files that ``write(folder)`` writes to a temporary folder; return its folder.

        After it has been read back intact, older ones are deleted, except the newest intact one before it and the
        numbers in ``keep`` (the best). Raises CheckpointError if ``number`` exists, WriteError if the disk is full or
        refuses; if ``write`` raises, its exception is passed on and nothing changes.
        """
        target = self.path(number)
        remove_leftovers(self.root)
        commit_folder(target, write)
        try:
            verify_folder(target)
        except CheckpointError as error:
            self.put_aside(target, str(error))
            raise
        self._verified.add(number)
        self.prune(keep)
        return target

    def latest(self, *, before: int | None = None) -> Path | None:
        """Return the newest intact checkpoint (of those with a number below ``before``), or None if there is none.

        A damaged one is reported, renamed to ``*.corrupt`` and skipped.
        """
        number = self._newest_intact([n for n in self.numbers() if before is None or n < before])
        return None if number is None else self.path(number)

    def put_in_order(self, number_in: Callable[[Path], int | None]) -> None:
        """Restore the names of checkpoints that were renamed, and report it.

        ``number_in`` returns the number that a folder holds, None if it cannot be read. A duplicate of the checkpoint
        with the right name is set aside. Raises CheckpointError if a folder cannot be renamed.
        """
        if not self.root.is_dir():
            return
        # Numbers of any length: a renamed checkpoint may lack the leading zeros.
        folders = [p for p in list_files(self.root) if re.fullmatch("[0-9]+", p.name) and p.is_dir()]
        numbers = {folder: number_in(folder) for folder in folders if not folder.is_symlink()}
        wrong = {folder: n for folder, n in numbers.items() if n is not None and folder != self.path(n)}
        # Through temporary names that no reader looks for, because two checkpoints may have been swapped.
        moved = {_rename(folder, f"{folder.name}.renamed"): (folder, n) for folder, n in wrong.items()}
        for aside, (folder, number) in moved.items():
            target = self.path(number)
            if target.exists():
                self.put_aside(aside, f"{folder} holds iteration {number}, like {target}.")
            else:
                _rename(aside, target.name)
                self._report(f"The checkpoint {folder} holds iteration {number}; it was renamed to {target}.")

    @property
    def damaged(self) -> bool:
        """True if a checkpoint of this run was set aside, now or earlier."""
        return next(self.root.glob("*.corrupt"), None) is not None

    def _newest_intact(self, numbers: list[int]) -> int | None:
        for number in reversed(numbers):
            try:
                verify_folder(self.path(number))
            except CheckpointError as error:
                if isinstance(error.__cause__, PermissionError):
                    raise  # It is not damaged; this user just may not read it.
                self.put_aside(self.path(number), str(error))
            else:
                self._verified.add(number)
                return number
        return None

    def put_aside(self, folder: Path, reason: str) -> None:
        """Rename a checkpoint that cannot be resumed from to ``*.corrupt``, and report why in a sentence."""
        aside = _free(folder, ".corrupt")
        try:
            folder.rename(aside)
        except OSError as failure:
            self._report(f"{reason} The checkpoint {folder} is skipped ({failure.strerror or failure}).")
        else:
            self._report(
                f"{reason} The checkpoint was set aside as {aside}; the one before it, if there is one, takes its "
                "place."
            )

    def prune(self, keep: Collection[int]) -> None:
        """Delete all but the newest two that are intact and the numbers in ``keep``; ``commit`` ends with it."""
        intact: list[int] = []
        older = self.numbers()
        while older and len(intact) < _KEPT:
            number = older.pop()
            # Count only checkpoints that this process has verified: deleting must never cost the last good one.
            if number in self._verified or self._newest_intact([number]) is not None:
                intact.append(number)
        for number in older:
            if number not in keep:
                self._verified.discard(number)
                remove_folder(self.path(number))


def _rename(folder: Path, name: str) -> Path:
    target = _free(folder.with_name(name))
    try:
        return folder.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} does not hold the iteration in its name, and cannot be renamed to {target}: "
            f"{error.strerror or error}; rename it"
        ) from error


def _free(folder: Path, suffix: str = "") -> Path:
    """Return the path beside a folder with a suffix, and with a number before it if that is taken."""
    names = chain([f"{folder.name}{suffix}"], (f"{folder.name}.{number}{suffix}" for number in count(1)))
    return next(path for path in map(folder.with_name, names) if not path.exists())
