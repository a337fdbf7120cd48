"""The run directory: its paths, the lock on it, the settings and the environment that the run was started with."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import stat
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import filelock

from agilerl import hooks
from agilerl.checks.arguments import Location, Seed, checked, shown
from agilerl.checks.redaction import redacted
from agilerl.errors import AgileRLError, CheckpointError, WriteError
from agilerl.gone import remaining
from agilerl.runs import strict_json
from agilerl.runs.atomic import PLAIN_FILE, is_leftover, list_files, remove_leftovers, write_json, writing
from agilerl.runs.journal import Closing, read_lines
from agilerl.safety.bounds import check_links, memory_bytes

SCHEMA_VERSION = 1
"""Version of the formats in a run directory; a directory of a newer version is refused."""

ARITHMETIC_VERSION = 12
"""Raised with every change that leads to different bits, or another selection, for the same seed. An unfinished run of
another version is not resumed, because its result would differ. Version 1 did not write it."""

_LOCK = ".lock"
ADAPTER_CONFIG = "adapter_config.json"
"""The file that makes a folder a PEFT adapter."""
_ABOVE = 4
"""Folders above an adapter in which its run is looked for: RUN/checkpoints/000123/agent_4/actor."""
_PARTS = frozenset(
    {"run.json", "summary.json", "journal.jsonl", "metrics.jsonl", "lineage.jsonl", "completions", "checkpoints"}
    | {"elite", "report.html", "trackers.json", "tensorboard", "wandb", _LOCK}
)
"""All that a run writes into its directory."""
_KINDS: dict[type, tuple[str, ...]] = {
    int: ("schema_version", "seed"),
    str: ("config_sha256", "started"),
    list: ("command",),
    dict: ("config", "versions", "files", "given", "hardware", "genes"),
}
"""Keys of ``run.json`` by the type of their values."""
_OPTIONAL = ("files", "given", "hardware", "genes")
"""Keys that a run of an older version may lack."""


class RunLayout:
    """The paths in a run directory; opens no files and checks nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        """The directory itself."""
        self.run_json = root / "run.json"
        """The settings that the run was started with."""
        self.summary = root / "summary.json"
        """Results; exists once the run is finished."""
        self.journal = root / "journal.jsonl"
        self.metrics = root / "metrics.jsonl"
        self.lineage = root / "lineage.jsonl"
        self.completions = root / "completions"
        self.checkpoints = root / "checkpoints"
        self.elite = root / "elite"
        """PEFT adapter folder of the best agent, with the tokenizer."""
        self.report = root / "report.html"
        self.trackers = root / "trackers.json"
        """What trackers know the run by, and how much of it they have; only in runs that have trackers."""

    @property
    def is_finished(self) -> bool:
        """True if ``summary.json`` says so; raises CheckpointError if parts of the finished run are missing."""
        if not self.summary.exists():
            return False
        summary = strict_json.read_json(self.summary)
        if summary.get("status") != "finished":
            return False
        if lacking := self._lacks(summary):
            raise CheckpointError(
                f"{self.summary} says that the run is finished, but {lacking}; restore the missing part, or delete "
                f"that file and resume the run: agilerl resume {shlex.quote(str(self.root))}"
            )
        return True

    @property
    def has_learned(self) -> bool:
        """Whether another start would lose anything: an iteration, a checkpoint or a result."""
        folders = [folder for folder in (self.checkpoints, self.completions) if folder.is_dir()]
        if self.summary.exists() or self.elite.exists() or any(map(list_files, folders)):
            return True
        try:
            return any(line.get("kind") == "train" for line in read_lines(self.metrics))
        except CheckpointError:  # what cannot be read may be worth a look
            return True

    @property
    def status(self) -> str:
        """``finished`` or what else the summary says; without one ``running``, or ``stopped`` if no process runs it."""
        if self.summary.exists():
            return str(strict_json.read_json(self.summary).get("status", "stopped"))
        return "running" if _in_use(self.root / _LOCK) else "stopped"

    def _lacks(self, summary: Mapping[str, Any]) -> str:
        """Return in words what is missing from a run that ``summary`` calls finished; "" if nothing is."""
        if not isinstance(summary.get("generations"), int):
            return "it gives no number of generations"
        if summary.get("elite") and not (self.elite / "adapter_model.safetensors").is_file():
            return f"{self.elite} holds no adapter"
        if not self.journal.exists():
            return ""
        try:
            records = [line["data"] for line in read_lines(self.journal)]
            commits = [record["checkpoint"] for record in records if record["kind"] == "commit"]
            last = int(commits[-1]) if commits else 0
        except (CheckpointError, KeyError, TypeError, ValueError):
            return ""  # a damaged journal does not invalidate existing results
        if last != summary.get("iterations"):
            return f"the last checkpoint in {self.journal} is after iteration {last}, which contradicts the summary"
        return ""


