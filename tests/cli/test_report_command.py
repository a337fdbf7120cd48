"""``agilerl report``: where the file goes, and what it never replaces."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agilerl.cli.commands import default_report
from tests.cli.outcome import Agilerl, Outcome
from tests.programs import Program
from tests.report.synthetic_run import make_run
from tests.training.small_runs import environment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_run(tmp_path_factory.mktemp("report") / "a", generations=2)
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    for name in ("a", "b", "c/a"):
        shutil.copytree(made, tmp_path / name)
    return tmp_path


def test_a_run_keeps_its_report_when_several_are_compared(runs: Path, agilerl: Agilerl) -> None:
    assert agilerl("report", "a") == Outcome(0, "a/report.html\n", "")
    before = (runs / "a" / "report.html").read_bytes()
    assert agilerl("report", "a", "b") == Outcome(0, "report-a-b.html\n", "")
    assert agilerl("report", "a", "c/a").output == f"report-{runs.name}-a-c-a.html\n"
    assert (runs / "a" / "report.html").read_bytes() == before
    assert b"2 runs side by side" in (runs / "report-a-b.html").read_bytes()
    assert agilerl("report", "a", "b", "--out", "a/report.html").code == 0  # said in so many words


def test_a_default_name_is_one_that_a_disk_takes(tmp_path: Path) -> None:
    many = [tmp_path / f"{number}-{'ä' * 60}" for number in range(50)]
    name = default_report(many).name
    assert len(os.fsencode(name)) < 255
    assert name.endswith("-and-49-more.html")


REFUSED = {
    "a file of the run": (["a", "--out", "a/metrics.jsonl"], "is not a report, so it is not overwritten"),
    "somebody's thesis": (["a", "b", "--out", "thesis.html"], "is not a report, so it is not overwritten"),
    "a folder": (["a", "--out", "b"], "found the folder 'b'"),
    "the working directory": (["a", "--out", "."], "found the folder '.'"),
    "a device": (["a", "--out", "/dev/null"], "found the device or pipe"),
    "nothing": (["a", "--out", ""], "found an empty text"),
    "no run": ([""], "found an empty text"),
    "one of several": (["a", ""], "found an empty text"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_no_place_for_a_report(mistake: str, runs: Path, agilerl: Agilerl) -> None:
    (runs / "thesis.html").write_text("My thesis", encoding="utf-8")
    files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    arguments, words = REFUSED[mistake]
    found = agilerl("report", *arguments)
    assert (found.code, found.output, found.errors.count("\n")) == (2, "", 1)
    assert words in found.errors
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("out", ["a/run.json/x.html", "x" * 300, f"{'d/' * 3000}x.html"])
def test_a_place_that_the_disk_refuses(out: str, runs: Path, agilerl: Agilerl) -> None:
    found = agilerl("report", "a", "--out", out)
    assert (found.code, found.output, found.errors.count("\n")) == (1, "", 1)
    assert "could not be written" in found.errors


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["the run finishes", "Ctrl-C"])
def test_a_live_report_follows_its_run(ending: str, runs: Path) -> None:
    summary = (runs / "a" / "summary.json").rename(runs / "kept.json")
    page = runs / "a" / "report.html"
    lines = (runs / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (runs / "a" / "metrics.jsonl").write_text("".join(lines[:9]), encoding="utf-8")
    with Program("-m", "agilerl", "report", "a", "--live", cwd=runs, env=environment()) as process:
        until(lambda: page.exists() and b'data-reload="10"' in page.read_bytes())
        before = page.read_bytes()
        with (runs / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(lines[9:])
        until(lambda: page.read_bytes() != before)
        assert process.poll() is None
        if ending == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            summary.rename(runs / "a" / "summary.json")
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "a/report.html\n"), errors
    assert b"data-reload" not in page.read_bytes().partition(b"<script")[0]
    assert (b"This run has not finished" in page.read_bytes()) == (ending == "Ctrl-C")


def test_a_live_report_of_finished_runs_is_a_report(runs: Path, agilerl: Agilerl) -> None:
    live = agilerl("report", "a", "--live", "--out", "live.html")
    assert (live.code, live.output) == (0, "live.html\n")
    agilerl("report", "a", "--out", "still.html")
    assert (runs / "live.html").read_bytes() == (runs / "still.html").read_bytes()
