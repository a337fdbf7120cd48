"""Code that nobody has read, run for real."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agilerl.errors import RewardError
from agilerl.rewards import SandboxGrader, call_grader, run_python
from agilerl.rewards.grader import attempt_grader
from agilerl.rewards.sandbox import extract_code

ISOLATED = "files" in run_python("").isolation
needs_namespaces = pytest.mark.skipif(not ISOLATED, reason="the kernel gives no unprivileged namespaces here")


@pytest.mark.processes
def test_output_input_and_status():
    done = run_python("import sys\nprint(input())\nprint('oops', file=sys.stderr)\nsys.exit(3)", stdin="héllo\nmore")
    assert (done.stdout, done.stderr, done.returncode) == ("héllo\n", "oops\n", 3)
    assert not done.ok
    assert not done.timed_out
    assert not done.truncated
    assert 0 < done.seconds < 5
    assert run_python("pass").ok


@pytest.mark.processes
def test_a_program_sees_an_empty_folder_its_input_and_nothing_of_us(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not tell")
    code = """
import json, os, sys
descriptors = os.listdir('/proc/self/fd')
print(json.dumps([sys.stdin.read(), os.listdir(), dict(os.environ), sys.flags.isolated, len(descriptors)]))
"""
    text, files, environment, isolated, descriptors = json.loads(run_python(code).stdout)
    assert text == ""
    assert files == ["main.py"]
    assert "SECRET_KEY" not in environment
    assert environment["HOME"] == environment["TMPDIR"]
    assert not Path(environment["HOME"]).exists(), "the folder is removed afterwards"
    assert isolated == 1
    assert descriptors == 4  # 0, 1, 2 and the one that lists them


@pytest.mark.processes
def test_a_program_that_fails_shows_its_traceback():
    done = run_python("x = 1\nraise ValueError(x)")
    assert done.returncode == 1
    assert "line 2" in done.stderr
    assert "ValueError: 1" in done.stderr


@pytest.mark.processes
def test_a_signal_is_reported():
    assert run_python("import os; os.kill(os.getpid(), 9)").returncode == -9
    assert run_python("import os; os.abort()").returncode == -6


TIMELESS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "holds the interpreter": "print(44**19**35)",
    "ignores SIGTERM": "import signal\nfor s in (2, 15, 14): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "waits for a child": "import os, time\nif os.fork() == 0: time.sleep(600)\nos.wait()",
    "prints for ever": "while True: print('x' * 1000)",
}


@pytest.mark.parametrize("code", TIMELESS.values(), ids=TIMELESS)
@pytest.mark.processes
def test_time_is_limited(code):
    start = time.monotonic()
    done = run_python(code, timeout=0.3)
    assert time.monotonic() - start < 0.3 + 1.0
    assert done.timed_out
    assert done.returncode is None


def marked(mark: str) -> list[psutil.Process]:
    """Processes with ``mark`` in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(mark in word for word in [*process.cmdline(), *process.environ().values()]):
                found.append(process)
        except psutil.Error:
            continue
    return found


ORPHANS = {
    "child": "if os.fork() == 0: stay()",
    "ignores signals": "for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nif os.fork() == 0: stay()",
    "own session": "if os.fork() == 0:\n    os.setsid()\n    stay()",
    "daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: stay()\n    os._exit(0)",
    "daemon that outlives a timeout": "if os.fork() == 0:\n    os.setsid()\n    stay()\nstay()",
}