class RunDirectory(RunLayout, Closing):
    """A run directory that this process has locked, until ``close`` or the end of a ``with`` block."""

    def __init__(self, root: Path, lock: "DirectoryLock", info: dict[str, Any]) -> None:
        super().__init__(root)
        self.info = info
        """Content of ``run.json``."""
        self._lock = lock

    @classmethod
    @checked
    def create(
        cls,
        path: Location,
        config: Mapping[str, Any],
        seed: Seed,
        *,
        given: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        files: Mapping[str, Mapping[str, str]] | None = None,
        date: datetime | None = None,
        overwrite: bool = False,
        usual_rate: float | None = None,
        genes: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a run in a directory that is empty, does not exist yet, or holds a run that learned nothing.

        ``config`` is the resolved configuration (any JSON value), ``given`` the part of it that was set explicitly
        (None: all of it). ``command`` (None: that of this process) is written without keys and passwords. ``files`` has
        the sha256 of the files that the run reads, by kind and path. ``date`` is what its chat templates see, local
        time (None: now). ``overwrite`` deletes a run in the directory, unless it is in use or something else lies
        beside it. For the report, ``usual_rate`` is the learning rate that is usual for the base, and ``genes`` are the
        ranges of what evolves, in words.
        Raises CheckpointError, having written nothing, if the directory is in use, or holds a run or something else.
        """
        # A copy as a reader gets it back, which later changes of the caller's do not reach.
        root = Path(path)
        document = strict_json.loads(strict_json.dumps(config))
        given = None if given is None else strict_json.loads(strict_json.dumps(given))
        try:
            check_vacant(root, overwrite=overwrite)
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the directory {root} cannot be used: {error.strerror or error}.") from error
        lock = DirectoryLock(root / _LOCK)
        try:
            # Check again under the lock: another process may have been faster.
            check_vacant(root, locked=True, overwrite=overwrite)
            delete_run(root)  # one that had learned nothing, or is to be overwritten
            info = {
                "schema_version": SCHEMA_VERSION,
                "arithmetic_version": ARITHMETIC_VERSION,
                "config": document,
                "config_sha256": _sha256(document),
                "seed": int(seed),
                "versions": collect_versions(),
                "hardware": collect_hardware(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "date": (date or datetime.now()).isoformat(timespec="seconds"),
                "command": redacted(sys.argv if command is None else command),
                "files": dict(files or {}),
            }
            if usual_rate is not None:
                info["usual_rate"] = usual_rate
            if genes is not None:
                info["genes"] = dict(genes)
            if given is not None:
                info |= {"given": given, "given_sha256": _sha256(given)}
            run = cls(root, lock, info)
            for folder in (run.completions, run.checkpoints):
                with writing(folder, "No run was started"):
                    folder.mkdir(exist_ok=True)
            # Written last: this file makes the directory a run.
            write_json(run.run_json, info)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    @checked
    def open(cls, path: Location) -> Self:
        """Take over the run directory of an unfinished run.

        Raises CheckpointError if it is missing, not a run directory, damaged, in use (with the owner's process id),
        finished, or begun by a version with different arithmetic.
        """
        root = Path(path)
        # Before the lock, whose file would otherwise appear in a directory that is no run.
        read_run(root)
        _check_plain(root)
        lock = DirectoryLock(root / _LOCK)
        try:
            # Read again under the lock: its last owner may have changed it meanwhile.
            run = cls(root, lock, read_run(root))
            if run.is_finished:
                raise CheckpointError(f"the run in {root} is finished: there is nothing left to do.")
            if (version := run.info.get("arithmetic_version", 1)) != ARITHMETIC_VERSION:
                raise CheckpointError(
                    f"the run in {root} was started with version {shown(version)} of the arithmetic, this agilerl "
                    f"computes with version {ARITHMETIC_VERSION}: it rounds or selects differently, so the run cannot "
                    "be resumed to the same bits. Resume it with the agilerl that started it, or start a new run; its "
                    "agents can still be loaded."
                )
            for folder in (root, run.completions, run.checkpoints):
                remove_leftovers(folder)
        except BaseException:
            lock.release()
            raise
        return run

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, with ``"status": "finished"`` unless the summary has another status."""
        self.check_open()
        write_json(self.summary, {"status": "finished", **summary})

    def check_open(self) -> None:
        """Raise CheckpointError if the directory has been closed."""
        if not self._lock.held:
            raise CheckpointError(f"{self.root} has been closed; open it again to write to it.")

    def close(self) -> None:
        """Release the lock on the directory; closing twice is allowed."""
        self._lock.release()

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else "unfinished"
        return f"<RunDirectory {self.root}: seed {self.info['seed']}, {state}>"


@checked
def find_adapter(path: Location) -> tuple[Path, Path | None]:
    """Return the PEFT folder that a path stands for, and the directory of its run (None: it lies in none).

    The path is a run, which stands for its elite; or an adapter: ``elite/``, an agent of a checkpoint, any PEFT folder.
    Raises CheckpointError if there is neither, or if the run has no elite yet.
    """
    root = _reached(path)
    if (root / "run.json").is_file():
        read_run(root)
        layout = RunLayout(root)
        if (layout.elite / ADAPTER_CONFIG).is_file():
            return layout.elite, root
        agents = sorted(layout.checkpoints.glob("[0-9]*/agent_*"))
        hint = f", or name an agent of a checkpoint, such as {agents[-1]}" if agents else ""
        raise CheckpointError(f"expected a run with an elite, found none in {root}; resume the run{hint}")
    folder = root / "actor" if (root / "actor" / ADAPTER_CONFIG).is_file() else root
    if not (folder / ADAPTER_CONFIG).is_file():
        what = "nothing" if not root.exists() else "a file" if root.is_file() else "a folder with neither"
        raise CheckpointError(
            f"expected a run or an adapter (with run.json or {ADAPTER_CONFIG}) at {root}, found {what}"
        )
    check_links(folder, error=CheckpointError)
    above = list(folder.absolute().parents)[:_ABOVE]
    return folder, next((parent for parent in above if (parent / "run.json").is_file()), None)


def _reached(path: Location) -> Path:
    """Return a path that may lead nowhere; raises CheckpointError for one that the system does not take."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise CheckpointError(f"expected a run at {shown(str(path))}: {error.strerror or error}") from error
    return Path(path)


@checked
def read_run(path: Location) -> dict[str, Any]:
    """Return the checked content of ``run.json`` of any run, even one in use or finished; takes no lock.

    Settings have today's keys, and those that have gone are left out unless the run was given them.

    Raises CheckpointError if ``path`` is missing, not a run directory, or written by a newer version, if its
    configuration does not match the hash beside it, or if a link in it leads out of it.
    """
    root = _reached(path)
    if not root.is_dir():
        raise CheckpointError(f"expected a run directory at {root}, found {'a file' if root.exists() else 'nothing'}.")
    file = root / "run.json"
    if not file.exists():
        raise CheckpointError(
            f"{root} is not a run directory: it has no run.json. Give the folder that a run was written to."
        )
    # Every reader of a run begins here. Checkpoints are read by their manifest, which allows no links.
    check_links(root, ("completions", "elite"), error=CheckpointError)
    info = strict_json.read_json(file)
    version = info.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{file} has schema version {version}, but this agilerl reads up to {SCHEMA_VERSION}; install a newer one."
        )
    for kind, key in ((kind, key) for kind, keys in _KINDS.items() for key in keys):
        if (key in info or key not in _OPTIONAL) and not isinstance(info.get(key), kind):
            raise CheckpointError(f"{file}: expected {key} as {kind.__name__}, found {shown(info.get(key))}.")
    for key in ("config", "given"):
        if key not in info:
            continue
        if _sha256(info[key]) != info.get(f"{key}_sha256"):
            raise CheckpointError(f"{file}: {key} does not match its sha256; the file was changed or damaged.")
        info[key] = remaining(hooks.rename(info[key])[0], given=key == "given" or "given" not in info)
    try:
        run_date(info)
    except ValueError as error:
        raise CheckpointError(f"{file}: expected dates as 2026-01-31T12:00:00: {error}.") from error
    return info


@contextmanager
def as_written(root: Path) -> Iterator[None]:
    """Raise CheckpointError for values in the files of a run that have other types than a run writes."""
    try:
        yield
    except AgileRLError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{root} does not hold what a run writes ({type(error).__name__}: {error}); its summary.json, run.json or "
            "lineage.jsonl is damaged"
        ) from error


def run_date(info: Mapping[str, Any]) -> datetime:
    """Return the date, local time, that the chat templates of a run see; raises ValueError for an invalid one."""
    if "date" not in info:
        # Such a run saw the moment of its start, which is written in UTC.
        return datetime.fromisoformat(info["started"]).astimezone().replace(tzinfo=None)
    date = datetime.fromisoformat(str(info["date"]))
    if date.tzinfo is not None:
        raise ValueError(f"expected local time, found {shown(info['date'])}")
    return date


def check_not_in_use(root: Path) -> None:
    """Raise CheckpointError with the owner's process id if another process is using the directory."""
    # Taking the lock creates its file, so only where there is one.
    if (root / _LOCK).exists():
        DirectoryLock(root / _LOCK).release()


def _check_plain(root: Path) -> None:
    """Raise CheckpointError if a part of a run is a link: writing to it or truncating it would change another file."""
    for path, mode in ((path, path.lstat().st_mode) for path in list_files(root)):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(f"{path} is a link or device; a run directory may only hold plain files and folders.")


def check_vacant(root: Path, *, locked: bool = False, overwrite: bool = False) -> None:
    """Raise CheckpointError if a new run must not be started in a directory; writes nothing to it.

    A run that learned nothing may be replaced, unless a process uses it. ``locked`` means that this process holds the
    lock, so that no other process can be using the directory. With ``overwrite``, the directory may hold any run that
    no process uses, and nothing else.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise CheckpointError(f"expected a directory for the run at {root}, found a file; choose another path.")
    layout = RunLayout(root)
    if layout.run_json.exists() and (overwrite or not layout.has_learned):
        _check_deletable(root, locked=locked)
        return
    if layout.run_json.exists():
        if layout.is_finished:
            raise CheckpointError(
                f"{root} holds a finished run; choose another directory, or delete that one first (train --overwrite)."
            )
        if not locked:
            check_not_in_use(root)
        resume = f"agilerl resume {shlex.quote(str(root))}"
        remedy = f"resume it with: {resume} - or choose another directory (train --overwrite deletes it)"
        if not layout.checkpoints.is_dir() or not list_files(layout.checkpoints):
            remedy = "it has no checkpoint, so nothing is lost if you start it again with train --overwrite"
        raise CheckpointError(f"{root} holds an unfinished run; {remedy}.")
    if foreign := [path.name for path in list_files(root) if not _is_of_interrupted_start(path)]:
        raise CheckpointError(
            f"{root} is not empty (found {foreign[0]}) and not a run; choose a directory that is empty or new."
        )


def _check_deletable(root: Path, *, locked: bool) -> None:
    """Raise CheckpointError unless a directory is that of a run, not in use, and holds nothing else."""
    if root.is_symlink():
        raise CheckpointError(f"{root} is a link; to overwrite the run that it leads to, give that directory.")
    read_run(root)
    _check_plain(root)
    if foreign := [path.name for path in list_files(root) if path.name not in _PARTS and not is_leftover(path)]:
        raise CheckpointError(
            f"{root} holds {shown(foreign[0])}, which is not part of a run, so the run is not overwritten; move that "
            "elsewhere, or choose another directory."
        )
    if not locked:
        check_not_in_use(root)


def delete_run(root: Path) -> None:
    """Delete a run if there is one, ``run.json`` last, so that it can be repeated; keeps the lock."""
    if not (root / "run.json").exists():
        return
    _check_deletable(root, locked=True)
    parts = [path for path in list_files(root) if path.name not in (_LOCK, "run.json")]
    try:
        for path in [*parts, root / "run.json"]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"the run in {root} could not be deleted: {error.strerror or error}.") from error


def _is_of_interrupted_start(path: Path) -> bool:
    """Return True for the leftovers of a ``create`` that was killed before it wrote ``run.json``."""
    if path.name in ("completions", "checkpoints"):
        return path.is_dir() and not path.is_symlink() and not list_files(path)
    return path.name == _LOCK or re.fullmatch(r"\.run\.json\.\d+\.tmp", path.name) is not None


def _sha256(config: Any) -> str:
    return hashlib.sha256(strict_json.dumps(config).encode()).hexdigest()


# -- one process at a time ---------------------------------------------------------------------------------------------


class DirectoryLock:
    """An exclusive lock on a file until ``release`` or death; raises CheckpointError, naming the owner, if taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        with ExitStack() as opened:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | PLAIN_FILE, 0o666)
                opened.callback(os.close, descriptor)
                locked = filelock.lock_descriptor(descriptor, blocking=False)
            except OSError as error:
                raise CheckpointError(f"{path.parent} cannot be locked: {error.strerror or error}.") from error
            if not locked:
                raise CheckpointError(
                    f"{path.parent} is in use by {_owner(descriptor)}. Wait until it ends, stop it, or choose another "
                    "directory."
                )
            # Only now: until the lock is taken, the file names its owner.
            try:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
            except OSError as error:
                raise WriteError(f"{path.parent} cannot be locked: {error.strerror or error}.") from error
            opened.pop_all()  # it stays open as long as the lock is held
        self._descriptor = descriptor
        _held.add(self)

    @property
    def held(self) -> bool:
        """True until ``release``."""
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock; the file stays, because removing it would race with the next owner."""
        if self._descriptor is not None:
            with suppress(OSError):  # then the file keeps the name of a process that no longer holds the lock
                os.ftruncate(self._descriptor, 0)
            filelock.unlock_descriptor(self._descriptor)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _in_use(path: Path) -> bool:
    """Return whether the process that a lock file names is alive; one on another machine counts as alive."""
    import psutil

    # Taking the lock would tell for certain, but a run that starts at this moment would be refused.
    try:
        # A pipe in a directory from a stranger would be waited for.
        descriptor = os.open(path, os.O_RDONLY | PLAIN_FILE | getattr(os, "O_NONBLOCK", 0))
        try:
            owner = os.read(descriptor, 200).decode(errors="replace").split()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return False
    except OSError:  # on Windows a locked file cannot be read
        return os.name == "nt"
    if len(owner) != 2 or not owner[0].isdecimal():
        return False
    return owner[1] != socket.gethostname() or psutil.pid_exists(int(owner[0]))


def _owner(descriptor: int) -> str:
    """Return which process holds the lock; waits briefly for an owner that has not written its name yet."""
    deadline = time.monotonic() + 0.3
    while True:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            words = os.read(descriptor, 200).decode(errors="replace").split()
        except OSError:  # on Windows a locked file cannot be read
            words = []
        if words:
            return f"process {words[0]}" + (f" on {words[1]}" if len(words) > 1 else "")
        if time.monotonic() > deadline:
            return "another process"
        time.sleep(0.02)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker shares the open file and its lock: it would keep the directory locked after this process dies.
    for lock in list(_held):
        # Closed and not unlocked: flock belongs to the shared open file, so unlocking would free the parent's lock.
        lock._close()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_in_child)


# -- versions and hardware ---------------------------------------------------------------------------------------------


_PACKAGES = ("torch", "transformers", "peft", "reasoning-gym", "safetensors", "numpy", "datasets")


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect results, None for those not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions["agilerl"] = sys.modules["agilerl"].__version__  # not by its distribution: a checkout may have none
    for package in _PACKAGES:
        try:
            version: str | None = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = None
        versions[package.replace("-", "_")] = version
    return versions


def collect_hardware() -> dict[str, Any]:
    """Return the machine: ``cores`` are those of this process, ``cuda`` {name, memory_bytes, capability} each."""
    import torch  # slow to import, and only needed here

    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    devices = [torch.cuda.get_device_properties(index) for index in indices]
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "cuda": [
            {"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices
        ],
    }


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
