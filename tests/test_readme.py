"""The README and the guides do what they say: Python runs, commands run or parse, links lead somewhere."""

import ast
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agilerl.cli.app import app
from agilerl.config.manifest import load_manifest
from tests import programs
from tests.report.synthetic_run import make_run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUB_NAME = re.compile(r"network\.pretrained_model_name_or_path=\w+/[\w.-]+")
PROGRAMS = {"agilerl", "make", "pip", "python3", "git", "cd", "source", ".ci/run"}


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.join(split) for line in lines if (split := shlex.split(line, comments=True))]


def words(command: str) -> list[str]:
    """Split as the shell does; programs of the environment lose their folder."""
    program, *rest = shlex.split(command)
    return [program.removeprefix(".venv/bin/"), *rest]


def all_of(program: str) -> list[str]:
    return sorted({line for page in PAGES for line in commands(page) if words(line)[0] == program})


def scripts() -> list[tuple[str, str]]:
    return [(f"{page.stem}-{number}", code) for page in PAGES for number, code in enumerate(blocks(page, "python"))]


CHECKS = {
    # The adapter on disk is the elite: PEFT gives its logits, and they are not those of the base.
    "README-0": """
import torch
ids = torch.arange(1, 40)[None]
with torch.no_grad(), elite.select_adapter("actor"):
    own = runtime.base.model(input_ids=ids).logits
with torch.no_grad():
    loaded = policy(input_ids=ids).logits
    with policy.disable_adapter():
        bare = policy(input_ids=ids).logits
assert float((own - loaded).abs().max()) < 1e-5
assert float((own - bare).abs().max()) > 1e-2
assert after.mean > before.mean + 0.1, (before, after)
""",
}
"""What is checked at the end of a script, besides that it runs."""


@pytest.mark.parametrize(("name", "code"), scripts(), ids=[name for name, _ in scripts()])
@pytest.mark.processes
def test_python_runs(name: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code + CHECKS.get(name, ""))
    done = programs.run(script, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [code for page in PAGES for code in blocks(page, "text") if re.match(r"import |from ", code)],
    ids=lambda code: code.splitlines()[0],
)
def test_python_that_needs_more_than_a_cpu_names_what_exists(code: str) -> None:
    """It stands in ``text`` blocks, because it does not run here."""
    names: dict[str, object] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name: import_module(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name: pkgutil.resolve_name(f"{node.module}:{alias.name}") for alias in node.names}
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and (called := named_by(call.func, names)) is not None:
            inspect.signature(called).bind_partial(**{keyword.arg: None for keyword in call.keywords if keyword.arg})


def named_by(node: ast.expr, names: dict[str, object]) -> Callable[..., object] | None:
    """Return what a dotted name stands for, None for what the code itself defines."""
    first, *rest = ast.unparse(node).split(".")
    return reduce(getattr, rest, names[first]) if first in names else None  # type: ignore[return-value]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the manifests of the tutorials and of the pages, and the rows that some of them name."""
    shutil.copytree(ROOT / "tutorials" / "manifests", tmp_path / "tutorials" / "manifests")
    for name, columns in (("rows.jsonl", ("question", "answer")), ("more.jsonl", ("problem", "solution"))):
        rows = ({columns[0]: f"{name} {i}", columns[1]: str(i)} for i in range(64))
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for page in PAGES:
        for text in blocks(page, "yaml"):
            if name := re.match(r"# (\w+\.yaml)\n", text):
                (tmp_path / name[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in all_of("agilerl") if words(c)[1] == "train" and not HUB_NAME.search(c)])
