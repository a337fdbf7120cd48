"""Statements about other projects: of which version each is, and when and where it was read (docs/comparison.md)."""

import datetime
import importlib.metadata
import re
from pathlib import Path

import pytest

from agilerl.algorithms import ALGORITHMS
from docs.check_sources import SOURCES, STATEMENTS, defaults, sources

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECTS = sorted({project for project, _ in sources()})
NAMED = "|".join(PROJECTS)


def about(text: str) -> set[str]:
    """Return the projects that a page compares with: in a heading, or at the head of a table's column."""
    heads = re.findall(r"^(\|.*)\n\|[ :|-]+$", text, re.MULTILINE)
    places = [*re.findall(r"^#+ .*$", text, re.MULTILINE), *heads]
    return {project for place in places for project in re.findall(rf"\b(?:{NAMED})\b", place)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_said_of_other_projects_has_a_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = sources()
    if page != SOURCES and (about(text) or re.search(rf"\b({NAMED})\b \d+\.\d", text)):
        assert "comparison.md#sources)" in text, f"{page.name} speaks of {about(text)} without a link to the sources"
    for project, version in re.findall(rf"\b({NAMED})\b[^\w.,;:|(]{{1,2}}(\d+\.\d+(?:\.\d+)?)", text):
        rows = [row for name, row in known if name == project]
        assert any(f"{row}.".startswith(f"{version}.") for row in rows), f"{project} {version} is none of {rows}"


def test_each_source_has_a_day_and_a_place() -> None:
    for (project, _), (released, read, where) in sources().items():
        days = [datetime.date.fromisoformat(day) for day in (released, read) if day != "-"]
        assert days == sorted(days), project
        assert len(where) > 10, project


def test_defaults_of_this_project_are_as_listed() -> None:
    listed = defaults()
    assert len(listed) > 20
    for (algorithm, argument), (*_, here) in listed.items():
        found = ALGORITHMS[algorithm].defaults()[argument]
        assert found == here, (algorithm, argument)


@pytest.mark.parametrize(("project", "version", "file", "pattern"), [s for s in STATEMENTS if s[0] in ("trl", "ray")])
def test_statements_about_installed_projects_hold(project: str, version: str, file: str, pattern: str) -> None:
    if importlib.metadata.version(project) != version:
        pytest.skip(f"{project} {version} is not installed")
    text = Path(str(importlib.metadata.distribution(project).locate_file(file))).read_text(encoding="utf-8")
    assert re.search(pattern, text)


def test_the_tables_are_read_as_written() -> None:
    assert defaults()["GRPO", "lr"] == (5e-7, 1e-5)
    assert about("# Coming from TRL\n") == {"TRL"}
    assert about("text\n| topic | Tunix 0.1 |\n| --- | --- |\n| TRL | 1 |\n") == {"Tunix"}
