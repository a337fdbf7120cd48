"""Run untrusted code, and grade completions by the tests that their code passes."""

import contextlib
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agilerl.checks.arguments import Count, Positive, checked
from agilerl.errors import RewardError
from agilerl.rewards.grader import Columns, Mark
from agilerl.rewards.waiting import WaitingGrader

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE = 0.9
"""Seconds that the supervisor has to clean up after a timeout before it is killed too."""
ENDING = 5.0
"""Seconds allowed for killing all processes of a worker; it takes milliseconds, unless they resist."""


class Contained:
    """A process with a supervisor (``sandbox_child.py``), which kills everything that it has started.

    With ``limits`` it is confined, as far as the system allows it, and has an empty folder that is removed afterwards.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, bytes] = MappingProxyType({}),
        environment: Mapping[str, str] | None = None,
        patience: float = ENDING,
        **streams: Any,
    ) -> None:
        """Start it; raises RewardError where processes cannot be limited and ended as this needs it.

        ``files`` are put into the folder; ``patience`` is the time that the supervisor has to end everything.
        """
        if not hasattr(os, "fork"):
            raise RewardError(
                "graders in processes of their own need Linux or macOS, as do commands; on Windows, run this in WSL"
            )
        folder = None if limits is None else tempfile.mkdtemp(prefix="sandbox-")
        # The supervisor's report comes through it; its end tells the supervisor that this process is gone.
        self.channel, theirs = socket.socketpair()
        try:
            if folder is not None:
                for name, content in files.items():
                    Path(folder, name).write_bytes(content)
                limits = {"readable": [], **(limits or {}), "folder": folder}
                # Libraries that start a thread per core would exceed the limit of 32 threads.
                single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                homes = dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), folder)
                environment = {**(environment or {}), **homes, **single}
            self.process = subprocess.Popen(
                # -I -S: no PYTHON variable and no installed package reaches the supervisor.
                [sys.executable, "-I", "-S", str(CHILD), str(theirs.fileno()), json.dumps(limits), *command],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **{"stdout": subprocess.PIPE, **streams},
            )
        except BaseException as error:
            self.channel.close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise RewardError(f"cannot start {sys.executable}: {error}") from error
            raise
        finally:
            # The child alone may hold its end: with a copy open here, reading would not end when the supervisor does.
            theirs.close()
        self.end = weakref.finalize(self, _end, self.process, self.channel, folder, os.getpid(), patience)
        """End it and all its descendants."""

    def status(self) -> int | None:
        """Return the exit status of a process that is ending, -N for signal N; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING)
        try:
            status: int | None = json.loads(self.channel.recv(2**12, socket.MSG_DONTWAIT))["returncode"]
        except (OSError, ValueError):  # the supervisor was killed
            return self.process.returncode
        return status


def _end(
    process: "subprocess.Popen[bytes]", channel: socket.socket, folder: str | None, owner: int, patience: float
) -> None:
    if os.getpid() != owner:  # a process that was forked from it
        return
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # closing is not enough if a fork of this process also has it open
    channel.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class SandboxResult:
    """The result of a program."""

    stdout: str
    """Its standard output, at most ``output_bytes``; invalid UTF-8 is replaced."""
    stderr: str
    """Its standard error, tracebacks included; the same limit."""
    returncode: int | None
    """Exit status; -N if signal N ended it; None if it ran past the timeout."""
    timed_out: bool
    """Whether it was still running after ``timeout`` seconds."""
    truncated: bool
    """Whether output was truncated."""
    seconds: float
    """Wall time, including the start of Python."""
    isolation: tuple[str, ...]
    """Which of ``processes``, ``network`` and ``files`` were separate namespaces; empty if none is allowed."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with status 0."""
        return self.returncode == 0


