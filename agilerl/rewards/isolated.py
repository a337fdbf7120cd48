"""A grader in a process of its own: one that hangs, crashes or eats memory costs one score, not the run."""

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agilerl.arguments import Count, Positive, checked
from agilerl.errors import ConfigError, RewardError, RewardTimeoutError
from agilerl.rewards.base import BaseGrader
from agilerl.rewards.grader import Grader
from agilerl.rewards.sandbox import CHILD
from agilerl.validation import shown

__all__ = ["IsolatedGrader"]

WORKER = Path(__file__).with_name("worker.py")
ENDING = 5.0
"""Seconds that the killing of all that a worker has started may take; a few milliseconds, unless it fights back."""
STARTING = 60.0
"""Seconds that a worker has to import the grader."""
LONGEST_REPLY = 2**16
"""Bytes of a worker's reply, which is a number or a sentence."""
WRITTEN = 16 * 2**20
"""Bytes that a confined worker may write into its folder: some libraries need one to keep things in."""
INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""All that a confined worker knows of the environment, which may hold keys."""


class IsolatedGrader(BaseGrader):
    """Run a function in worker processes, one completion at a time, each with a limit on time and memory.

    A completion whose grading runs out of time, kills its process or raises has no score (None) and is counted as a
    failure of the grader; its worker is killed and replaced. On Linux all that the grader started is killed with it,
    also what left its session, lost its parent or ignores signals; elsewhere only what stayed in its session. This is
    for graders that one trusts and texts that one does not; it is no sandbox: the grader can do what its user can. What
    it can escape by is to kill its worker's parent process, to become another user (sudo), to have a process started by
    one that is not its own (cron, a container daemon), and to fork faster than it is killed for five seconds.

    With ``confined`` the process is under the limits of ``run_python`` as well, for graders that a text could make run
    it: no root, no capabilities, none of the environment's variables, 32 processes and threads; on Linux with
    unprivileged namespaces no network, no sight of other processes and no writing outside a folder of its own; with
    Landlock (Linux 5.13) no file to read but those of Python and the packages that the grader has imported.
    """

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
        """Name the function.

        Args:
            grader: a function of a module, ``"package.module:function"`` or ``"file.py:function"``; either signature.
                Columns of the rows reach it as JSON, hence tuples as lists.
            timeout: seconds for one completion, more than 0.
            memory_bytes: address space of a worker, its libraries included.
            workers: processes, 1 or more.
            name: what messages and metrics call it; the function's name by default.
            confined: whether its processes have no privileges, no network and no files, as far as the machine allows.
            cpu_seconds: of processor time for one completion, more than 0; whether it is enough depends less on what
                else the machine does than ``timeout`` does, which should then be a multiple of it. None: no limit.

        Raises:
            ConfigError: the function is not one that another process can import by name, or a limit is not positive.
        """
        self.grader = grader if isinstance(grader, str) else _reference(grader)
        self.timeout, self.memory_bytes, self.workers = timeout, int(memory_bytes), workers
        self.confined, self.cpu_seconds = confined, cpu_seconds
        self.name = name or self.grader.rpartition(":")[2].rpartition(".")[2]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.grader!r}, timeout={self.timeout:g})"

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | Exception | None]:
        """Return a score for each completion, or why it has none."""
        self.setup()
        requests = [
            {"completion": text, "prompt": prompt, "row": {key: column[place] for key, column in columns.items()}}
            for place, (text, prompt) in enumerate(zip(completions, prompts))
        ]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._ask, requests))

    def open(self) -> None:
        """Start the workers; raises RewardError when they cannot import the grader."""
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

    def _ask(self, request: Mapping[str, Any]) -> float | Exception | None:
        worker = self._idle.get()
        try:
            return worker.ask(request)
        except RewardError as error:
            return error
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, started anew after it was killed for not answering."""

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
            # A library that would start a thread for each core has 32 of them at most.
            options["env"] |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        settings = json.dumps({**self.settings, "path": path, "folder": folder})
        container = [sys.executable, "-I", "-S", str(CHILD), "contain"]
        worker = [sys.executable, *(["-I", "-B"] if self.confined else []), str(WORKER), settings]
        owner, held = os.pipe()
        with tempfile.TemporaryFile() as messages:  # of a confined worker: a text could have it write to the terminal
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
        """Return the score; raises RewardError with the reason where there is none."""
        number = secrets.token_hex(8)  # what a text could have it print earlier does not pass for a later reply
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
                    raise TimeoutError(f"nothing within {patience:g} s")
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
        """Kill the process and all that descends from it."""
        if self.process is not None:
            self.process = None
            self._end()


def _ended(status: int | None) -> str:
    """Return in words how a process has ended."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    reason = "; the kernel does that where memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{reason}"


def _reply(line: bytes, number: str) -> dict[str, Any]:
    """Read the reply to a request; raises ValueError where it is none."""
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.get("id") != number or not {"score", "error"} & set(answer):
        raise ValueError("its process did not reply with a score")
    return answer


def _kill(process: subprocess.Popen[bytes], held: int, owner: int, folder: str | None) -> None:
    """End a worker and all that descends from it; a process that was forked from its owner leaves it alone."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(held, b"x")  # closing it is not enough where a fork of this process has it open as well
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
            f"expected a function that a new process can import by name, found {grader!r}; move it to a module of its "
            "own, or give it as 'package.module:function'"
        )
    return f"{module}:{name}"
