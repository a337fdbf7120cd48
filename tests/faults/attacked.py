"""The command line under attack: in forked children of one process that has imported everything, with limits.

Reads one request a line, ``{"arguments", "folder", "environment", "seconds"}``, and answers ``{"code", "seconds",
"mebibytes", "output"}``: the exit code, or minus the signal, None where it had to be killed; processor time; and memory
beyond that of the process before.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from tests.faults import forked
from tests.faults.evidence import SHORT

SPACE = 4 * 2**30
"""Bytes of address space for an attack beyond what the process has."""


def limited(folder: str, environment: dict[str, str], seconds: int) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    typed = Path("typed")
    sys.stdin = open(typed if typed.exists() else os.devnull)  # noqa: SIM115  (what is asked stands in the real one)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + SPACE, now + SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(request: dict[str, object]) -> dict[str, object]:
    log = Path(str(request["folder"])) / "said"
    before = resident()
    child = forked.start(
        [str(a) for a in request["arguments"]],  # type: ignore[attr-defined]
        log=log,
        first=lambda: limited(str(request["folder"]), request["environment"], int(request["seconds"])),  # type: ignore[arg-type,call-overload]
    )
    end = time.monotonic() + 4 * int(request["seconds"])  # type: ignore[call-overload]
    killed = False
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > end and not killed:
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    return {
        "code": None if killed else os.waitstatus_to_exitcode(status),
        "seconds": used.ru_utime + used.ru_stime,
        "mebibytes": used.ru_maxrss / 1024 - before,
        "output": log.read_text(errors="replace"),
    }


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    forked.warm(SHORT)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
