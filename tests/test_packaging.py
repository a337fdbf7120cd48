"""What is installed is complete, what it needs is declared, and the two commands are there."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import agilerl
from tests.architecture_rules import OPTIONAL, Module

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
REQUIRED = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
FOR_CHECKS = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"]["dev"]]
IMPORTED_AS = {
    "huggingface-hub": "huggingface_hub",
    "pydantic-core": "pydantic_core",
    "pyyaml": "yaml",
}
MEBIBYTE = 2**20
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
"""The environment without what a make that runs these tests tells its children."""


def test_version_is_the_same_everywhere() -> None:
    assert agilerl.__version__ == PROJECT["project"]["version"]
    assert f"## {agilerl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_data_file_is_installed_and_small() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["agilerl"]
    home = ROOT / "agilerl"
    files = [p for p in home.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {"model.safetensors", "default.yaml", "py.typed"} <= {p.name for p in files}
    lost = [str(p.relative_to(home)) for p in files if not any(fnmatch(str(p.relative_to(home)), g) for g in patterns)]
    assert lost == []
    assert sum(p.stat().st_size for p in (home / "models" / "tiny").iterdir() if p.is_file()) <= 2 * MEBIBYTE


def test_every_import_is_declared_and_every_declaration_is_imported() -> None:
    declared = {IMPORTED_AS.get(r.name, r.name) for r in REQUIRED}
    found = set()
    for path in (ROOT / "agilerl").rglob("*.py"):
        found |= {i.target.partition(".")[0] for i in Module(path.stem, path.read_text(encoding="utf-8")).imports}
    foreign = found - set(sys.stdlib_module_names) - {"agilerl"}
    assert foreign - declared - set(OPTIONAL) == set()
    assert declared - foreign == set()


def test_pins_are_exact_name_no_place_and_suit_the_declared_ranges() -> None:
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in PINS)
    assert all(pin.url is None for pin in PINS)
    versions = {canonicalize_name(pin.name): Version(str(pin.specifier)[2:]) for pin in PINS}
    assert versions["torch"] == Version("2.13.0")
    for requirement in [*REQUIRED, *FOR_CHECKS]:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_have_the_versions_of_the_pins(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    [torch] = [pin for pin in PINS if pin.name == "torch"]
    assert re.findall(r"torch==[\w.]+", text) == [str(torch)]
    assert "constraints.txt" in text
    assert 'ENTRYPOINT ["agilerl"]' in text
    kept_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    needed = ["agilerl", "README.md", "LICENSE", "pyproject.toml", "constraints.txt"]
    assert [path for path in needed if any(fnmatch(path, pattern) for pattern in kept_out)] == []


def test_torch_is_capped() -> None:
    [torch] = [r for r in REQUIRED if r.name == "torch"]
    assert not torch.specifier.contains("99.0")


def test_console_script_is_a_function() -> None:
    module, _, name = PROJECT["project"]["scripts"]["agilerl"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_licence_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.processes
def test_continuous_integration_runs_the_test_command_and_passes_its_failure_on(tmp_path: Path) -> None:
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", script)
    makefile = tmp_path / "Makefile"
    makefile.write_text("test:\n\t@echo tested here: $(CURDIR)\n")
    done = subprocess.run([script], cwd="/", env=OUTSIDE, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"tested here: {tmp_path}")
    makefile.write_text("test:\n\t@false\n")
    assert subprocess.run([script], cwd="/", env=OUTSIDE, capture_output=True).returncode != 0
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        (
            "train",
            ["Installing", "-m venv .venv", "--constraint constraints.txt --editable", "Installed", "agilerl train"],
        ),
        ("test", ["-m venv .venv", ".venv/bin/ruff check", ".venv/bin/ruff format --check", "bin/mypy", "bin/pytest"]),
    ],
)
@pytest.mark.processes
def test_the_two_commands_set_up_first(tmp_path: Path, target: str, commands: list[str]) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    plan = ["make", "--dry-run", target]
    text = subprocess.run(plan, cwd=tmp_path, env=OUTSIDE, capture_output=True, text=True, check=True).stdout
    places = [text.index(command) for command in commands]
    assert places == sorted(places)

    ready = tmp_path / ".venv" / ".ready"
    ready.parent.mkdir()
    ready.touch()
    again = subprocess.run(plan, cwd=tmp_path, env=OUTSIDE, capture_output=True, text=True, check=True).stdout
    assert "-m venv" not in again
    assert commands[-1] in again
