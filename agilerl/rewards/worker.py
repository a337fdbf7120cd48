"""The process that ``IsolatedGrader`` runs a grader in: a line of JSON in, a line of JSON out.

``sandbox_child.py``, which kills everything it starts, runs it by path as ``python worker.py SETTINGS``: so it
can set up its owner's module path before it imports anything of the package.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path

NO_NEW_PRIVILEGES = 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock; the numbers are the same on all machines."""
EXECUTE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
FILE_RIGHTS = (1 << 13, 1 << 14, 1 << 15, 1 << 15, 1 << 16)
"""The first file right that versions 1, 2, 3 and 4, and 5 and later, of Landlock do not know."""
ALL_OF_NETWORK = ALL_OF_SCOPES = 0b11


def main() -> None:
    """Answer requests until the input ends."""
    settings = json.loads(sys.argv[1])
    # Before the grader is imported: nothing that it prints may mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = settings["path"]
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    memory = settings["memory_bytes"] if allowed == resource.RLIM_INFINITY else min(settings["memory_bytes"], allowed)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = settings["grader"].rpartition(":")
    if module.endswith(".py"):
        from agilerl.safety.custom_code import run_file

        grader = run_file(Path(module).absolute())
    else:
        grader = importlib.import_module(module)
    for part in name.split("."):
        grader = getattr(grader, part)
    from agilerl.rewards.grader import attempt_grader, setup

    setup(grader)  # it may import more, for which the process soon has no access to files
    if settings["confined"]:
        forbid_files(os.getcwd())
    print("ready", file=answers, flush=True)
    pid = os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of the alarm ends this process even if its parent is gone and a loop in C holds the GIL.
        signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + 1)
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"] or 0)
        (outcome,) = attempt_grader(grader, [request["completion"]], [request["row"]], [request["prompt"]])  # type: ignore[arg-type]
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if os.getpid() != pid:  # the grader has forked: only the original process answers
            os._exit(0)
        answer = {"error": str(outcome)} if isinstance(outcome, Exception) else {"score": outcome}
        print(json.dumps({**answer, "id": request["id"]}), file=answers, flush=True)


def forbid_files(folder: str) -> None:
    """With Landlock (Linux), allow access only to a folder, and reading imported packages."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    # The bits below the first unknown right are the known ones.
    rights = FILE_RIGHTS[min(version, len(FILE_RIGHTS)) - 1] - 1
    # A kernel refuses a ruleset with fields that it does not know: networks came with 4, scopes with 6.
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(CREATE_RULESET, struct.pack("=3Q", rights, ALL_OF_NETWORK, ALL_OF_SCOPES), size, 0)
    for path in sorted({folder, *_imported_from()}):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
        allowed = rights & ~EXECUTE if path == folder else allowed
        libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel has Landlock but refuses to confine this process")
    os.close(ruleset)


def _imported_from() -> set[str]:
    """Return the folders of Python, its libraries and the loaded packages, which may import more of their modules."""
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom"}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Of packages their top folders: the modules below come with them.
        if "." not in name and file:
            package = Path(file)
            paths.add(str(package.parent if package.name.startswith("__init__.") else package))
    return {os.path.realpath(path) for path in paths if path and path != "/"}


if __name__ == "__main__":
    main()
