"""A supervisor process that kills everything its child has started; a separate script, so that it stays small.

``run_python`` starts it for untrusted code: it gives up root, enters new namespaces if the kernel allows it, and starts
the program under limits. ``IsolatedGrader`` starts it for its workers: for a trusted grader it only ensures that
nothing outlives the worker; a confined worker is put under the same limits as a program. It imports nothing of the
package, so it has no threads, and forking is safe.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
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


def main() -> None:
    """Follow the arguments: ``contain FD LIMITS COMMAND ...``, or else the order of ``run_python`` and its ``FD``.

    The limits of a trusted command are null.
    """
    if sys.argv[1] == "contain":
        contain(int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
    else:
        run(json.loads(sys.argv[1]), int(sys.argv[2]))


def run(order: dict[str, Any], report: int) -> None:
    """Run the program that an order describes and report how it ended."""
    os.set_inheritable(report, False)
    program = Path(order["program"])
    source = program.read_bytes()
    leave_root(((program.parent.parent, os.X_OK),), program.parent)
    isolation = enter_namespaces(program.parent, int(order["disk_bytes"]))
    if sys.platform == "linux":  # only now: entering a user namespace resets this
        LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if "files" in isolation:
        program.write_bytes(source)
    os.chdir(program.parent)
    init = start_init(report) if "processes" in isolation else None
    if init is None and sys.platform == "linux":
        LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        start_program(order, report, own_count="processes" in isolation)
    status = wait(child, order["timeout"])
    end_all(child, init)
    outcome = {"returncode": status, "timed_out": status is None, "isolation": isolation}
    os.write(report, json.dumps(outcome).encode())


def contain(owner: int, limits: dict[str, Any] | None, command: list[str]) -> None:
    """Run a command until it ends or ``owner``, a pipe, is closed; then kill all its descendants, and end as it did.

    ``limits`` confine it: it has no privileges, can only write to its folder and reaches no network, as far as the
    kernel allows that.
    """
    os.set_inheritable(owner, False)
    isolation, init = [], None
    if limits is not None:
        folder = Path(limits["folder"])
        leave_root(((folder.parent, os.X_OK), *((Path(path), os.R_OK) for path in limits["readable"])), folder)
        isolation = enter_namespaces(folder, int(limits["disk_bytes"]))
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
    os.closerange(0, 2)  # these pipes belong to the child and the owner
    status = None
    while status is None and owner not in select.select([owner, woken], [], [])[0]:
        os.read(woken, 2**10)
        status = reap(child)
    end_all(child, init)
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:  # whose handler cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if status is not None else 0)


def reap(child: int) -> int | None:
    """Reap all children that have ended by now; return the status of ``child`` if it was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == child else found
    return found


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
        and (folder is None or LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0)
    )


def start_init(report: int) -> int:
    """Start the first process of the new namespace: when it dies, the kernel kills all other processes in it."""
    init = os.fork()
    if init:
        return init
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.close(report)
    os.closerange(0, 3)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps orphans by itself
    while True:
        signal.pause()


def start_program(order: dict[str, Any], report: int, *, own_count: bool) -> None:
    """In the child: apply the limits and become the program."""
    os.close(report)
    os.setsid()
    take_limits(order, own_count=own_count)
    os.execv(sys.executable, [sys.executable, "-I", order["program"]])


def take_limits(order: dict[str, Any], *, own_count: bool) -> None:
    """Apply the limits to this process, which is about to become the program, and give up privileges for good."""
    tasks = TASKS if own_count else TASKS + tasks_of_user()
    limits = {
        resource.RLIMIT_AS: int(order["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(order["disk_bytes"]),
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_CORE: 0,
    }
    if "cpu_seconds" in order:
        limits[resource.RLIMIT_CPU] = order["cpu_seconds"]
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
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


def wait(child: int, timeout: float) -> int | None:
    """Return the exit status (negative: the signal), or None if the program is still running after ``timeout``."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        _, status = os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeoutError:
        return None
    return os.waitstatus_to_exitcode(status)


def end_all(child: int, init: int | None) -> None:
    """Kill the program's session and all its descendants."""
    if init is not None:
        os.kill(init, signal.SIGKILL)
        # It ends only after everything else in the namespace has ended and the program has been reaped.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        kill_group(child)
        # Each round may orphan grandchildren, which this process inherits and finds in the next round.
        while descendants := children():
            for pid in descendants:
                kill_group(pid)
                kill(pid)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """Return the children of this process; as a subreaper it inherits every orphan below it."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, if it leads one."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Kill one process, if it still exists and belongs to this user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    main()
