"""A grader in a separate process: if it hangs, crashes or runs out of memory, that costs one score, not the run."""

import contextlib
import inspect
import json
import os
import queue
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.arguments import Count, Positive, checked, shown
from agilerl.errors import ConfigError, RewardError, RewardTimeoutError
from agilerl.rewards.grader import Grader
from agilerl.rewards.sandbox import CHILD, check_system
from agilerl.rewards.waiting import Answer, WaitingGrader

WORKER = Path(__file__).with_name("worker.py")
ENDING = 5.0
"""Seconds allowed for killing all processes of a worker; it takes milliseconds, unless they resist."""
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

        Raises:
            ConfigError: another process cannot import the function by name, or a limit is not positive.
        """
        self.grader = grader if isinstance(grader, str) else _reference(grader)
        self.timeout, self.memory_bytes, self.workers = timeout, int(memory_bytes), workers
        self.confined, self.cpu_seconds = confined, cpu_seconds
        self.name = name or self.grader.rpartition(":")[2].rpartition(".")[2]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.grader!r}, timeout={self.timeout:g})"

    def question(self, completion: str, prompt: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is sent to a process."""
        return {"completion": completion, "prompt": prompt, "row": row}

    def open(self) -> None:
        """Start the workers; raises RewardError if they cannot import the grader."""
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(self.workers):
            worker = _Worker(
                self.grader, self.timeout, self.memory_bytes, confined=self.confined, cpu_seconds=self.cpu_seconds
            )
            worker.start()
            self._idle.put(worker)

    def release(self) -> None:
        """End the workers."""
        for _ in range(self.workers):
            self._idle.get().stop()

    def answer(self, question: Mapping[str, Any]) -> Answer:
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

    def __init__(
        self, grader: str, timeout: float, memory_bytes: int, *, confined: bool, cpu_seconds: float | None
    ) -> None:
        self.settings = {
            "grader": grader,
            "timeout": timeout,
            "memory_bytes": memory_bytes,
            "confined": confined,
            "cpu_seconds": cpu_seconds,
        }
        self.timeout, self.confined = timeout, confined
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it has imported the grader."""
        check_system()
        path = [path or os.getcwd() for path in sys.path]
        limits: dict[str, Any] | None = None
        options: dict[str, Any] = {}
        folder = None
        if self.confined:
            folder = tempfile.mkdtemp(prefix="grader-")
            readable = [place for place in path if os.access(place, os.R_OK)]
            limits = {"memory_bytes": self.settings["memory_bytes"], "disk_bytes": WRITTEN, "readable": readable}
            limits["folder"] = folder
            options["env"] = {name: os.environ[name] for name in INHERITED if name in os.environ}
            options["env"] |= dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), folder)
            # Libraries that start a thread per core would exceed the limit of 32 threads.
            options["env"] |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        settings = json.dumps({**self.settings, "path": path, "folder": folder})
        container = [sys.executable, "-I", "-S", str(CHILD), "contain"]
        worker = [sys.executable, *(["-I", "-B"] if self.confined else []), str(WORKER), settings]
        owner, held = os.pipe()
        with tempfile.TemporaryFile() as messages:  # not the terminal, to which a text could make the worker write
            try:
                self.process = subprocess.Popen(
                    [*container, str(owner), json.dumps(limits), *worker],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages if self.confined else None,
                    pass_fds=[owner],
                    start_new_session=True,
                    **options,
                )
            except BaseException:
                os.close(held)
                _remove(folder)
                raise
            finally:
                os.close(owner)
            self._end = weakref.finalize(self, _kill, self.process, held, os.getpid(), folder)
            try:
                self._line(self.process, STARTING)
            except (TimeoutError, EOFError) as error:
                self.stop()
                messages.seek(0)
                said = messages.read().decode(errors="replace").strip().rpartition("\n")[2]
                why = shown(said) if said else "see its output"
                raise RewardError(f"cannot load the grader {self.settings['grader']}: {error}; {why}") from None
        return self.process

    def ask(self, request: Mapping[str, Any]) -> float | None:
        """Return the score; raises RewardError with the reason if there is none."""
        number = secrets.token_hex(8)  # so that earlier output caused by a text cannot pass for a later reply
        try:
            line = json.dumps({**request, "id": number}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardError(f"expected a row that can be written as JSON for an isolated grader: {error}") from error
        process = self.process or self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = _reply(self._line(process, self.timeout), number)
        except (OSError, EOFError, ValueError, RecursionError) as error:  # a TimeoutError is an OSError
            self.stop()
            raise (RewardTimeoutError if isinstance(error, TimeoutError) else RewardError)(str(error)) from None
        if "error" in answer:
            raise RewardError(str(answer["error"]))
        score: float | None = answer["score"]
        return score

    def _line(self, process: subprocess.Popen[bytes], patience: float) -> bytes:
        assert process.stdout is not None
        deadline, text = time.monotonic() + patience, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no reply within {patience:g} s")
                chunk = os.read(process.stdout.fileno(), 2**16)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(ENDING)
                    raise EOFError(f"its process {_ended(process.returncode)}")
                text += chunk
                if len(text) > LONGEST_REPLY:
                    raise EOFError(f"expected a line from its process, found more than {LONGEST_REPLY:,} bytes")
        return text

    def stop(self) -> None:
        """Kill the process and all its descendants."""
        if self.process is not None:
            self.process = None
            self._end()


def _ended(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    reason = "; the kernel does that if memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{reason}"


def _reply(line: bytes, number: str) -> dict[str, Any]:
    """Read the reply to a request; raises ValueError if it is not one."""
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.get("id") != number or not {"score", "error"} & set(answer):
        raise ValueError("its process did not reply with a score")
    return answer


def _kill(process: subprocess.Popen[bytes], held: int, owner: int, folder: str | None) -> None:
    """End a worker and all its descendants, unless called in a process that was forked from its owner."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(held, b"x")  # closing the pipe is not enough if a fork of this process also has it open
    os.close(held)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    if process.returncode is None:
        process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert stream is not None
            stream.close()
    process.wait()
    _remove(folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _reference(grader: Grader) -> str:
    """Return ``module:name`` of a function that a new process can import."""
    module, name = getattr(grader, "__module__", None), getattr(grader, "__qualname__", "")
    if not inspect.isfunction(grader) or module in (None, "__main__") or not name.replace(".", "").isidentifier():
        raise ConfigError(
            f"expected a function that a new process can import by name, found {grader!r}; move it to a module, or "
            "give it as 'package.module:function'"
        )
    return f"{module}:{name}"
