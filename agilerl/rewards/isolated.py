"""A grader in a separate process: if it hangs, crashes or runs out of memory, that costs one score, not the run."""

import inspect
import json
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import Count, Positive, checked, shown
from agilerl.errors import ConfigError, RewardError, RewardTimeoutError
from agilerl.rewards.grader import Columns, Grader, Mark
from agilerl.rewards.sandbox import Contained
from agilerl.rewards.waiting import WaitingGrader

WORKER = Path(__file__).with_name("worker.py")
STARTING = 60.0
"""Seconds that a worker has to import the grader."""
LONGEST_REPLY = 2**16
"""The most bytes of a worker's reply, which is a number or a sentence."""
WRITTEN = 16 * 2**20
"""Bytes that a confined worker may write to its folder: some libraries need a folder for caches."""
INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""The only environment variables that a confined worker gets: others may hold keys."""


class IsolatedGrader(WaitingGrader):
    """Run a function in worker processes, one completion at a time, each with a limit on time and memory.

    A completion whose grading times out, kills its process or raises has no score (None) and counts as a failure of the
    grader; its worker is killed and replaced. On Linux every process that the grader started is killed with it, even if
    it left the session, lost its parent or ignores signals; elsewhere only those that stayed in the session. This is
    for trusted graders and untrusted texts. It is not a sandbox: the grader can do whatever its user can. It can avoid
    being killed by killing its worker's parent process, by becoming another user (sudo), by having a process started
    from outside (cron, a container daemon), or by forking faster than it is killed for five seconds.

    One process gets the completions in the order of the rows; several get them as they end (``EarlyGrading``).

    With ``confined`` the process is also under the limits of ``run_python``, for graders that a text could trick into
    running it: no root, no capabilities, no environment variables, at most 32 processes and threads; on Linux with
    unprivileged namespaces no network, no view of other processes and no writing outside its folder; with Landlock
    (Linux 5.13) it can only read the files of Python and of the packages that the grader has imported.
    """

    remembers = True
    reads = "completion"  # the function in the process reads more

    @checked
    def __init__(
        self,
        grader: Any,
        *,
        timeout: Positive = 5.0,
        memory_bytes: Count = 4 * 2**30,
        workers: Count = 1,
        name: str | None = None,
        confined: bool = False,
        cpu_seconds: Positive | None = None,
    ) -> None:
        """Set the function and its limits.

        Args:
            grader: a function of a module, ``"package.module:function"`` or ``"file.py:function"``; either signature.
                It gets the columns of the rows through JSON, so tuples become lists.
            timeout: seconds for one completion, more than 0.
            memory_bytes: address space of a worker, its libraries included.
            workers: processes, 1 or more.
            name: the grader's name in messages and metrics; the function's name by default.
            confined: whether its processes have no privileges, no network and no files, as far as the machine allows.
            cpu_seconds: processor time for one completion, more than 0. It depends less than ``timeout`` on how busy
                the machine is; set ``timeout`` to a multiple of it. None for no limit.

        Raises ConfigError if another process cannot import the function by name.
        """
        self.grader = grader if isinstance(grader, str) else _reference(grader)
        self.timeout, self.memory_bytes, self.workers = timeout, int(memory_bytes), workers
        self.confined, self.cpu_seconds = confined, cpu_seconds
        self.name = name or self.grader.rpartition(":")[2].rpartition(".")[2]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.grader!r}, timeout={self.timeout:g})"

    def question(self, completion: str, prompt: str, row: Columns) -> dict[str, Any]:
        """Return what is sent to a process."""
        return {"completion": completion, "prompt": prompt, "row": row}

    def open(self) -> None:
        """Start the workers; raises RewardError if they cannot import the grader."""
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        names = ("grader", "timeout", "memory_bytes", "confined", "cpu_seconds")
        for _ in range(self.workers):
            worker = _Worker({name: getattr(self, name) for name in names})
            worker.start()
            self._idle.put(worker)

    def release(self) -> None:
        """End the workers."""
        # Each is waited for: one that grades at this moment is ended when it comes back.
        for _ in range(self.workers):
            self._idle.get().stop()

    def answer(self, question: Mapping[str, Any]) -> Mark:
        """Return the score that a process answers with, or why there is none."""
        worker = self._idle.get()
        try:
            return worker.ask(question)
        except RewardError as error:
            return error
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, started again if it was killed for not answering."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.contained: Contained | None = None

    def start(self) -> Contained:
        """Start the process and wait until it has imported the grader."""
        # An empty entry means the working directory, which is another one in a confined process.
        paths, confined = [path or os.getcwd() for path in sys.path], self.settings["confined"]
        limits = environment = None
        if confined:
            # What even this user cannot read must not keep the supervisor from becoming `nobody` (leave_root).
            readable = [path for path in paths if os.access(path, os.R_OK)]
            limits = {"memory_bytes": self.settings["memory_bytes"], "disk_bytes": WRITTEN, "readable": readable}
            environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        settings = json.dumps({**self.settings, "path": paths})
        # -I: no folder of the script or the user precedes the paths above; -B: no bytecode, which it may not write.
        command = [sys.executable, *(["-I", "-B"] if confined else []), str(WORKER), settings]
        with tempfile.TemporaryFile() as messages:  # not the terminal, to which a text could make the worker write
            stderr = messages if confined else None
            self.contained = Contained(command, limits, environment=environment, stdin=subprocess.PIPE, stderr=stderr)
            try:
                self._line(self.contained, STARTING)
            except (TimeoutError, EOFError) as error:
                self.stop()
                messages.seek(0)
                last = messages.read().decode(errors="replace").strip().rpartition("\n")[2]
                why = shown(last) if last else "see its output"
                raise RewardError(f"cannot load the grader {self.settings['grader']}: {error}; {why}") from None
        return self.contained

    def ask(self, request: Mapping[str, Any]) -> float | None:
        """Return the score; raises RewardError with the reason if there is none."""
        number = secrets.token_hex(8)  # so that earlier output caused by a text cannot pass for a later reply
        try:
            line = json.dumps({**request, "id": number}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardError(f"expected a row that can be written as JSON for an isolated grader: {error}") from error
        contained = self.contained or self.start()  # None after it was killed for an earlier question
        stdin = contained.process.stdin
        assert stdin is not None
        try:
            stdin.write(line)
            stdin.flush()
            answer = json.loads(self._line(contained, self.settings["timeout"]))
            if not isinstance(answer, dict) or answer.get("id") != number or not {"score", "error"} & set(answer):
                raise ValueError("its process did not reply with a score")
        except (OSError, EOFError, ValueError, RecursionError) as error:  # a TimeoutError is an OSError
            self.stop()
            raise (RewardTimeoutError if isinstance(error, TimeoutError) else RewardError)(str(error)) from None
        if "error" in answer:
            raise RewardError(str(answer["error"]))
        score: float | None = answer["score"]
        return score

    def _line(self, contained: Contained, patience: float) -> bytes:
        stdout = contained.process.stdout
        assert stdout is not None
        deadline, text = time.monotonic() + patience, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no reply within {patience:g} s")
                # Not stdout.read(), whose buffer could hold a line that the selector does not know of.
                chunk = os.read(stdout.fileno(), 2**16)
                if not chunk:
                    raise EOFError(f"its process {_describe_end(contained.status())}")
                text += chunk
                if len(text) > LONGEST_REPLY:
                    raise EOFError(f"expected a line from its process, found more than {LONGEST_REPLY:,} bytes")
        return text

    def stop(self) -> None:
        """Kill the process and all its descendants."""
        if self.contained is not None:
            self.contained.end()
            self.contained = None


def _describe_end(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    reason = "; the kernel does that if memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{reason}"


def _reference(grader: Grader) -> str:
    """Return ``module:name`` of a function that a new process can import."""
    module, name = getattr(grader, "__module__", None), getattr(grader, "__qualname__", "")
    if not inspect.isfunction(grader) or module in (None, "__main__") or not name.replace(".", "").isidentifier():
        raise ConfigError(
            f"expected a function that a new process can import by name, found {grader!r}; move it to a module, or "
            "give it as 'package.module:function'"
        )
    return f"{module}:{name}"
