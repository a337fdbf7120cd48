"""``agilerl report``: where the file goes, and what it never replaces."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agilerl.cli.commands import default_report
from tests.cli.outcome import Outcome
from tests.report.synthetic_run import make_run

Agilerl = Callable[..., Outcome]


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
