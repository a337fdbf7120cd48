"""Run untrusted code, and grade completions by the tests that their code passes."""

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agilerl.arguments import checked
from agilerl.errors import ConfigError, RewardError
from agilerl.rewards.waiting import Answer, WaitingGrader

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE = 0.9
"""Seconds that the child process has to clean up after a timeout before it is killed too."""


def check_system() -> None:
    """Raise RewardError on a system whose processes cannot be limited and ended as a sandbox needs it."""
    if not hasattr(os, "fork"):
        raise RewardError("graders in processes of their own need Linux or macOS; on Windows, run this in WSL")


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
    timeout: float = 5.0,
    memory_bytes: int = 512 * 2**20,
    disk_bytes: int = 16 * 2**20,
    output_bytes: int = 64 * 2**10,
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

    Raises:
        ConfigError: a limit is not positive.
        RewardError: the process could not be started.
    """
    limits = {"timeout": timeout, "memory_bytes": memory_bytes, "disk_bytes": disk_bytes, "output_bytes": output_bytes}
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"run_python: expected {name} above 0, found {value}")
    check_system()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder, tempfile.TemporaryFile() as given:
        # A file, not a pipe: a program that never reads its input cannot block the writer.
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        program = Path(folder) / "main.py"
        program.write_text(code, encoding="utf-8", errors="surrogatepass")
        order = {**limits, "program": str(program), "cpu_seconds": int(timeout) + 1}
        *output, report = _supervise(order, given, folder)
        seconds = time.monotonic() - started
    # Without a report the child was killed: by us if it was late, else by the program.
    late = seconds >= timeout
    killed: dict[str, Any] = {"returncode": None if late else -signal.SIGKILL, "timed_out": late, "isolation": []}
    outcome: dict[str, Any] = json.loads(report) if report else killed
    stdout, stderr = (text[:output_bytes].decode(errors="replace") for text in output)
    truncated = any(len(text) > output_bytes for text in output)
    isolation = tuple(outcome.pop("isolation"))
    return SandboxResult(stdout, stderr, truncated=truncated, seconds=seconds, isolation=isolation, **outcome)


def _supervise(order: dict[str, Any], stdin: Any, folder: str) -> list[bytes]:
    """Run the child process until it ends; return the output of both streams, and the child's report."""
    report, child_report = os.pipe()
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    # Libraries that start a thread per core would exceed the limit of 32 threads.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), json.dumps(order), str(child_report)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            pass_fds=[child_report],
            start_new_session=True,
        )
    except OSError as error:
        os.close(report)
        raise RewardError(f"the sandbox could not start {sys.executable}: {error}") from error
    finally:
        os.close(child_report)
    with child, open(report, "rb", buffering=0) as reports:
        assert child.stdout is not None
        assert child.stderr is not None
        streams = [child.stdout.fileno(), child.stderr.fileno(), reports.fileno()]
        try:
            printed = _read(streams, order["output_bytes"] + 1, time.monotonic() + order["timeout"] + GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode > 0 and not printed[-1]:
        raise RewardError(f"the sandbox failed before it ran the program: {printed[1].decode(errors='replace')}")
    return printed


def _read(streams: list[int], most: int, deadline: float) -> list[bytes]:
    """Read the streams until the last of them ends or ``deadline``; keep ``most`` bytes of each, drop the rest."""
    kept = {stream: bytearray() for stream in streams}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            os.set_blocking(stream, False)
            selector.register(stream, selectors.EVENT_READ)
        ended = False
        while not ended and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = _chunk(key.fd)
                ended = ended or key.fd == streams[-1]  # the report comes after everything else has ended
                if chunk == b"":
                    selector.unregister(key.fd)
                kept[key.fd] += (chunk or b"")[: most - len(kept[key.fd])]
    for stream, text in kept.items():
        while len(text) < most and (chunk := _chunk(stream)):
            text += chunk[: most - len(text)]
    return [bytes(text) for text in kept.values()]


def _chunk(stream: int) -> bytes | None:
    """Return what can be read now: b"" at the end of the stream, None if there is nothing to read yet."""
    try:
        return os.read(stream, 2**16)
    except BlockingIOError:
        return None


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
        timeout: float = 5.0,
        memory_bytes: int = 512 * 2**20,
        workers: int = 2,
    ) -> None:
        """Make a grader.

        Args:
            tests: the column that holds a row's tests, a list or a single test.
            score: ``fraction``: the share that passed; ``all``: 1.0 if none fails, else 0.0.
            timeout: seconds for each test, more than 0.
            memory_bytes: address space of each process.
            workers: tests that run at the same time, 1 or more.
        """
        if score not in ("fraction", "all"):
            raise ConfigError(f"SandboxGrader: expected fraction or all as score, found {score!r}")
        if workers < 1 or not timeout > 0 or memory_bytes < 1:
            raise ConfigError(
                "SandboxGrader: expected workers and memory_bytes of 1 or more and a timeout above 0, found "
                f"{workers}, {memory_bytes} and {timeout}"
            )
        self.tests, self.score, self.timeout = tests, score, timeout
        self.memory_bytes, self.workers = memory_bytes, workers

    def __repr__(self) -> str:
        return f"SandboxGrader(tests={self.tests!r}, score={self.score!r}, timeout={self.timeout:g})"

    def question(self, completion: str, prompt: str, row: Mapping[str, Any]) -> tuple[str, Any]:
        """Return a completion and its tests; raises RewardError if the row has no such column."""
        if self.tests not in row:
            raise RewardError(f"expected tests in the column {self.tests!r}, found only {', '.join(sorted(row))}")
        return completion, row[self.tests]

    def answer(self, question: tuple[str, Any]) -> Answer:
        """Return the score of a completion by its tests, or the exception that stopped them from being run."""
        completion, tests = question
        if tests is None:
            return None
        try:
            outcomes = self._outcomes(extract_code(completion), _checked_tests(tests))
            if self.score == "all":
                return float(all(outcomes))
            passed = list(outcomes)
        except (RewardError, OSError) as error:
            return error
        return sum(passed) / len(passed)

    def _outcomes(self, code: str, tests: Sequence[Any]) -> Iterator[bool]:
        for test in tests:
            # Printed after the test has passed: code that exits early, with any status, does not print it.
            mark = secrets.token_hex(16)
            given = test["stdin"] if isinstance(test, Mapping) else ""
            program = (
                code if isinstance(test, Mapping) else f"{code}\n\n{test}\n\n__import__('os').write(1, b'{mark}')\n"
            )
            done = run_python(program, stdin=given, timeout=self.timeout, memory_bytes=self.memory_bytes)
            if isinstance(test, Mapping):
                yield done.ok and not done.truncated and _lines(done.stdout) == _lines(test["stdout"])
            else:
                yield done.ok and mark in done.stdout


def _checked_tests(tests: object) -> Sequence[Any]:
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