@pytest.mark.parametrize("code", ORPHANS.values(), ids=ORPHANS)
@pytest.mark.processes
def test_nothing_that_it_started_survives(code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start = "import os, signal, sys, time\ndef stay():\n    print('started', flush=True)\n    time.sleep(600)\n"
    done = run_python(f"{start}{code}\ntime.sleep(0.1)", timeout=0.5)
    assert "started" in done.stdout
    # The folder of the program is in the environment of everything that descends from it.
    assert marked(str(tmp_path)) == []


@pytest.mark.processes
def test_the_supervisor_dies_with_its_parent(tmp_path):
    """A training process that is killed leaves nothing behind."""
    code = "from agilerl.rewards import run_python; run_python('import time; time.sleep(600)', timeout=600)"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert soon(lambda: len(marked(str(tmp_path / "sandbox-"))) >= 2)
    finally:
        parent.kill()
        parent.wait()
    assert soon(lambda: not marked(str(tmp_path / "sandbox-")))


def soon(holds: Callable[[], bool]) -> bool:
    """Wait until something holds, 20 seconds at most."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.mark.processes
def test_memory_is_limited():
    done = run_python("x = bytearray(10 * 2**30)", memory_bytes=256 * 2**20)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr


@pytest.mark.processes
def test_files_are_limited():
    done = run_python("open('big', 'wb').write(bytes(3 * 2**20))", disk_bytes=2**20)
    assert not done.ok
    assert "OSError" in done.stderr


@pytest.mark.processes
def test_output_is_cut_and_said_to_be():
    done = run_python("print('é' * 5000)", output_bytes=1001)
    assert done.ok
    assert done.truncated
    assert done.stdout == "é" * 500 + "\ufffd"
    assert run_python("print('ab')", output_bytes=1).stdout == "a"


@needs_namespaces
@pytest.mark.processes
def test_no_network_and_no_writing_outside(tmp_path):
    code = f"""
import os, socket
for act in (
    lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
    lambda: open({str(tmp_path / "written")!r}, "w"),
    lambda: os.remove({__file__!r}),
    lambda: os.kill({os.getpid()}, 0),
):
    try:
        act()
        print("done")
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    lines = run_python(code).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["OSError", "OSError", "OSError", "ProcessLookupError"]
    assert not (tmp_path / "written").exists()
    assert Path(__file__).exists()


# -- the grader -------------------------------------------------------------------------------------------------------

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 2) == 4"]


def score(completion: str, tests: object, **settings: object) -> float | None:
    return call_grader(SandboxGrader(**settings), [completion], [{"question": "q", "tests": tests}])[0]  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_score_is_the_share_of_passed_tests():
    assert score(ADD, TESTS) == pytest.approx(2 / 3)
    assert score(ADD, TESTS, score="all") == 0.0
    assert score(ADD, TESTS[:2], score="all") == 1.0
    assert score(ADD, TESTS[0]) == 1.0
    assert score(ADD, None) is None


@pytest.mark.processes
def test_printed_output_is_compared():
    code = "a, b = map(int, input().split())\nprint(a + b)\nprint()"
    assert score(code, [{"stdin": "1 2", "stdout": "3"}, {"stdin": "5 5", "stdout": " 10 \n"}]) == 1.0
    assert score(code, {"stdin": "1 2", "stdout": "4"}) == 0.0


CHEATS = {
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "prints what it likes": "print('passed', True, 1.0)",
    "never ends": "while True: pass",
    "raises": "raise SystemExit",
    "no code": "I cannot do that.",
    "swallows the test": "'''",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
@pytest.mark.processes
def test_code_that_does_not_answer_earns_nothing(code):
    assert score(code, ["assert add(1, 2) == 3"], timeout=0.5) == 0.0


@pytest.mark.processes
def test_many_at_once_keep_their_order():
    texts = [f"def f(): return {n}" for n in range(6)]
    rows = [{"tests": [f"assert f() == {n}", "assert f() < 3"]} for n in range(6)]
    assert call_grader(SandboxGrader(workers=3), texts, rows) == [1.0] * 3 + [0.5] * 3


@pytest.mark.processes
def test_tests_that_are_none():
    with pytest.raises(RewardError, match=r"column 'tests', found only .*question"):
        call_grader(SandboxGrader(), [ADD], [{"question": "q"}])
    outcomes = attempt_grader(SandboxGrader(), [ADD] * 3, [{"tests": []}, {"tests": [7]}, {"tests": TESTS[0]}])
    assert "expected at least one test" in str(outcomes[0])
    assert "found 7" in str(outcomes[1])
    assert outcomes[2] == 1.0


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nno:\n```python\nx = 2\n```", "x = 2\n"),
        ("```js\nlet x\n```", "```js\nlet x\n```"),
    ],
)
def test_the_last_block_is_the_code(completion, code):
    assert extract_code(completion) == code
