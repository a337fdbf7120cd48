"""Runs in several real processes on this machine: started side by side, each told what the launcher would say."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from tests.distributed.test_processes import free_port
from tests.programs import Program
from tests.training.small_runs import ROOT, environment

CHILD = """
import json, sys
from contextlib import ExitStack
from pathlib import Path

from agilerl.cli.launch import Request, Terminal, events
from agilerl.processes import joined
from agilerl.errors import AgileRLError
from agilerl.config.manifest import load_manifest
from agilerl.training.events import IterationDone
from agilerl.runs.stopping import StopRequest

with joined() as processes:
    for job in json.loads(sys.argv[1]):
        config = load_manifest(None, job["overrides"])
        request = Request(config, Path(job["out"]), job["goes_on"], allow_code=job["allow_code"])
        with ExitStack() as opened, processes.telling():
            what = request.agreed(processes, opened, Terminal.of("nothing"))
            run = events(request.prepared(what, processes), what, StopRequest())
            for event in run:
                if isinstance(event, IterationDone) and event.iteration == job["leave_after"]:
                    run.close()
                    break
"""


@dataclass(frozen=True)
class Job:
    """A run, or a part of one."""

    out: Path
    overrides: Sequence[str] = ()
    goes_on: bool = False
    leave_after: int | None = None
    """Iteration after which everybody leaves, as if the processes had died."""
    allow_code: bool = False


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    errors: str


def place(rank: int, size: int, port: int) -> dict[str, str]:
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**environment(), **{name: str(value) for name, value in found.items()}}


@contextmanager
def started(size: int, *command: str, cwd: Path = ROOT, own: Sequence[Sequence[str]] = ()) -> Iterator[list[Program]]:
    """Start one program in ``size`` processes that know of each other; what is left of them in the end is killed.

    ``own[rank]`` are further arguments of one of them.
    """
    port = free_port()
    with ExitStack() as opened:
        yield [
            opened.enter_context(Program(*command, *(own[rank] if own else ()), cwd=cwd, env=place(rank, size, port)))
            for rank in range(size)
        ]


def ends(children: Sequence[Program], *, seconds: float = 400) -> list[Ended]:
    """Wait for all; the one that waits for another is not waited for longer than ``seconds``."""
    said = [child.communicate(timeout=seconds) for child in children]
    return [Ended(child.returncode, *words) for child, words in zip(children, said)]


def wait_for(line: str, process: "Program | subprocess.Popen[str]") -> None:
    """Return when a process prints a line that begins so."""
    assert process.stdout is not None
    assert any(found.startswith(line) for found in iter(process.stdout.readline, "")), process.communicate()


def check_a_loss_is_noticed(children: Sequence[Program]) -> None:
    """Kill the second of two processes after iteration 3: the first ends within a minute, with one sentence."""
    wait_for("iteration 3 ", children[0])
    kill(children[1].pid)
    start = monotonic()
    writer, other = ends(children)
    assert monotonic() - start < 60
    assert (writer.code, other.code) == (2, -signal.SIGKILL)
    assert writer.errors.count("\n") == 1
    assert "error: another process of this run is lost" in writer.errors


def run_jobs(size: int, *jobs: Job) -> None:
    """Do the jobs one after the other, all processes together."""
    plain = [{**asdict(job), "out": str(job.out)} for job in jobs]
    with started(size, "-c", CHILD, json.dumps(plain)) as children:
        for ended in ends(children):
            assert ended.code == 0, ended.errors


def descendants(process: int) -> dict[int, str]:
    """Return the living processes below one, with their command lines."""
    parents, names = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended meanwhile
                continue
    found: dict[int, str] = {}
    waiting = [process]
    while waiting:
        above = waiting.pop()
        children = [child for child, parent in parents.items() if parent == above]
        found |= {child: names[child] for child in children}
        waiting += children
    return found


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
