"""A user's type checker sees the package, installed for work on it or from a wheel, and the keywords of its agents."""

import re
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms import keywords as typed
from agilerl.compat.agents import ALIASES
from tests import programs

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """\
from agilerl import GRPO
from agilerl.algorithms import CISPO, DPO, PPO, REINFORCE

GRPO(0, "pad", lr=1e-5, group_size=8, clip_coef=(0.8, 1.28), use_vllm=False)
GRPO.dapo(model_name="embedded", max_output_tokens=16, beta=0.0)
CISPO(model_name="embedded", clip_max=4.0, loss=None)
DPO(model_name="embedded", loss_type=("sigmoid", "sft"))
GRPO(model_name="embedded", lrr=1e-5)  # wrong
GRPO(model_name="embedded", lr="much")  # wrong
CISPO(model_name="embedded", dual_clip=3.0)  # wrong
PPO(model_name="embedded", lr=1e-5)  # wrong
GRPO.dr_grpo(group_sise=4)  # wrong
REINFORCE.plus_plus(gama=0.9)  # wrong
"""
WRONG = {number for number, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith("# wrong")}
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# What the package imports takes mypy minutes to read, and nothing of it is in question.
MYPY_INI = "[mypy]\nfollow_imports = normal\n" + "".join(
    f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    for name in ("torch", "numpy", "pydantic", "transformers", "peft", "datasets", "jinja2", "httpx2", "rich", "typer")
)


BUILDS = ("build_editable", "build_wheel")
ALWAYS = (("build_editable", "mypy"), ("build_wheel", "pyright"))
"""Each way of building and each type checker; the other pairs say no more."""


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the package in this way, and what it imports from here."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "checkout"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "agilerl", source / "agilerl", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BUILD, request.param, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    venv.create(folder / "venv", symlinks=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    (site / "others.pth").write_text(str(Path(pytest.__file__).parent.parent))
    return folder / "venv" / "bin" / "python"


def lines(output: str) -> set[int]:
    """Return the lines of the user's script in which an error was found."""
    return {int(number) for number in re.findall(r"user\.py:(\d+)(?::\d+)?(?: -|:) error", output)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("python", "checker"),
    [
        pytest.param(build, checker, marks=() if (build, checker) in ALWAYS else pytest.mark.nightly)
        for build in BUILDS
        for checker in ("mypy", "pyright")
    ],
    indirect=["python"],
)
@pytest.mark.processes
def test_a_misspelt_keyword_is_an_error(checker: str, python: Path, tmp_path: Path) -> None:
    if checker == "pyright" and find_spec("pyright") is None:
        pytest.skip("pyright is not installed; `make setup` installs it")
    (tmp_path / "user.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(MYPY_INI)
    options = {
        "mypy": ["--python-executable", python, "--cache-dir", tmp_path / "cache"],
        "pyright": ["--pythonpath", python],
    }[checker]
    command = [sys.executable, "-m", checker, *options, "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert lines(done.stdout) == WRONG, done.stdout + done.stderr


@pytest.mark.parametrize("name", ALGORITHMS)
def test_typed_keywords_are_those_of_the_signature(name: str) -> None:
    """`make generated` writes them."""
    taken = set(ALGORITHMS[name].defaults())
    accepted = {"wrap", "clone", "calc_position_embeddings", "reduce_memory_peak", "use_liger_loss", *ALIASES}
    assert set(getattr(typed, f"{name}Keywords").__optional_keys__) == taken | accepted


@pytest.mark.processes
def test_typed_keywords_are_fresh() -> None:
    printed = programs.run(ROOT / "docs" / "generate_keywords.py", "--print", cwd=ROOT).stdout
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"],
        input=printed,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert formatted == (ROOT / "agilerl" / "algorithms" / "keywords.py").read_text(encoding="utf-8")
