"""How the package is installed: PyPI has another project by its name, so pages and messages say ``-e``."""

import re
import tomllib
from pathlib import Path

import pytest

from agilerl.errors import how_to_install

ROOT = Path(__file__).resolve().parent.parent
READ = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *(
        path
        for folder in ("agilerl", "benchmarking", "docs", "tutorials")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".yaml", ".sh", ".jinja", ".ipynb"}
    ),
]
BY_NAME = re.compile(r"""(?:pip3?|uv|uvx|pipx)(?:\s+[\w-]+)*\s+["'`]*agilerl\b(?!/)""")
EXTRA = re.compile(r"""-e(?:ditable)? ["']?\.\[([\w,]+)\]|how_to_install\(["'](\w+)["']\)""")


def test_nothing_is_installed_by_the_name_of_another_project():
    assert all(BY_NAME.search(text) for text in ("pip install 'agilerl[ray]'", "pip install agilerl", "uv add agilerl"))
    found = [f"{path.relative_to(ROOT)}: {line}" for path in READ for line in lines(path) if BY_NAME.search(line)]
    assert found == []


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def extras_said() -> list[str]:
    found = {match for path in READ for line in lines(path) for match in EXTRA.findall(line)}
    return sorted({name for pair in found for names in pair if names for name in names.split(",")})


@pytest.mark.parametrize("extra", extras_said())
def test_what_is_to_be_installed_exists(extra: str):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extra in known
    assert f"pip install -e '.[{extra}]'" in how_to_install(extra)


def test_the_messages_share_one_home_for_it():
    said = [path.relative_to(ROOT) for path in READ if path.suffix == ".py" and "install -e '.[" in path.read_text()]
    # A docstring may show the command; a message takes it from there.
    assert [str(path) for path in said] == ["agilerl/envs/tools/builtin.py", "agilerl/errors.py"]
