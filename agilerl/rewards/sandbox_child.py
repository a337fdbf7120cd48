"""A supervisor process that kills everything its child has started; a separate script, so that it stays small.

``run_python`` starts it for untrusted code, and ``IsolatedGrader`` for a confined worker: it gives up root, enters new
namespaces if the kernel allows it, and starts the program under limits. For the worker of a trusted grader it only
ensures that nothing outlives it. It imports nothing of the package, so it has no threads, and forking is safe.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NEWUSER, NEWPID, NEWNET, NEWIPC, NEWNS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
PARENT_DEATH_SIGNAL, DUMPABLE, DROP_FROM_BOUNDING_SET, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
CAPABILITIES = 64  # more than kernels have today; dropping an unknown one fails harmlessly
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
NOBODY = 65534
TASKS = 32
"""The most processes and threads of a program, including its first one."""

LIBC = ctypes.CDLL(None, use_errno=True)


def contain(owner: int, limits: dict[str, Any] | None, command: list[str]) -> None:
    """Run a command until it ends, its time is up, or ``owner``, a socket, is closed; then kill all its descendants.

    ``limits`` confine it: it has no privileges, can only write to its folder and reaches no network, as far as the
    kernel allows that. The owner gets a report: its exit status (-N for signal N, None if it was killed here) and its
    isolation.
    """
    # This copy the command does not inherit, and its number is low enough for select.
    inherited, owner = owner, os.dup(owner)
    os.close(inherited)
    isolation, init, left = [], None, None
    if limits is not None:
        folder, left = Path(limits["folder"]), limits.get("timeout")
        files = {path: path.read_bytes() for path in folder.iterdir()}
        leave_root(((folder.parent, os.X_OK), *((Path(path), os.R_OK) for path in limits["readable"])), folder)
        isolation = enter_namespaces(folder, int(limits["disk_bytes"]))
        if "files" in isolation:  # another folder now lies over it
            for path, content in files.items():
                path.write_bytes(content)
        os.chdir(folder)
        init = start_init(owner) if "processes" in isolation else None
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):  # it must not end before its owner
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        LIBC.prctl(SUBREAPER, 1, 0, 0, 0)  # processes that leave the session or lose their parent become its children
    child = os.fork()
    if child == 0:
        os.setsid()  # a signal to its whole group does not reach this process
        if limits is not None:
            take_limits(limits, own_count="processes" in isolation)
        if sys.platform == "linux":
            LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.execv(command[0], command)
    os.closerange(0, 2)  # these streams belong to the child and the owner
    status, deadline = None, None if left is None else time.monotonic() + left
    while status is None:
        ready = select.select([owner, woken], [], [], left)[0]
        if owner in ready or not ready:
            break
        os.read(woken, 2**10)
        status = reap(child)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
    end_all(child, init)
    outcome = {"returncode": None if status is None else os.waitstatus_to_exitcode(status), "isolation": isolation}
    with contextlib.suppress(OSError):  # the owner may be gone
        os.write(owner, json.dumps(outcome).encode())
    os._exit(0)


def reap(child: int) -> int | None:
    """Reap all children that have ended by now; return the status of ``child`` if it was among them."""
    of_child = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            of_child = ended[1] if ended[0] == child else of_child
    return of_child


def leave_root(needed: Iterable[tuple[Path, int]], folder: Path) -> None:
    """If root, become the user `nobody`, unless it cannot read what is needed or does not exist (some containers).

    The interpreter is always needed. ``folder`` is given to that user.
    """
    if os.geteuid() != 0:
        return
    try:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    except OSError:
        return
    interpreter = ((Path(sys.executable), os.R_OK), (Path(os.__file__), os.R_OK))
    enough = all(os.access(path, mode, effective_ids=True) for path, mode in (*interpreter, *needed))
    os.seteuid(0)
    os.setegid(0)
    if enough:
        os.chown(folder, NOBODY, NOBODY)
        # Groups before the user: afterwards this process may no longer change them.
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        LIBC.prctl(DUMPABLE, 1, 0, 0, 0)  # without it /proc/self, where the user map is written, belongs to root


def enter_namespaces(folder: Path, disk_bytes: int) -> list[str]:
    """Enter new namespaces for processes, network and files; return those of the three that worked."""
    user, group = os.geteuid(), os.getegid()
    if sys.platform != "linux" or LIBC.unshare(NEWUSER | NEWPID | NEWNET | NEWIPC | NEWNS) != 0:
        return []
    try:
        # The kernel asks for this before an unprivileged process may map its group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    except OSError:
        return ["processes", "network"]
    return ["processes", "network", *(["files"] if read_only_files(folder, disk_bytes) else [])]


def read_only_files(folder: Path, disk_bytes: int) -> bool:
    """Make every file system read-only and mount an empty one in memory over ``folder``."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    options = f"size={disk_bytes},mode=700".encode()
    return bool(
        LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), 32) == 0
        and LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0
    )


def start_init(owner: int) -> int:
    """Start the first process of the new namespace: when it dies, the kernel kills all other processes in it."""
    init = os.fork()
    if init:
        return init
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.close(owner)
    os.closerange(0, 3)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps orphans by itself
    while True:
        signal.pause()


def take_limits(order: dict[str, Any], *, own_count: bool) -> None:
    """Apply the limits to this process, which is about to become the program, and give up privileges permanently."""
    limits = {
        resource.RLIMIT_AS: int(order["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(order["disk_bytes"]),
        resource.RLIMIT_NPROC: TASKS if own_count else TASKS + tasks_of_user(),
        resource.RLIMIT_CORE: 0,
    }
    if "cpu_seconds" in order:
        limits[resource.RLIMIT_CPU] = order["cpu_seconds"]
    for limit, value in limits.items():
        _, allowed = resource.getrlimit(limit)
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        for capability in range(CAPABILITIES):  # in case this process had to stay root: the program then has none
            LIBC.prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
        LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def tasks_of_user() -> int:
    """Count this user's threads on the whole machine, because the limit on processes includes them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.geteuid():
                count += len(list((folder / "task").iterdir()))
        except OSError:  # it has ended in the meantime
            continue
    return count


def end_all(child: int, init: int | None) -> None:
    """Kill the program's session and all its descendants."""
    if init is not None:
        os.kill(init, signal.SIGKILL)
        # It ends only after everything else in the namespace has ended and the program has been reaped.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        kill(child, os.killpg)
        # Each round may orphan grandchildren, which this process inherits and finds in the next round.
        while descendants := children():
            for pid in descendants:
                kill(pid, os.killpg)
                kill(pid, os.kill)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """Return the children of this process; as a subreaper it inherits every orphan below it."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int, how: Callable[[int, int], None]) -> None:
    """Kill a process, or the group that it leads, if it still exists and belongs to this user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)


if __name__ == "__main__":
    contain(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
