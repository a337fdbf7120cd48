"""How the package is installed: under a name of its own, by lines that work, and not among another project's files."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agilerl.errors import DISTRIBUTION, how_to_install
from tests.training.small_runs import environment

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "Dockerfile", "Dockerfile.cuda", "Makefile", "pyproject.toml")
READ = [
    *(ROOT / name for name in FILES),
    *(
        path
        for folder in ("agilerl", "benchmarking", "docs", "tutorials", "tools")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".yaml", ".sh", ".jinja", ".ipynb"}
    ),
]
INSTALLS = re.compile(r"(?:pip3?|uv|uvx|pipx)[\"']?(?: pip)? (?:install|add|run|tool) +(?P<what>[^`|\n#;&]*)")
"""An install line, from its first argument to the end of the line or of the code."""
BY_NAME = re.compile(r"""(?<![\w./-])agilerl(?=[\s\[=<>~!"'`]|$)""")
"""The name of the import where that of a distribution belongs."""
EXTRAS = re.compile(r"""(?:lora-evolution|["'. ]\.)\[([\w,-]+)\]|how_to_install\(["']([\w-]+)["']\)""")


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def install_lines() -> list[tuple[str, str]]:
    return [(f"{p.relative_to(ROOT)}", m["what"]) for p in READ for line in lines(p) for m in INSTALLS.finditer(line)]


def test_the_distribution_has_a_name_of_its_own():
    assert PROJECT["name"] == DISTRIBUTION == "lora-evolution"


def test_nothing_is_installed_by_the_name_of_another_project():
    wrong = ("pip install 'agilerl[ray]'", "pip install agilerl", "uv pip install agilerl", "uv add agilerl==1")
    for line in wrong:
        (found,) = INSTALLS.finditer(line)
        assert BY_NAME.search(found["what"])
    said = install_lines()
    assert len(said) > 30
    assert [(place, what) for place, what in said if BY_NAME.search(what)] == []


def test_pages_that_name_the_distribution_say_what_to_do_until_it_is_on_pypi():
    pages = [p for p in READ if p.parent.name == "docs" and p.name != "install.md"]
    # An error in a table of results is no instruction.
    naming = [
        p for p in pages if any(f"{DISTRIBUTION}[" in line.partition("is not installed:")[0] for line in lines(p))
    ]
    assert naming
    assert [p.name for p in naming if "(install.md#extras)" not in p.read_text(encoding="utf-8")] == []
    assert "## Extras\n" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("not on PyPI yet")[0]


def extras_said() -> list[str]:
    found = {match for path in READ for line in lines(path) for match in EXTRAS.findall(line)}
    return sorted({name for pair in found for names in pair if names for name in names.split(",")})


@pytest.mark.parametrize("extra", extras_said())
def test_what_is_to_be_installed_exists(extra: str):
    assert extra in PROJECT["optional-dependencies"]
    assert how_to_install(extra) == f"pip install 'lora-evolution[{extra}]'"


def test_every_extra_is_said_somewhere():
    assert set(PROJECT["optional-dependencies"]) - set(extras_said()) == set()


def test_files_that_install_lines_name_exist():
    named = {word for _, what in install_lines() for word in what.split() if word.endswith(".txt")}
    assert {"constraints.txt"} <= named
    assert [word for word in named if not (ROOT / word).is_file()] == []


def test_the_messages_share_one_home_for_it():
    said = [
        path.relative_to(ROOT)
        for path in READ
        if path.suffix == ".py" and f"install '{DISTRIBUTION}[" in path.read_text()
    ]
    assert said == []


# -- another distribution's files among ours --------------------------------------------------------------------------


def started(place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=place, env={"PYTHONPATH": str(place)}, capture_output=True, text=True)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that the package is installed in."""
    shutil.copytree(ROOT / "agilerl", tmp_path / "agilerl", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.processes
def test_the_import_says_that_another_distribution_is_in_its_folder(site: Path):
    assert started(site, "-c", "import agilerl").stderr == ""
    (site / "agilerl-2.58.0.dist-info").mkdir()
    (site / "agilerl_arena-1.0.dist-info").mkdir()  # a distribution with another name
    said = started(site, "-c", "import agilerl")
    assert said.returncode == 0
    assert "UserWarning: the distribution agilerl 2.58.0 has put its files" in said.stderr
    assert "pip uninstall --yes agilerl lora-evolution" in said.stderr
    shown = started(site, "-m", "agilerl", "--version")
    assert "agilerl 2.58.0" in shown.stdout.partition("platform")[0]


@pytest.mark.processes
def test_commands_refuse_to_run_on_another_projects_modules(site: Path):
    (site / "agilerl" / "__init__.py").write_text("__version__ = '2.58.0'\n")
    for command in (("--version",), ("train", "--dry-run"), ("--help",)):
        said = started(site, "-m", "agilerl", *command)
        assert (said.returncode, said.stdout) == (2, "")
        assert said.stderr.startswith("error: agilerl is another project's package in ")
        assert said.stderr.count("\n") == 1


# -- systems that lack what Linux has ---------------------------------------------------------------------------------


LACKING = """
import importlib, os, pkgutil, signal, sys
import torch, transformers, peft, filelock, accelerate  # libraries, which have their own ways
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_PATH", "sysconf",
             "sched_getaffinity", "pread", "pwrite", "killpg", "setsid", "geteuid", "getuid", "getegid"):
    delattr(os, name)
for name in ("SIGHUP", "SIGPIPE", "SIGALRM", "SIGKILL", "SIGCHLD", "setitimer"):
    delattr(signal, name)
import agilerl
inside = ("agilerl.__main__", "agilerl.cli.__main__", "agilerl.rewards.sandbox_child", "agilerl.rewards.worker")
for module in pkgutil.walk_packages(agilerl.__path__, "agilerl."):
    if module.name not in inside:  # programs, the last two for processes that such a system cannot start
        importlib.import_module(module.name)
from agilerl.errors import RewardError
from agilerl.rewards.sandbox import run_python
try:
    run_python("print(1)")
except RewardError as error:
    print(error)
from agilerl.cli import main
sys.argv = ["agilerl", "train", "training.max_steps=128", "training.pop_size=1", "environment.eval_prompts=8",
            "environment.test_prompts=4", "environment.data_batch_size_per_gpu=8", "--out", "run"]
main()
"""


@pytest.mark.processes
def test_a_run_needs_nothing_that_only_posix_has(tmp_path: Path):
    (tmp_path / "try.py").write_text(LACKING)
    done = subprocess.run([sys.executable, "try.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("graders in processes of their own need Linux or macOS")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["elite"]["n"] == 4
    assert (tmp_path / "run" / "elite" / "adapter_model.safetensors").exists()


def test_no_module_that_is_imported_needs_posix():
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "agilerl").rglob("*.py"))
        for line in lines(path)
        if re.match(r"(import|from) (fcntl|resource|termios|pwd|grp|pty)\b", line)
    ]
    # They run as processes of their own, on Linux and macOS.
    assert found == ["agilerl/rewards/sandbox_child.py: import resource", "agilerl/rewards/worker.py: import resource"]
