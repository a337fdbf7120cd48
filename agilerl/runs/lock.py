"""One process at a time in a run directory."""

import fcntl
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from agilerl.errors import CheckpointError, WriteError


class DirectoryLock:
    """An exclusive lock on a file, taken at construction; the system releases it when the process dies.

    Raises CheckpointError at once, with the owner's process id, if another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path.parent} cannot be locked: {error.strerror or error}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"{path.parent} is in use by {owner}. Wait until it ends, stop it, or choose another directory."
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(f"{path.parent} cannot be locked: {error.strerror or error}.") from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise WriteError(f"{path.parent} cannot be locked: {error.strerror or error}.") from error
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
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _owner(descriptor: int, *, patience: float = 0.3) -> str:
    """Return which process holds the lock; waits briefly for an owner that has not written its name yet."""
    deadline = time.monotonic() + patience
    while True:
        words = os.pread(descriptor, 200, 0).decode(errors="replace").split()
        if words:
            return f"process {words[0]}" + (f" on {words[1]}" if len(words) > 1 else "")
        if time.monotonic() > deadline:
            return "another process"
        time.sleep(0.02)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker shares the open file and its lock: it would keep the directory locked after this process dies.
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
