"""Graders that misbehave cost one score each; nothing hangs, nothing stays behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agilerl.errors import ConfigError, RewardError
from agilerl.rewards import Accuracy, CombinedGrader, IsolatedGrader, call_grader, grade
from agilerl.rewards.grader import attempt_grader
from tests.rewards.hostile import ACTS, DETACHING, batch, hostile

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 0.5
ROW = {"question": "3+4", "answer": "7"}


def descendants(*, recursive: bool = True) -> list[psutil.Process]:
    """Return the processes below this one, less those that ``tests.programs`` keeps for other tests."""
    return [p for p in psutil.Process().children(recursive) if not keeps_programs(p)]


def keeps_programs(process: psutil.Process) -> bool:
    try:
        return "multiprocessing" in "".join(process.cmdline())
    except psutil.Error:  # it has ended, and counts as before until it is waited for
        return False


WORKER = 2
"""Processes of a worker: itself, and the one that ends what it starts."""


@pytest.mark.parametrize("act", [name for name in ACTS if name != "none" and not name.startswith("detaches")])
@pytest.mark.processes
def test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing(act):
    with IsolatedGrader(hostile, timeout=TIMEOUT, memory_bytes=2**30) as grader:
        start = time.monotonic()
        (outcome,) = grader([""], [act], answer=["7"])
        assert time.monotonic() - start < TIMEOUT + 1.0
        assert not isinstance(outcome, float)
        assert len(descendants()) in (0, WORKER)
        grades = grade(grader, ["7", act, "8", "none"], [ROW] * 4)
        assert grades.rewards == [1.0, None, 0.0, None]
        assert grades.failures == {"hostile": [1]}
        assert len(descendants()) == WORKER
    assert descendants() == []


@pytest.fixture
def detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that acts write the processes to that they detach."""
    monkeypatch.setenv("DETACHED", str(tmp_path / "detached"))
    return tmp_path / "detached"


def alive(detached: Path) -> list[int]:
    pids = [int(line) for line in detached.read_text().split()]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("act", [act.__name__ for act in DETACHING])
@pytest.mark.processes
def test_what_leaves_its_session_and_its_parent_is_killed_too(act: str, detached: Path) -> None:
    with IsolatedGrader(hostile, timeout=TIMEOUT) as grader:
        start = time.monotonic()
        (outcome,) = grader([""], [act], answer=["7"])
        assert isinstance(outcome, RewardError)
        assert time.monotonic() - start < TIMEOUT + 1.0
        assert alive(detached) == []
        assert descendants() == []
        assert grade(grader, ["7"], [ROW]).rewards == [1.0]


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.processes
def test_what_a_grader_leaves_behind_ends_with_it(end: str, detached: Path) -> None:
    grader = IsolatedGrader(hostile, timeout=5)
    grader.setup()
    assert call_grader(grader, ["detaches"], [ROW]) == [0.0]
    assert len(alive(detached)) == 1
    if end == "kill":  # of the worker, by somebody else
        (container,) = descendants(recursive=False)
        container.children()[0].kill()
        container.wait(2)
    grader.close()
    assert alive(detached) == []
    assert descendants() == []


@pytest.mark.processes
def test_what_a_grader_leaves_behind_ends_when_its_owner_is_killed(detached: Path) -> None:
    code = (
        "from agilerl.rewards import IsolatedGrader, call_grader\n"
        "grader = IsolatedGrader('tests.rewards.hostile:hostile')\n"
        f"print(call_grader(grader, ['detaches'], [{ROW}]), flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"[0.0]\n"
        assert len(alive(detached)) == 1
        below = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    psutil.wait_procs(below, timeout=2)
    assert [process for process in below if process.is_running()] == []
    assert alive(detached) == []


SAID = {
    "raises": "raised ZeroDivisionError: no luck",
    "hangs": "no reply within 0.5 s",
    "allocates": "MemoryError",
    "leaves": "ended with status 0",
    "nan": "finite number or None, found nan",
    "text": "found '0.5'",
}


@pytest.mark.processes
def test_failures_say_what_happened():
    with IsolatedGrader(hostile, timeout=TIMEOUT, memory_bytes=2**30) as grader:
        for act, words in SAID.items():
            with pytest.raises(RewardError, match=words):
                call_grader(grader, [act], [ROW])


@pytest.mark.processes
def test_a_batch_signature_works_and_workers_share_the_load():
    texts = ["7", "sleeps", "sleeps", "8"]
    with IsolatedGrader(batch, timeout=5, workers=2) as grader:
        start = time.monotonic()
        assert call_grader(grader, texts, [ROW] * 4) == [1.0, 0.0, 0.0, 0.0]
        assert time.monotonic() - start < 0.55
        assert len(descendants()) == 2 * WORKER


@pytest.mark.processes
def test_it_runs_elsewhere_and_prints_do_not_disturb():
    with IsolatedGrader("tests.rewards.hostile:process") as grader:
        (pid,) = call_grader(grader, ["x"], [ROW])
        assert pid != os.getpid()
        assert call_grader(grader, ["x"], [ROW]) == [pid], "one process serves all"


@pytest.mark.processes
def test_failures_of_a_part_mask_the_sum():
    with CombinedGrader([IsolatedGrader(hostile, timeout=TIMEOUT), (length, 0.1)]) as grader:
        grades = grade(grader, ["7", "raises"], [ROW] * 2)
        assert grades.rewards == [pytest.approx(1.1), None]
        assert grades.scores == {"hostile": [1.0, None], "length": [1.0, 6.0]}
    assert descendants() == []


def length(completion: str) -> float:
    return float(len(completion))


@pytest.mark.processes
def test_columns_travel_as_json():
    with IsolatedGrader(hostile) as grader:
        assert call_grader(grader, ["7"], [{**ROW, "metadata": {"levels": (1, 2), "text": "é"}}]) == [1.0]
        (outcome,) = attempt_grader(grader, ["7"], [{**ROW, "image": object()}])
        assert "can be written as JSON" in str(outcome)


@pytest.mark.processes
def test_only_functions_that_can_be_imported():
    def local(completion):
        return 1.0

    for grader in (lambda completion: 1.0, local, json.JSONDecoder()):
        with pytest.raises(ConfigError, match="import by name"):
            IsolatedGrader(grader)
    with pytest.raises(RewardError, match=r"no\.such:thing"):
        IsolatedGrader("no.such:thing").setup()


@pytest.mark.processes
def test_accuracy_is_mathematics_with_a_limit():
    answers = [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        ("no idea", "7", 0.0),
        ("blue", "blue", 1.0),
        ("7", "", None),
    ]
    with Accuracy() as grader:
        completions, golds, scores = zip(*answers)
        assert call_grader(grader, completions, [{"answer": gold} for gold in golds]) == list(scores)


@pytest.mark.processes
def test_accuracy_of_a_text_that_keeps_algebra_busy_for_ever_is_none():
    with Accuracy(timeout=1.0) as grader:
        call_grader(grader, ["7"], [ROW])
        start = time.monotonic()
        grades = grade(grader, ["7", "$44^{19^{35}}$"], [ROW, {**ROW, "answer": "2^x"}])
        assert time.monotonic() - start < 1.0 + 1.0
    assert grades.rewards == [1.0, None]
    assert grades.errors == {"accuracy": 1}
