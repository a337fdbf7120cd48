"""Files and folders that exist complete or not at all, whenever the process dies."""

import ctypes
import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agilerl.errors import CheckpointError, WriteError
from agilerl.runs import strict_json
from agilerl.safety.bounds import check_file, memory_bytes

MANIFEST = "MANIFEST.json"
"""Name of the file in a committed folder that lists every other file with its size and sha256."""

PLAIN_FILE = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"))
"""Flags to open a file with, as far as the system has them: not for children, not through a link, bytes as they are."""

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file through a temporary one in its folder: a reader sees the old content or the new, never a mix.

    Raises WriteError if the file cannot be written; the old content is unchanged then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            # A process that died may have had the same number. "x" below opens no link that lies in the way.
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        # The new name is safe from a power failure only once its folder is synced.
        _fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file as ``write_bytes`` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented strict JSON (see ``strict_json``), as ``write_bytes`` does."""
    write_text(path, strict_json.dumps(value, indent=2) + "\n")


def commit_folder(
    target: Path, write: Callable[[Path], None], *, manifest: bool = True, overwrite: bool = False
) -> None:
    """Create the folder ``target`` from the files that ``write(folder)`` writes to a hidden temporary folder beside it.

    Every file is synced to disk, ``MANIFEST.json`` ({file: {size, sha256}}) is added, then one rename makes the
    folder visible. If ``write`` raises, nothing is left behind and its exception is passed on. With ``overwrite`` an
    existing folder is swapped with the new one, and then deleted. Raises CheckpointError if ``target`` exists without
    ``overwrite``, and WriteError if the disk is full or refuses.
    """
    # Not exists(): a link that leads nowhere takes the name as well.
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{target} already exists, and a committed folder is never overwritten.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with writing(target):
        try:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            write(temporary)
            # Synced before the rename: a power failure must not leave the final name on files that are still empty.
            entries = _fsync_tree(temporary)
            if manifest:
                write_json(temporary / MANIFEST, entries)
            if overwrite and target.exists():
                _replace(target, temporary)
            else:
                os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _fsync(target.parent)


def verify_folder(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed folder after comparing every file with it.

    Raises CheckpointError naming the first file that differs, and how: missing, unexpected, a link, a different size
    or different content.
    """
    manifest = _read_manifest(folder)
    with reading(folder):
        files = _list_files(folder) - {MANIFEST}
    for name in sorted(files | set(manifest)):
        if name not in manifest:
            raise CheckpointError(f"{folder / name} is not in the manifest of {folder}: it does not belong there.")
        if name not in files:
            raise CheckpointError(f"{folder / name} is missing, but the manifest of {folder} lists it.")
        path = folder / name
        with reading(path):
            check_file(path, memory_bytes(), error=CheckpointError)  # a larger one could not be loaded
            entry = _entry(path)
        if entry != manifest[name]:
            raise CheckpointError(f"{path} should have {manifest[name]}, found {entry}; the file is damaged.")
    return manifest


def add_file(folder: Path, name: str, text: str) -> None:
    """Write a UTF-8 text file into a committed folder, and enter it in the manifest of the folder."""
    write_text(folder / name, text)
    # Until the second write the folder counts as damaged, so this suits only what a resumed run writes again.
    write_json(folder / MANIFEST, {**_read_manifest(folder), name: _entry(folder / name)})


def remove_folder(folder: Path) -> None:
    """Delete a folder; if the process dies half-way, no half-deleted folder is left under its name."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def list_files(folder: Path) -> list[Path]:
    """Return what is in a folder, in order; raises CheckpointError if it cannot be read."""
    with reading(folder):
        return sorted(folder.iterdir())


def is_leftover(path: Path) -> bool:
    """Return whether a path has the name of a temporary file or folder of this module."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders in ``folder`` that belong to processes that died while writing or deleting.

    No other process may be writing there. Leftovers that cannot be deleted stay, because they do no harm.
    """
    for path in folder.glob(".*.tmp"):
        if not is_leftover(path):
            continue
        with suppress(OSError):
            # rmtree refuses a link to a folder, and must not follow one.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _replace(target: Path, new: Path) -> None:
    """Replace ``target`` by the folder ``new`` and delete the old one: a reader sees one or the other.

    Without the system call that exchanges two names there is a moment without either; the old folder then lies beside
    it under the hidden name ``.NAME.PID.old``.
    """
    if _exchange(new, target):
        shutil.rmtree(new)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _exchange(first: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux's renameat2); returns False if the system or the disk cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    # Windows has no library without a name (TypeError); other systems have no such function (AttributeError).
    except (OSError, TypeError, AttributeError):
        return False
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(current, os.fsencode(first), current, os.fsencode(other), exchange) == 0)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    for linked in (folder, path):
        if linked.is_symlink():
            raise CheckpointError(f"{linked} is a symbolic link; a committed folder may only hold plain files.")
    manifest = strict_json.read_json(path)
    # The manifest has no checksum of its own: it is written as canonical JSON, so any other form of it is damage.
    with reading(path):
        text = path.read_bytes()
    if text != (strict_json.dumps(manifest, indent=2) + "\n").encode():
        raise CheckpointError(f"{path} is not what was written; the file is damaged.")
    return manifest


def _list_files(folder: Path) -> set[str]:
    """Return the relative names of all plain files below a folder; refuses links and devices."""
    names = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.add(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode):
            raise CheckpointError(f"{path} is a link or device; a committed folder may only hold plain files.")
    return names


def _fsync_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """Sync ``folder`` and every file and folder below it, and return its manifest."""
    entries: dict[str, dict[str, Any]] = {}
    for name in sorted(_list_files(folder)):
        _fsync(folder / name)
        entries[name] = _entry(folder / name)
    # A folder holds the names of its files, and is synced on its own.
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _fsync(path)
    return entries


def _entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _fsync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open a folder, and keeps names itself
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, state: str = "Its previous content is unchanged") -> Iterator[None]:
    """Raise WriteError if the system refuses; ``state`` says what holds for the file then."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} could not be written: {error.strerror or error}. {state}; "
            f"check the space and permissions of {path.parent}."
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the system refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