@checked
def run_python(
    code: str,
    *,
    stdin: str = "",
    timeout: Positive = 5.0,
    memory_bytes: Count = 512 * 2**20,
    disk_bytes: Count = 16 * 2**20,
    output_bytes: Count = 64 * 2**10,
) -> SandboxResult:
    """Run ``code`` as a separate Python program and return how it ended; always returns in time.

    The program is started by the same interpreter with ``-I``, in an empty folder that is removed afterwards, with no
    inherited environment and ``stdin`` as its whole input. It has ``timeout`` seconds of wall and of CPU time,
    ``memory_bytes`` of address space, files of ``disk_bytes`` and 32 processes and threads. All processes that it
    started are killed with it, even if they left its session or ignore signals. Installed packages can be imported.

    How far it is isolated depends on the machine; ``SandboxResult.isolation`` reports it. On Linux, if the kernel
    allows unprivileged namespaces: no network (not even loopback), no view of other processes, no writing outside its
    folder. It can read every file that its user can read. Without namespaces (many containers forbid them; no other
    system has them) it can also use the network, write as its user, and escape being killed by killing its supervisor.
    If this process is root, the program runs as the user `nobody`; if that user cannot read the interpreter, it stays
    root without capabilities, and the limit on the number of processes does not bind it. The kernel is always shared:
    for code written to attack, use a virtual machine.

    Args:
        code: the program's source.
        stdin: its standard input.
        timeout: seconds, more than 0.
        memory_bytes: address space of each of its processes; Python itself needs about 50 MiB.
        disk_bytes: size of the largest file and, with the namespace ``files``, of all files together.
        output_bytes: how much of standard output, and of standard error, is kept.

    Raises RewardError if the process could not be started.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as input_file:
        # A file, not a pipe: a program that never reads its input cannot block the writer.
        input_file.write(stdin.encode(errors="surrogatepass"))
        input_file.seek(0)
        program = Contained(
            [sys.executable, "-I", "main.py"],
            {
                "timeout": timeout,
                "memory_bytes": memory_bytes,
                "disk_bytes": disk_bytes,
                "cpu_seconds": int(timeout) + 1,  # the kernel counts whole seconds
            },
            files={"main.py": code.encode(errors="surrogatepass")},
            environment={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            patience=0.0,  # _read has waited, for the report or for GRACE
            stdin=input_file,
            stderr=subprocess.PIPE,
        )
        process = program.process
        assert process.stdout is not None
        assert process.stderr is not None
        streams = [process.stdout.fileno(), process.stderr.fileno(), program.channel.fileno()]
        try:
            limit = max(output_bytes, 2**10) + 1  # a report has up to a hundred bytes
            *output, report = _read(streams, limit, time.monotonic() + timeout + GRACE)
        finally:
            program.end()
    seconds = time.monotonic() - started
    if process.returncode > 0 and not report:
        raise RewardError(f"the sandbox failed before it ran the program: {output[1].decode(errors='replace')}")
    # Without a report the supervisor was killed: by us if it was late, else by the program.
    killed: dict[str, Any] = {"returncode": None if seconds >= timeout else -signal.SIGKILL, "isolation": []}
    outcome = json.loads(report) if report else killed
    stdout, stderr = (text[:output_bytes].decode(errors="replace") for text in output)
    return SandboxResult(
        stdout,
        stderr,
        outcome["returncode"],
        timed_out=outcome["returncode"] is None,
        truncated=any(len(text) > output_bytes for text in output),
        seconds=seconds,
        isolation=tuple(outcome["isolation"]),
    )


def _read(streams: list[int], limit: int, deadline: float) -> list[bytes]:
    """Read the streams until the last of them ends or ``deadline``; keep ``limit`` bytes of each, drop the rest."""
    texts = {stream: bytearray() for stream in streams}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        ended = False
        while events := selector.select(0 if ended else max(0.0, deadline - time.monotonic())):
            for key, _ in events:
                # The report comes after everything else has ended; what was printed before may still be in its pipe.
                ended = ended or key.fd == streams[-1] or time.monotonic() > deadline
                chunk = os.read(key.fd, 2**16)
                texts[key.fd] += chunk[: limit - len(texts[key.fd])]
                if not chunk or (ended and len(texts[key.fd]) >= limit):
                    selector.unregister(key.fd)
    return [bytes(text) for text in texts.values()]


def extract_code(completion: str) -> str:
    """Return the last fenced block of Python (or of no stated language) in ``completion``, else the whole text."""
    blocks = FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


class SandboxGrader(WaitingGrader):
    """Run the code of a completion with the tests of its row; the score is the share of tests that it passes.

    A test is either Python that runs after the code (``"assert add(1, 2) == 3"``), or
    ``{"stdin": "1 2", "stdout": "3"}``, which compares the output, ignoring outer whitespace of lines. Code that
    raises, runs out of time or memory, or exits early fails the test: the answer is wrong then, not the grader. A row
    without tests is not graded (None).

    Each test runs in a separate process, with the limits (and the limitations) of ``run_python``. Printed output is
    compared outside that process. Tests in Python share it with the code under test, so malicious code can deceive
    them, for instance by redefining ``==`` or by searching memory for the success marker.
    """

    name = "sandbox"

    @checked
    def __init__(
        self,
        *,
        tests: str = "tests",
        score: Literal["fraction", "all"] = "fraction",
        timeout: Positive = 5.0,
        memory_bytes: Count = 512 * 2**20,
        workers: Count = 2,
    ) -> None:
        """Make a grader.

        Args:
            tests: the column that holds a row's tests, a list or a single test.
            score: ``fraction``: the share that passed; ``all``: 1.0 if none fails, else 0.0.
            timeout: seconds for each test, more than 0.
            memory_bytes: address space of each process.
            workers: tests that run at the same time, 1 or more.
        """
        self.tests, self.score, self.timeout = tests, score, timeout
        self.memory_bytes, self.workers = memory_bytes, workers

    def __repr__(self) -> str:
        return f"SandboxGrader(tests={self.tests!r}, score={self.score!r}, timeout={self.timeout:g})"

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[Mark]:  # type: ignore[override]
        """Return a score for each completion, or the exception that stopped its tests from being run."""
        # The tests decide alone; a prompt is only what the base class expects.
        return super().__call__(columns.pop("prompts", completions), completions, **columns)

    def question(self, completion: str, prompt: str, row: Columns) -> tuple[str, Any]:
        """Return a completion and its tests; raises RewardError if the row has no such column."""
        if self.tests not in row:
            raise RewardError(f"expected tests in the column {self.tests!r}, found only {', '.join(sorted(row))}")
        return completion, row[self.tests]

    def answer(self, question: tuple[str, Any]) -> Mark:
        """Return the score of a completion by its tests, or the exception that stopped them from being run."""
        completion, tests = question
        if tests is None:
            return None
        try:
            outcomes = self._outcomes(extract_code(completion), _check_tests(tests))
            # The outcomes are a generator, so that no test runs after one that has failed.
            if self.score == "all":
                return float(all(outcomes))
            passed = list(outcomes)
        except (RewardError, OSError) as error:
            return error
        return sum(passed) / len(passed)

    def _outcomes(self, code: str, tests: Sequence[Any]) -> Iterator[bool]:
        run = partial(run_python, timeout=self.timeout, memory_bytes=self.memory_bytes)
        for test in tests:
            if isinstance(test, Mapping):
                done = run(code, stdin=test["stdin"])
                yield done.ok and not done.truncated and _lines(done.stdout) == _lines(test["stdout"])
            else:
                # Printed after the test has passed: code that exits early, with any status, does not print it.
                mark = secrets.token_hex(16)
                done = run(f"{code}\n\n{test}\n\n__import__('os').write(1, b'{mark}')\n")
                yield done.ok and mark in done.stdout


def _check_tests(tests: object) -> Sequence[Any]:
    listed = list(tests) if isinstance(tests, Sequence) and not isinstance(tests, str) else [tests]
    for test in listed:
        printed = (
            isinstance(test, Mapping) and isinstance(test.get("stdin"), str) and isinstance(test.get("stdout"), str)
        )
        if not printed and not isinstance(test, str):
            raise RewardError(f"expected Python, or {{'stdin': text, 'stdout': text}}, as a test, found {test!r}")
    if not listed:
        raise RewardError("expected at least one test in a row, found an empty list; use None for no tests")
    return listed


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