def test_train_commands_pass_every_check(command: str, workplace: Path) -> None:
    for option, schedule in itertools.pairwise(words(command)):
        if option == "--replay":
            make_run(workplace / "found")
            CliRunner().invoke(app, ["schedule", "found", "--out", schedule], catch_exceptions=False)
    done = CliRunner().invoke(app, [*words(command)[1:], "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "Dry run: everything checked, nothing written." in done.output
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize("command", [c for c in all_of("agilerl") if HUB_NAME.search(c)])
def test_train_commands_with_a_model_of_the_hub_are_valid_manifests(command: str) -> None:
    overrides = [word for word in words(command) if "=" in word]
    assert load_manifest(None, overrides).network.pretrained_model_name_or_path in command


IN_ORDER = ROOT / "docs" / "after_the_run.md"
"""A page whose commands are about a run that it makes; tests/cli/test_after.py runs them one after another."""


@pytest.mark.parametrize(
    "command", [c for c in all_of("agilerl") if words(c)[1] != "train" and c not in commands(IN_ORDER)]
)
def test_other_commands_run(command: str, workplace: Path) -> None:
    for run in (word for word in words(command)[2:] if word.startswith("runs/")):
        make_run(workplace / run)
    done = CliRunner().invoke(app, words(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output


@pytest.mark.parametrize("command", all_of("make"))
@pytest.mark.processes
def test_make_targets_exist(command: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    plan = subprocess.run([*words(command), "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr


def test_installation_commands_name_what_is_there() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all_of("pip")
    for command in all_of("pip"):
        install, *rest = words(command)[1:]
        assert install == "install"
        assert all((ROOT / after).exists() for word, after in itertools.pairwise(rest) if word == "-c")
        assert all(f'"{word}"' in pyproject or word in pins for word in rest if word.startswith("torch"))


def test_no_command_goes_unchecked() -> None:
    assert {words(line)[0] for page in PAGES for line in commands(page)} <= PROGRAMS
    assert {language for page in PAGES for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))} <= {
        "bash",
        "python",
        "py",  # a program of another library, which is shown and not run
        "text",
        "yaml",
        "json",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        aim = page.parent / path if path else page
        assert aim.exists(), target
        headings = {
            re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.*)$", aim.read_text(encoding="utf-8") if anchor else "", re.MULTILINE)
        }
        assert not anchor or anchor in headings, target


def test_the_index_names_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT) for page in PAGES if page.suffix == ".md"]
    assert [str(page) for page in pages if f"]({page})" not in text] == []


def test_the_readme_has_the_ten_keys_with_values_that_they_take() -> None:
    text, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/ten_keys.md"))
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `([^`]+)` \|", text, re.MULTILINE)
    assert [key for key, _ in rows] == re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE)
    load_manifest(None, [f"{key}={value}" for key, value in rows])


@pytest.mark.parametrize("trainer", ["agilerl", "harmony", "trl", "tunix"])
def test_what_is_better_is_tested(trainer: str) -> None:
    page = (ROOT / "docs" / f"coming_from_{trainer}.md").read_text(encoding="utf-8")
    section = page.split("## What is better here\n", 1)[1].split("\n## ", 1)[0]
    statements = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert statements
    for statement in statements:
        (file, test) = re.findall(r"`(tests/\S+\.py)::(\w+)` \|$", statement)[0]
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), statement


def test_silent_failures_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "silent_failures.md").read_text(encoding="utf-8")
    statements = [line for line in page.splitlines() if line.startswith("| **")]
    assert len(statements) > 25
    for statement in statements:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", statement.rsplit(" | ", 1)[1])
        assert named, statement
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)


def site_pages(entry: object) -> list[str]:
    """Return the files that a part of the site's navigation names."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in site_pages(part)]  # type: ignore[attr-defined]


def test_the_site_names_every_page_once() -> None:
    pages = site_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(pages) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_reference_names_what_exists() -> None:
    entry = re.compile(r"^::: (\S+)\n(?:    options:\n(?:      .*\n)*?      members: \[(.*)\])?", re.MULTILINE)
    named = entry.findall((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, members in named:
        found = pkgutil.resolve_name(path)
        assert [name for name in members.split(", ") if name and not hasattr(found, name)] == [], path


def test_ten_keys_are_ten_and_all_in_the_manifest_that_shows_them() -> None:
    page = ROOT / "docs" / "ten_keys.md"
    keys = re.findall(r"^\| `(\w+)\.(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    (manifest,) = blocks(page, "yaml")
    shown = yaml.safe_load(manifest)
    assert len(keys) == 10
    assert [f"{section}.{key}" for section, key in keys if key not in shown[section]] == []


@pytest.mark.nightly
@pytest.mark.processes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Downloads MkDocs into an environment of its own; `make docs` is the same."""
    done = subprocess.run(
        ["make", "docs", f"DOCS_VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    pages = (ROOT / "build" / "site").glob("*.html")
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {page.stem for page in pages}


@pytest.mark.processes
def test_manifest_reference_is_fresh() -> None:
    """`make generated` writes it."""
    done = programs.run(ROOT / "docs" / "generate_reference.py", "--print", cwd=ROOT)
    assert done.stdout == (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
