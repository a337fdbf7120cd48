"""A grader in a process of its own: one that hangs, crashes or eats memory costs one score, not the run."""

import contextlib
import inspect
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agilerl.errors import ConfigError, RewardError, RewardTimeoutError
from agilerl.rewards.base import BaseGrader
from agilerl.rewards.grader import Grader
from agilerl.rewards.sandbox import CHILD

__all__ = ["IsolatedGrader"]

WORKER = Path(__file__).with_name("worker.py")
ENDING = 5.0
"""Seconds that the killing of all that a worker has started may take; a few milliseconds, unless it fights back."""
STARTING = 60.0
"""Seconds that a worker has to import the grader."""


class IsolatedGrader(BaseGrader):
    """Run a function in worker processes, one completion at a time, each with a limit on time and memory.

    A completion whose grading runs out of time, kills its process or raises has no score (None) and is counted as a
    failure of the grader; its worker is killed and replaced. On Linux all that the grader started is killed with it,
    also what left its session, lost its parent or ignores signals; elsewhere only what stayed in its session. This is
    for graders that one trusts and texts that one does not; it is no sandbox: the grader can do what its user can. What
    it can escape by is to kill its worker's parent process, to become another user (sudo), to have a process started by
    one that is not its own (cron, a container daemon), and to fork faster than it is killed for five seconds.
    """

    def __init__(
        self,
        grader: Grader | str,
        *,
        timeout: float = 5.0,
        memory_bytes: int = 4 * 2**30,
        workers: int = 1,
        name: str | None = None,
    ) -> None:
        """Name the function.

        Args:
            grader: a function of a module, ``"package.module:function"`` or ``"file.py:function"``; either signature.
                Columns of the rows reach it as JSON, hence tuples as lists.
            timeout: seconds for one completion, more than 0.
            memory_bytes: address space of a worker, its libraries included.
            workers: processes, 1 or more.
            name: what messages and metrics call it; the function's name by default.

        Raises:
            ConfigError: the function is not one that another process can import by name, or a limit is not positive.
        """
        if not timeout > 0 or workers < 1:
            raise ConfigError(f"expected a timeout above 0 and 1 or more workers, found {timeout} and {workers}")
        self.grader = grader if isinstance(grader, str) else _reference(grader)
        self.timeout, self.memory_bytes, self.workers = timeout, int(memory_bytes), workers
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
            worker = _Worker(self.grader, self.timeout, self.memory_bytes)
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

    def __init__(self, grader: str, timeout: float, memory_bytes: int) -> None:
        self.settings = {"grader": grader, "timeout": timeout, "memory_bytes": memory_bytes}
        self.timeout = timeout
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it has imported the grader."""
        settings = json.dumps({**self.settings, "path": [path or os.getcwd() for path in sys.path]})
        container = [sys.executable, "-I", "-S", str(CHILD), "contain"]
        owner, held = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*container, str(owner), sys.executable, str(WORKER), settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[owner],
                start_new_session=True,
            )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(owner)
        self._end = weakref.finalize(self, _kill, self.process, held, os.getpid())
        try:
            self._line(self.process, STARTING)
        except (TimeoutError, EOFError) as error:
            self.stop()
            raise RewardError(f"cannot load the grader {self.settings['grader']}: {error}; see its output") from None
        return self.process

    def ask(self, request: Mapping[str, Any]) -> float | None:
        """Return the score; raises RewardError with the reason where there is none."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardError(f"expected a row that can be written as JSON for an isolated grader: {error}") from error
        process = self.process or self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = json.loads(self._line(process, self.timeout))
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            self.stop()
            raise (RewardTimeoutError if isinstance(error, TimeoutError) else RewardError)(str(error)) from None
        if "error" in answer:
            raise RewardError(answer["error"])
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


def _kill(process: subprocess.Popen[bytes], held: int, owner: int) -> None:
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


def _reference(grader: Grader) -> str:
    """Return ``module:name`` of a function that a new process can import."""
    module, name = getattr(grader, "__module__", None), getattr(grader, "__qualname__", "")
    if not inspect.isfunction(grader) or module in (None, "__main__") or not name.replace(".", "").isidentifier():
        raise ConfigError(
            f"expected a function that a new process can import by name, found {grader!r}; move it to a module of its "
            "own, or give it as 'package.module:function'"
        )
    return f"{module}:{name}"
